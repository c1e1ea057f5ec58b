"""`headrace bench replay --simulate` from flags to tables, JSON lines and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from serving.__main__ import main
from serving.simulation import scenarios

TRACES = Path(__file__).parents[2] / "data" / "traces"
CONV, CODE = str(TRACES / "azure2023_conv.csv"), str(TRACES / "azure2023_code.csv")
SIZES = ["--page_size=64", "--max_num_seqs=32", "--prefill_token_buckets=512,2048", "--query_block=64"]


def replay(capsys, *argv: str) -> list[dict]:
    assert main(["bench", "replay", "--json", *argv]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_load_and_variant_gets_a_row_with_latencies_beside_its_throughput(capsys):
    chunks = "--prefill_token_buckets=512"
    loads = ["--load=0.5", "--load=4", f"--compare={chunks}", "--slo_ttft_ms=1000", "--slo_tpot_ms=50"]
    rows = replay(capsys, "--simulate", CODE, "--duration_s=40", *SIZES, *loads)
    assert [(row["variant"], row["group"]) for row in rows] == [("base", "all"), (chunks, "all")] * 2
    assert rows[2]["offered_rps"] == pytest.approx(8 * rows[0]["offered_rps"], rel=0.01)
    for row in rows:
        assert row["simulated"] and row["requests"] == row["complete"] > 0
        assert row["goodput_rps"] > 0 and row["output_tokens_per_s"] > 0
        for name in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99"):
            assert row[name] > 0
    assert rows[0]["ttft_ms_p99"] < rows[2]["ttft_ms_p99"]  # the higher load
    assert rows[1]["max_gap_ms_p99"] < rows[0]["max_gap_ms_p99"]  # the smaller chunks
    assert rows[2]["attainment"] <= 1.0


def test_targets_bring_the_controller_and_admission_and_are_what_counts(capsys):
    targets = ["--class_ttft_s=1", "--class_tpot_s=0.05"]
    without = "--slo_control=false --admission_control=false"
    rows = replay(capsys, "--simulate", CONV, "--load=20", f"--compare={without}", *targets, *SIZES)
    controlled, plain = rows
    assert plain["variant"] == without and plain["refused"] == 0 < controlled["refused"]
    assert controlled["admitted_attainment"] > 0.8 > 1.5 * plain["admitted_attainment"]
    assert controlled["good_arrivals_rps"] > 1.3 * plain["good_arrivals_rps"]
    assert controlled["attainment"] < controlled["admitted_attainment"]


def test_requests_of_a_trace_have_the_classes_of_their_priorities(capsys, tmp_path):
    trace = tmp_path / "mixed.csv"
    lines = [f"{i * 20},2000,50,{10 * (i % 2)},tenant{i % 3}" for i in range(200)]
    trace.write_text("\n".join(["arrival_ms,input_tokens,output_tokens,priority,tenant", *lines]))
    classes = ["--class_names=chat", "--class_names=batch", "--class_priorities=0,10", "--class_ttft_s=1,0"]
    rows = replay(capsys, "--simulate", str(trace), *classes, *SIZES)
    assert [row["group"] for row in rows] == ["all", "0", "10"]
    every, chat, batch = rows
    assert chat["ttft_ms_p99"] < 1000 < batch["ttft_ms_p99"]
    assert batch["attainment"] == 1.0 and every["requests"] == 200


def test_a_slower_device_is_slower(capsys):
    argv = ["--simulate", CODE, "--duration_s=10", *SIZES]
    (fast,), (slow,) = replay(capsys, *argv), replay(capsys, *argv, "--base_s=0.05", "--host_ms=10")
    assert slow["tpot_ms_p50"] > 2 * fast["tpot_ms_p50"]


def test_the_table_and_the_page_show_goodput_with_its_latencies(capsys, tmp_path):
    page = tmp_path / "goodput.html"
    argv = ["--simulate", CODE, "--duration_s=10", "--load=1", "--load=2", f"--plot={page}", *SIZES]
    assert main(["bench", "replay", *argv]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 2 and {"ttft_ms_p99", "tpot_ms_p99", "goodput_rps"} <= set(header.split())
    text = page.read_text()
    assert text.count("<svg") == 3 and text.count("<circle") == 6
    assert "http" not in text  # nothing is fetched


def test_a_scenario_prints_a_row_for_each_way_and_its_figures(capsys, monkeypatch):
    monkeypatch.setattr(scenarios, "NUM_USERS", 2)
    *rows, figures = replay(capsys, "--simulate", "--scenario=long_prompt")
    assert [row["variant"] for row in rows if row["group"] == "all"] == list(
        scenarios.SCENARIOS["long_prompt"].variants
    )
    assert figures["scenario"] == "long_prompt" and figures["steady_gap_ms"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "replay needs --simulate"),
        (["--simulate"], "--simulate needs traces, or --scenario"),
        (["--simulate", CONV, "--scenario=overcommit"], "--scenario=overcommit makes its own trace"),
        (["--simulate", "--scenario=overcommit", "--load=2"], r"--load=\[2\.0\] is for traces"),
        (["--simulate", "--scenario=nothing"], "invalid choice: 'nothing'"),
        (["--simulate", CONV, "--model=x"], r"RunConfig\.model='x'"),
        (["--simulate", CONV, "--kv_dtype=int8"], r"EngineConfig\.kv_dtype='int8': replay --simulate does not read it"),
        (["--simulate", CONV, "--compare=--kv_dtype=int8"], r"EngineConfig\.kv_dtype='int8'"),
        (["--simulate", CONV, "--compare=--none=1"], "unrecognized arguments: --none=1"),
        (
            ["--simulate", CONV, "--default_tenant_requests_per_min=5"],
            r"SchedulingConfig\.default_tenant_requests_per_min=5",
        ),
        (
            ["--simulate", "--scenario=overcommit", "--class_ttft_s=1"],
            r"SchedulingConfig\.class_ttft_s=\(1\.0,\) is for",
        ),
        (["--simulate", CONV, "--load=0"], "--load must be above 0"),
        (["--simulate", CONV, "--slo_ttft_ms=0"], "--slo_ttft_ms must be above 0"),
        (["--simulate", CONV, "--base_s=-1"], r"LinearStepTime\.base_s must be >= 0"),
        (["--simulate", CONV, "--steps=3"], "--steps=3 is for decode"),
        (["--simulate", CONV, "--start_s=1e9"], r"--start_s=1000000000\.0 .*no request arrives then"),
        (["--simulate", "nowhere.csv"], "nowhere.csv: No such file"),
    ],
)
def test_what_replay_cannot_do_is_refused_by_name(capsys, argv, message):
    assert main(["bench", "replay", *argv]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_flags_of_replay_are_refused_elsewhere(capsys):
    for flag in (["--simulate", CONV], ["--base_s=1"], ["--json"]):
        assert main(["bench", "decode", "--model=x", *flag]) == 2
        assert "is for replay" in capsys.readouterr().err
