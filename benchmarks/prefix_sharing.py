"""What the prefix cache saves, and what it tells: tokens computed with a shared prefix, and the AUC of a timing attack.

    python benchmarks/prefix_sharing.py --model dummy:FOLDER --prefix_tokens 2048

First, `--num_requests` prompts of one prefix and tails of their own, with the cache and without: tokens computed, seconds,
and whether outputs are the same. Then `--num_guesses` guesses, half of them right, at prompts that another tenant has
cached: the area under the curve of telling right from wrong by the time to the first token (0.5: not at all), under
prefix_cache_scope="tenant", and under "shared" for comparison.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from serving import LLM, SamplingParams
from serving.engine import Engine
from serving.request import RequestContext

FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def make_llm(args: argparse.Namespace, **settings) -> LLM:
    length = args.prefix_tokens + args.tail_tokens + 16
    return LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=length,
        max_num_seqs=16,
        page_size=16,
        prefill_token_buckets=(512,),
        num_pages=16 * (length // 16 + 1) + 1,
        **settings,
    )


def shared_prefix(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(1)
    prefix = rng.integers(8, 300, args.prefix_tokens).tolist()
    prompts = [prefix + rng.integers(8, 300, args.tail_tokens).tolist() for _ in range(args.num_requests)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    outputs, computed = {}, {}
    for is_cached in (True, False):
        llm = make_llm(args, enable_prefix_caching=is_cached)
        started_s = time.monotonic()
        results = llm.generate(prompts, params)
        seconds = time.monotonic() - started_s
        outputs[is_cached] = [result.outputs[0].token_ids for result in results]
        computed[is_cached] = llm.engine.stats()["num_prefill_tokens"]
        name = "with the cache" if is_cached else "without"
        print(f"{name}: {computed[is_cached]:,} prompt tokens computed, {seconds:.1f} s", flush=True)
    saved = 1 - computed[True] / computed[False]
    print(f"saved {saved:.1%}; outputs are the same: {outputs[True] == outputs[False]}")


def first_token_s(engine: Engine, prompt: list[int], tenant: str) -> float:
    started_s = time.perf_counter()
    request_id = engine.add(prompt, FIRST_TOKEN, context=RequestContext(tenant=tenant))
    while engine.has_work():
        engine.step()
    engine.collect(request_id)
    return time.perf_counter() - started_s


def timing_attack(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(2)
    for scope in ("tenant", "shared"):
        engine = make_llm(args, prefix_cache_scope=scope).engine
        times: dict[bool, list[float]] = {True: [], False: []}
        last_s = time.monotonic()
        for number in range(args.num_guesses // 2):
            secret, other = rng.integers(8, 300, (2, args.prefix_tokens)).tolist()
            first_token_s(engine, secret, "victim")
            for is_right in (True, False) if number % 2 else (False, True):
                times[is_right].append(first_token_s(engine, secret if is_right else other, "attacker"))
            if time.monotonic() - last_s > 10:
                last_s = time.monotonic()
                print(f"  {2 * number + 2} of {args.num_guesses} guesses", flush=True)
        right, wrong = np.array(times[True]), np.array(times[False])
        pairs = (right[:, None] < wrong).mean() + 0.5 * (right[:, None] == wrong).mean()
        print(f"prefix_cache_scope={scope}: AUC {pairs:.3f} of {args.num_guesses} guesses", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="model source, as of headrace generate")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefix_tokens", type=int, default=512)
    parser.add_argument("--tail_tokens", type=int, default=16)
    parser.add_argument("--num_requests", type=int, default=100)
    parser.add_argument("--num_guesses", type=int, default=500)
    args = parser.parse_args()
    shared_prefix(args)
    timing_attack(args)


if __name__ == "__main__":
    main()
