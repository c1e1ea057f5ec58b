"""`headrace bench` from flags to JSON lines, on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving import LLM
from serving.__main__ import main
from serving.bench import cases

TINY_CONFIG = Path(__file__).parents[1] / "data" / "tiny" / "config.json"
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, PADDED_VOCAB = 64, 128, 2, 8, 2, 16, 304  # of that file; 301 tokens
LAYER_PARAMS = LAYERS * HIDDEN * ((HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM + 3 * MLP)
HEAD_PARAMS = PADDED_VOCAB * HIDDEN
WEIGHT_BYTES = 4 * (LAYER_PARAMS + HEAD_PARAMS + (2 * LAYERS + 1) * HIDDEN)  # float32, norms included
KV_TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4  # of a layer


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    """The tiny model with room for the longest mixed request (4,096 + 1,024 tokens)."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads(TINY_CONFIG.read_text()) | {"max_position_embeddings": 5120}
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        f"dummy:{folder}",
        dtype="float32",
        max_num_seqs=4,
        page_size=16,
        prefill_token_buckets=(512,),
        query_block=32,
        max_decode_steps=4,
        enable_prefix_caching=False,
        kv_cache_bytes=2**22,
        show_progress=False,
    )


def bench(capsys, llm: Any, command: str, *argv: str) -> list[dict[str, Any]]:
    assert main(["bench", *command.split(), *argv, "--model", "tiny"], llm_factory=lambda *args, **kwargs: llm) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_decode_prints_times_with_bytes_rates_and_a_trace(capsys, llm, tmp_path):
    command = "decode --batch 1 --context 40 --batch 4 --context 24 --steps 12 --repeats 2 --profile_dir"
    ceilings, *lines = bench(capsys, llm, command, str(tmp_path))
    assert ceilings["figure"] == "ceilings" and ceilings["platform"] == "cpu" and ceilings["devices"] == 1
    assert ceilings["read_bytes"] >= 2**26 and ceilings["read_tb_per_s"] > 0 and ceilings["matmul_tflop_per_s"] > 0
    assert [(line["figure"], line["batch"]) for line in lines] == [
        ("decode", 1),
        ("trace", 1),
        ("decode", 4),
        ("trace", 4),
    ]
    for line, (batch, context) in zip(lines[::2], [(1, 40), (4, 24)], strict=True):
        assert len(line["all_step_ms"]) == 2 and line["compiles"] == 0 and line["preemptions"] == 0
        num_keys = batch * LAYERS * (context + 6.5)  # 12 steps see context + 1 to context + 12 keys
        assert line["bytes"] == round(WEIGHT_BYTES + num_keys * KV_TOKEN_BYTES)
        assert line["flops"] == round(2 * batch * (LAYER_PARAMS + HEAD_PARAMS) + 4 * HEAD_DIM * HEADS * num_keys)
        # a step of some 0.1 ms on a busy machine may come out negative: only how figures hang together is checked
        assert line["mbu"] == pytest.approx(line["tb_per_s"] / ceilings["read_tb_per_s"], rel=2e-3)
        assert line["mfu"] == pytest.approx(line["tflop_per_s"] / ceilings["matmul_tflop_per_s"], rel=2e-3)
        assert line["first_token_ms"] > 0
        assert {"host_ms", "floor_ms", "output_tokens_per_s"} <= line.keys()
        assert 0 <= line["device_idle_fraction_min"] <= line["device_idle_fraction_max"] <= 1
        assert line["programs"]["decode(4, 4)"] >= 1
        assert line["kv_pages_filled"] == batch * -(-(context + 12) // 16) < line["kv_pool_pages"]
    for line in lines[1::2]:
        assert line["of"] == "decode" and "no device plane" in line["plane"]
        assert line["steps"] >= 16 and set(line["programs"]) <= {"decode(4, 4)", "decode(4, 1)", "sample(4)"}
        assert 0 < line["busy_ms"] <= line["wall_ms"] and 0 <= line["device_idle_fraction"] < 1
        assert 0.9 < sum(row["share"] for row in line["kernels"]) + line["other_kernels_share"] < 1.1
        assert list(Path(line["folder"]).glob("plugins/profile/*/*.xplane.pb"))
    assert not llm.engine.has_work() and llm.stats()["num_running"] == 0


def test_prefill_prints_flops_and_the_latency_of_each_prompt(capsys, llm, tmp_path):
    command = "prefill --batch 3 --context 600 --repeats 1 --profile_dir"
    ceilings, line, trace = bench(capsys, llm, command, str(tmp_path))
    pairs = 3 * LAYERS * 600 * 601 // 2
    assert line["flops"] == 2 * (3 * 600 * LAYER_PARAMS + 3 * HEAD_PARAMS) + 4 * HEAD_DIM * HEADS * pairs
    assert line["prompt_tokens_per_s"] == pytest.approx(1800 / line["ms"] * 1e3, rel=1e-2)
    assert line["all_ms"] == [line["ms"]] and line["mfu"] > 0
    assert line["mfu"] == pytest.approx(line["tflop_per_s"] / ceilings["matmul_tflop_per_s"], rel=2e-3)
    # 1,824 tokens in rows of 32, at most 512 a step
    assert line["steps"] == 4 and line["bytes"] == 4 * WEIGHT_BYTES
    assert 0 < line["first_token_ms_p50"] <= line["first_token_ms_p99"] <= line["ms"]
    assert trace["of"] == "prefill" and trace["steps"] == 4 and trace["busy_ms"] > 0


def test_mixed_work_is_that_of_the_published_comparison():
    num_input, num_output = cases.mixed_lengths(np.random.default_rng(7), 512)
    assert (num_input.sum(), num_output.sum()) == (316_637, 125_730)


def test_mixed_prints_latencies_beside_its_throughput(capsys, llm):
    _, line = bench(capsys, llm, "mixed --num_requests 3")
    num_input, num_output = cases.mixed_lengths(np.random.default_rng(7), 3)
    assert (line["input_tokens"], line["output_tokens"]) == (num_input.sum(), num_output.sum())
    assert line["output_tokens_per_s"] == pytest.approx(line["output_tokens"] / line["ms"] * 1e3, rel=1e-2)
    for name in ("first_token_ms", "output_token_ms", "request_ms"):
        assert 0 < line[f"{name}_p50"] <= line[f"{name}_p99"] <= line["ms"]
    assert len(line["all_ms"]) == 1 and line["host_ms"] > 0 and line["compiles"] == 0
    assert line["forward_passes"] >= line["dispatches"] > 0
    assert line["bytes"] >= line["forward_passes"] * WEIGHT_BYTES


def test_batching_compares_the_two_ways_on_the_same_requests(capsys, llm, tmp_path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{8 + i},{2 + 5 * i}\n" for i in range(8)))
    static, continuous, ratio = bench(capsys, llm, "batching --num_requests 8 --lengths", str(lengths))
    assert (static["mode"], continuous["mode"]) == ("static", "continuous")
    # outputs 2, 7, ... 37 in two batches of four: all but the first token are decode steps
    assert static["held_slot_steps"] == 4 * 16 + 4 * 36 and continuous["held_slot_steps"] == 148
    assert ratio["held_slot_steps_ratio"] == round(208 / 148, 2)
    assert continuous["request_ms_p50"] > 0 and continuous["compiles"] == 0


def no_llm(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an engine was built for a command line that is refused")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("prefill --steps 4", ["--steps=4", "decode", "prefill does not read it"]),
        ("mixed --steps 4", ["--steps=4", "mixed"]),
        ("batching --repeats 2 --lengths f.csv", ["--repeats=2", "decode, prefill, mixed", "batching"]),
        ("decode --num_requests 9", ["--num_requests=9", "mixed, batching", "decode does not read it"]),
        ("mixed --batch 1 --context 8", ["--batch", "mixed does not read it"]),
        ("decode --lengths f.csv", ["--lengths=f.csv", "batching"]),
        ("mixed --profile_dir d", ["--profile_dir=d", "decode, prefill"]),
        ("decode --steps 0", ["--steps", "at least 1", "0"]),
        ("decode --batch 0 --context 4", ["--batch", "at least 1"]),
        ("decode --batch 2", ["--context", "(1)", "got 0"]),
        ("batching", ["--lengths", "CSV"]),
        ("batching --lengths /nowhere/f.csv", ["--lengths=/nowhere/f.csv"]),
        (f"decode --profile_dir {TINY_CONFIG}", ["--profile_dir", "not a folder"]),
    ],
)
def test_flags_that_a_figure_does_not_read_are_refused_before_an_engine_is_built(capsys, argv, parts):
    assert main(["bench", *argv.split(), "--model", "tiny"], llm_factory=no_llm) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert [part for part in parts if part not in captured.err] == [], captured.err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("decode --batch 5 --context 8", "--batch=5 is above EngineConfig.max_num_seqs=4"),
        ("decode --batch 1 --context 5000", "exceeds the context of 5120"),
        ("decode --batch 4 --context 4900", "--batch=4 --context=4900 fills"),
    ],
)
def test_case_that_the_engine_cannot_run_at_once_is_refused(capsys, llm, argv, part):
    assert main(["bench", *argv.split(), "--model", "tiny"], llm_factory=lambda *args, **kwargs: llm) == 2
    captured = capsys.readouterr()
    assert part in captured.err and captured.out == ""
