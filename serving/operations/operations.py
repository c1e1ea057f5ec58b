"""Everything that watches one engine, put together as OperationsConfig says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from configs.operations import OperationsConfig
from serving.metrics import EngineMetrics
from serving.operations.json_log import RequestLog, use_json_logs
from serving.operations.tracing import RequestTracer, otlp_provider
from serving.operations.watchdog import Watchdog

if TYPE_CHECKING:
    from serving.bench.figures import Ceilings
    from serving.engine import Engine


class Operations:
    """Metrics, watchdog, request log and traces of an engine that is built and does not step yet. `close` it when done.

    is_ready: whether the server takes requests; None: whenever the engine is alive. Raises ConfigError where an
    extra is missing.
    """

    def __init__(
        self,
        engine: Engine,
        config: OperationsConfig,
        *,
        model_name: str,
        engine_index: int = 0,
        is_ready: Callable[[], bool] | None = None,
    ):
        self.watchdog = Watchdog(config.stuck_step_s, now=engine.now)
        self._provider: Any = None if config.otlp_endpoint is None else otlp_provider(config.otlp_endpoint)
        self.metrics = EngineMetrics(
            engine,
            config,
            model_name=model_name,
            engine_index=engine_index,
            ceilings=_ceilings(engine) if config.measure_peaks else None,
            is_ready=is_ready,
            is_stuck=lambda: self.watchdog.is_stuck,
        )
        engine.observers += (self.watchdog,)
        if self._provider is not None:
            engine.observers += (RequestTracer(model_name, self._provider, now=engine.now),)
        if config.json_logs:
            use_json_logs()
            engine.observers += (RequestLog(),)
        self.watchdog.start()

    def close(self) -> None:
        """End the watchdog's thread and send the spans that wait."""
        self.watchdog.close()
        if self._provider is not None:
            self._provider.shutdown()


def _ceilings(engine: Engine) -> Ceilings:
    from serving.bench.ceilings import measure_ceilings

    runner = engine.runner
    return measure_ceilings(runner.mesh.devices.flat[0], engine.config.dtype, max(runner.ledger.slack, 0))
