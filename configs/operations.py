"""OperationsConfig: what an operator watches a server by. Nothing in it alters a token."""

from __future__ import annotations

from dataclasses import dataclass

from configs.checks import check_bool, check_float, check_int, fail


@dataclass(frozen=True, kw_only=True)
class OperationsConfig:
    """Targets and prices of metrics, and what else is watched and told. Raises ConfigError."""

    ttft_slo_s: float = 2.0  # seconds to the first token that a request should take at most
    tpot_slo_s: float = 0.05  # seconds for each further token, on average over the request: 20 tokens/s to a reader
    gpu_hour_usd: float = 0.0  # price of one device for an hour; 0: no cost is estimated
    max_tenants: int = 64  # tenants with series of their own; those that come later share one, "other"
    stuck_step_s: float = 60.0  # a step that takes longer is reported as stuck
    measure_peaks: bool = True  # time the device at start, so that MFU and MBU can be given
    # URL that spans are sent to, such as http://localhost:4318/v1/traces; None: no spans
    otlp_endpoint: str | None = None
    json_logs: bool = False  # log one JSON object a line, with a line for each request

    def __post_init__(self) -> None:
        check_float(self, "ttft_slo_s", above=0.0)
        check_float(self, "tpot_slo_s", above=0.0)
        check_float(self, "gpu_hour_usd", minimum=0.0)
        check_int(self, "max_tenants", minimum=1, maximum=10_000)
        check_float(self, "stuck_step_s", above=0.0)
        check_bool(self, "measure_peaks")
        check_bool(self, "json_logs")
        endpoint = self.otlp_endpoint
        if endpoint is not None and not (isinstance(endpoint, str) and endpoint.startswith(("http://", "https://"))):
            fail(self, "otlp_endpoint", "must be an URL that begins with http:// or https://")
