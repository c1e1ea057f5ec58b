"""An engine in its thread with everything that watches it: who asked, what was logged, and a step that hangs."""

from __future__ import annotations

import asyncio
import json
import logging
import threading

import pytest

from configs.checks import ConfigError
from configs.operations import OperationsConfig
from serving import AsyncEngine, SamplingParams
from serving.operations.operations import Operations
from serving.operations.trace_context import parse_trace_context
from serving.request import RequestContext
from serving.status import status_snapshot

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(tiny_llm):
    yield tiny_llm.engine
    tiny_llm.engine.observers = ()


async def ask(server, **kwargs):
    return [item async for item in server.generate([1, 2, 3], GREEDY, **kwargs)][-1][1]


def test_who_asks_reaches_metrics_and_logs_and_the_prompt_does_not(engine, capfd):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        operations = Operations(engine, OperationsConfig(json_logs=True, measure_peaks=False), model_name="tiny")
        server = AsyncEngine(engine)
        trace = parse_trace_context("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
        context = RequestContext(tenant="acme", operation="chat", trace=trace)
        output = asyncio.run(ask(server, request_id="mine", context=context))
        server.close()
        operations.close()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    (line,) = (line for line in lines if line["event"] == "request_finished")
    assert (line["request_id"], line["tenant"], line["operation"]) == ("mine", "acme", "chat")
    assert line["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736" and line["finish_reasons"] == ["length"]
    assert line["num_prompt_tokens"] == 3 and line["num_output_tokens"] == 6
    assert str(output.outputs[0].token_ids)[1:-1] not in str(lines)
    assert operations.metrics.values()["headrace_tenant_prompt_tokens_total"] == {("acme",): 3}


def test_a_hung_step_is_seen_and_forgotten_once_it_returns(engine, monkeypatch):
    operations = Operations(engine, OperationsConfig(measure_peaks=False), model_name="tiny")
    server, hang, step = AsyncEngine(engine), threading.Event(), engine._step

    def hanging_step():
        hang.wait(60.0)
        return step()

    monkeypatch.setattr(engine, "_step", hanging_step)

    async def main():
        task = asyncio.create_task(ask(server))
        with monkeypatch.context() as patch:
            patch.setattr(operations.watchdog, "stuck_step_s", 0.05)
            while not operations.watchdog.is_stuck:
                operations.watchdog.check()
                await asyncio.sleep(0.01)
        states = [status_snapshot(engine, operations.metrics)["state"]]
        states.append(operations.metrics.values()["headrace_step_stuck"][()])
        hang.set()
        output = await task
        return states, output

    states, output = asyncio.run(main())
    server.close()
    operations.close()
    assert states == ["stuck", 1.0] and len(output.outputs[0].token_ids) == 6
    assert status_snapshot(engine, operations.metrics)["state"] == "ready"
    assert operations.watchdog.num_stuck_steps == 1


def test_peaks_are_measured_where_asked_for_and_compile_nothing_while_serving(engine):
    operations = Operations(engine, OperationsConfig(), model_name="tiny")
    request_id = engine.add([1, 2, 3], GREEDY)
    while engine.has_work():
        engine.step()
    engine.collect(request_id)
    operations.close()
    values = operations.metrics.values()
    assert values["headrace_peak_flops_per_second"][()] > 0 and values["headrace_mbu"][("decode",)] > 0
    assert values["headrace_compiles_total"] == {(): 0.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"ttft_slo_s": 0},
        {"tpot_slo_s": float("nan")},
        {"gpu_hour_usd": -1.0},
        {"max_tenants": 0},
        {"stuck_step_s": 0.0},
        {"measure_peaks": 1},
        {"json_logs": "yes"},
        {"otlp_endpoint": "localhost:4317"},
        {"otlp_endpoint": 5},
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(ConfigError, match=f"OperationsConfig.{name}"):
        OperationsConfig(**fields)
