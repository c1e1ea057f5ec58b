"""How soon a refusal comes: milliseconds of the 429s of admission control, over HTTP from a saturated server.

  python benchmarks/admission_latency.py [--seconds 20] [--rate 200]

Starts a server of a tiny model on this machine, whose only device it is, and sends completions at random at `--rate` a
second, each on its own as a client would. Prints JSON: what was answered and refused, and percentiles of the time from
sending to the last byte, of refusals as clients see them (`refusal_ms`) and of /health beside them, which asks nothing
of the engine. Where the clients need the server's cores, both figures are those of the machine, not of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np

ROOT = Path(__file__).parents[1]
SERVER = (
    f"--model=dummy:{ROOT / 'tests' / 'data' / 'tiny'} --dtype=float32 --port=0 --max_model_len=256 --max_num_seqs=4 "
    "--num_pages=129 --page_size=8 --prefill_token_buckets=32 --query_block=16 --class_ttft_s=0.5 --class_tpot_s=0.2"
).split()
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
HEALTH_EVERY = 4  # completions
WARM_S = 3.0  # under load, before anything counts


async def ask(http: httpx.AsyncClient, rng: random.Random) -> tuple[int, float, str]:
    body = {
        "prompt": [rng.randrange(1, 200) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
    }
    started_s = time.perf_counter()
    answer = await http.post("/v1/completions", json=body)
    return answer.status_code, time.perf_counter() - started_s, answer.headers.get("retry-after", "")


async def ask_health(http: httpx.AsyncClient) -> float:
    started_s = time.perf_counter()
    await http.get("/health")
    return time.perf_counter() - started_s


async def load(address: str, seconds: float, rate: float) -> dict[str, object]:
    rng = random.Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        tasks: list[asyncio.Task[tuple[int, float, str]]] = []
        warm_s = time.perf_counter() + WARM_S
        health: list[asyncio.Task[float]] = []
        until_s, num_warm = warm_s + seconds, 0
        while (now_s := time.perf_counter()) < until_s:
            if now_s < warm_s:
                num_warm = len(tasks) + 1
            elif len(tasks) % HEALTH_EVERY == 0:
                health.append(asyncio.create_task(ask_health(http)))
            tasks.append(asyncio.create_task(ask(http, rng)))
            await asyncio.sleep(rng.expovariate(rate))
        answers, health_s = (await asyncio.gather(*tasks))[num_warm:], await asyncio.gather(*health)
    refused_s = [seconds for status, seconds, _ in answers if status == 429]
    figures: dict[str, object] = {
        "sent": len(answers),
        "answered": sum(status == 200 for status, _, _ in answers),
        "refused": len(refused_s),
        "with_retry_after": sum(bool(retry) for status, _, retry in answers if status == 429),
    }
    for name, times_s in (("refusal_ms", refused_s), ("health_ms", health_s)):
        for share in (50, 99):
            figures[f"{name}_p{share}"] = round(1e3 * float(np.percentile(times_s, share)), 2) if times_s else None
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    args = parser.parse_args()
    command = [sys.executable, "-m", "serving", "serve", *SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            for line in server.stdout:
                address = re.search(r"http://\S+?:\d+", line)
                if address is not None and "is ready" in line:
                    print(json.dumps(asyncio.run(load(address[0], args.seconds, args.rate))))
                    break
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
