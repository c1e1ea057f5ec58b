"""What the doors cost: output tokens/s of streaming clients beside the same engine called directly, in one run.

    python benchmarks/streaming_overhead.py --model=dummy:tests/data/tiny --dtype=float32 --max_num_seqs=64 \\
        --max_model_len=1024 [--simulated_step_ms=8] [--door=http-chat ...] [engine flags]
    python benchmarks/streaming_overhead.py --model=dummy:benchmarks/models/llama-3.1-8b --max_num_seqs=64 \\
        --max_model_len=2048 --decode_slot_buckets=8,32,64 --prefill_token_buckets=512,2048 --tokens=1024

One process holds what `headrace serve` holds: the engine in its thread, metrics, and HTTP and gRPC in one event loop.
--clients streams at once, each on its own connection, from --client_processes other processes (`stream_clients.py`), which
take their share of a small machine's processors. In each of --rounds rounds the engine first runs the same requests by
itself, its steps called in a row as `LLM.generate` does, then answers them through each door. Both are timed from the
requests as text, or messages, to the last token. Rounds' ratios are compared, so that what else the machine does falls on
both. Requests take --tokens tokens whatever they are. A model without a tokenizer gets one in which every token has a text.

`loop_us` is the processor's time of the event loop's thread for each chunk sent, `loop_ms_a_dispatch` and
`engine_ms_a_dispatch` that of the loop's and the engine's thread for each dispatch: where both together are less than a
device's step, and the machine has processors to spare, streams cost a device no time. `server_cpu_s` is of all threads of
the server, the computing of a CPU "device" included; `clients_cpu_s` of the clients.

--simulated_step_ms puts a simulated device (`simulated_device.py`) under the engine: steps of a fixed time in which the
host is free. Nothing is computed, so --model should be small then: its figures say what the host costs, not what a device
does. Ends with status 1 where an answer is not whole.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

from configs.operations import OperationsConfig
from configs.server import ServerConfig
from serving.api.grpc_server import GrpcServer
from serving.api.http_server import HttpServer, build_app
from serving.api.service import Service
from serving.async_engine import AsyncEngine
from serving.cli.parser import add_engine_flags, configs_from
from serving.cli.serve import SWITCH_INTERVAL_S
from serving.engine import Engine, build_engine
from serving.operations.operations import Operations
from serving.proto.v1 import serving_pb2 as pb
from serving.text.byte_level import CHARACTER_OF_BYTE
from serving.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1]
DOORS = ("http-completions", "http-chat", "grpc-completions", "grpc-chat")
HTTP_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """The 256 bytes, then words with a number."""
    tokens = [CHARACTER_OF_BYTE[byte] for byte in range(256)]
    tokens += ["he", *(f"{CHARACTER_OF_BYTE[ord(' ')]}w{index}" for index in range(257, vocab_size))]
    tokenizer = load_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.eos_token_id": vocab_size - 1,
            "tokenizer.chat_template": TEMPLATE,
        }
    )
    assert tokenizer is not None
    return tokenizer


def texts(args: argparse.Namespace, round_index: int) -> list[str]:
    """Prompts that share no page with each other or with those of another round."""
    return [
        f"{round_index} {client} {'once upon a time ' * args.prompt_chars}"[: args.prompt_chars]
        for client in range(args.clients)
    ]


def body_of(api: str, text: str, num_tokens: int) -> dict[str, Any]:
    prompt = {"prompt": text} if api == "completions" else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}


def grpc_body(api: str, body: dict[str, Any]) -> str:
    fields = {**body, "stream_options": pb.StreamOptions(include_usage=True)}
    if api == "completions":
        fields["prompt"] = [pb.Prompt(text=body["prompt"])]
        message = pb.GenerateRequest(completion=pb.CompletionRequest(**fields))
    else:
        fields["messages"] = [pb.ChatMessage(**message) for message in body["messages"]]
        message = pb.GenerateRequest(chat=pb.ChatRequest(**fields))
    return base64.b64encode(message.SerializeToString()).decode()


def thread_cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


class Direct:
    """The engine's own calls, while its thread waits for a first request."""

    def __init__(self, engine: Engine, service: Service):
        self.engine, self.service = engine, service

    def run(self, api: str, prompts: list[str], num_tokens: int) -> float:
        """Seconds."""
        engine, started_s = self.engine, time.perf_counter()
        num_left = 0
        for text in prompts:
            body = body_of(api, text, num_tokens)
            if api == "completions":
                call: Any = self.service.parse_completion(body)
                prompt: Any = text
            else:
                call = self.service.parse_chat(body)
                prompt = engine.render_chat(body["messages"], **call.template_args.as_keywords())
            engine.add_checked(engine.check(prompt, call.params))
            num_left += 1
        num_out = 0
        while num_left:
            for delta in engine.step():
                if delta.request_finished:
                    num_out += len(engine.collect(delta.request_id).outputs[0].token_ids)
                    num_left -= 1
        while engine.has_work():
            engine.step()
        assert num_out == len(prompts) * num_tokens
        return time.perf_counter() - started_s


class ClientProcess:
    """`stream_clients.py`; started before this process has threads."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "benchmarks/stream_clients.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Streaming:
    def __init__(
        self, args: argparse.Namespace, processes: list[ClientProcess], ports: dict[str, int], engine: AsyncEngine
    ):
        self.args, self.processes, self.ports, self.counters = args, processes, ports, engine.engine.counters
        self.threads = (threading.current_thread(), engine._thread)  # of the event loop and of the engine

    async def run(self, door: str, prompts: list[str]) -> dict[str, Any]:
        kind, _, api = door.partition("-")
        path = HTTP_PATHS[api] if kind == "http" else "/serving.v1.Serving/Generate"
        requests = []
        for text in prompts:
            body = body_of(api, text, self.args.tokens)
            wire = json.dumps({**body, "stream_options": {"include_usage": True}})
            requests.append(
                {
                    "door": kind,
                    "address": ["127.0.0.1", self.ports[kind]],
                    "path": path,
                    "body": wire if kind == "http" else grpc_body(api, body),
                }
            )
        processes = self.processes
        for index, process in enumerate(processes):
            process.send(json.dumps(requests[index :: len(processes)]))
        await asyncio.gather(*(asyncio.to_thread(process.receive) for process in processes))
        before, process_s = self._thread_times(), time.process_time()
        for process in processes:
            process.send("go")
        lines = [
            json.loads(line)
            for line in await asyncio.gather(*(asyncio.to_thread(process.receive) for process in processes))
        ]
        process_s = time.process_time() - process_s
        loop_s, engine_s, num_dispatches = (now - then for now, then in zip(self._thread_times(), before, strict=True))
        results = [result for line in lines for result in line["results"]]
        bad = [r for r in results if r["num_tokens"] != self.args.tokens or r["status"] not in ("200", "0")]
        if bad:
            raise SystemExit(f"{door}: {len(bad)} answers are not whole, the first: {bad[0]}")
        num_chunks = sum(result["num_events"] for result in results)
        seconds = max(r["end_s"] for r in results) - min(r["sent_s"] for r in results)
        return {
            "seconds": seconds,
            "chunks": num_chunks,
            "loop_us": loop_s / num_chunks * 1e6,
            "loop_ms_a_dispatch": loop_s / num_dispatches * 1e3,
            "engine_ms_a_dispatch": engine_s / num_dispatches * 1e3,
            "server_cpu_s": process_s,
            "clients_cpu_s": sum(line["cpu_s"] for line in lines),
            "first_chunk_s": statistics.median(r["first_s"] - r["sent_s"] for r in results),
        }

    def _thread_times(self) -> tuple[float, float, int]:
        loop_s, engine_s = map(thread_cpu_s, self.threads)
        counters = self.counters
        num_dispatches = (
            counters.num_decode_dispatches + counters.num_mixed_dispatches + counters.num_prefill_dispatches
        )
        return loop_s, engine_s, num_dispatches


async def measure(args: argparse.Namespace, engine: Engine, processes: list[ClientProcess]) -> None:
    config = ServerConfig(port=0, grpc_port=0, served_model_name="model")
    service = Service(config, "model")
    http = HttpServer(build_app(service, version="0"), config, host="127.0.0.1", port=0)
    grpc = GrpcServer(service, host="127.0.0.1", port=0, version="0")
    operations = Operations(engine, OperationsConfig(), model_name="model", is_ready=lambda: service.is_ready)
    async_engine = AsyncEngine(engine)
    service.attach(async_engine, operations)
    serving = [asyncio.ensure_future(door.serve()) for door in (http, grpc)]
    ports = {"http": http.port, "grpc": grpc.port}
    direct, streaming = Direct(engine, service), Streaming(args, processes, ports, async_engine)
    num_tokens = args.clients * args.tokens
    figures: dict[str, list[dict[str, Any]]] = {door: [] for door in args.door}
    try:
        for round_index in range(-1, args.rounds):  # the first is not counted
            for door in args.door:
                prompts = texts(args, round_index)
                await async_engine.reset_prefix_cache()
                alone_s = await asyncio.to_thread(direct.run, door.partition("-")[2], prompts, args.tokens)
                await async_engine.reset_prefix_cache()
                figure = await streaming.run(door, prompts)
                if round_index >= 0:
                    figures[door].append({**figure, "alone_s": alone_s})
        for door, rounds in figures.items():
            print(json.dumps(summary(args, door, rounds, num_tokens)), flush=True)
    finally:
        await asyncio.to_thread(async_engine.close)
        await asyncio.to_thread(operations.close)
        for server in (http, grpc):
            server.stop()
        await asyncio.gather(*serving)
        service.close()


def summary(args: argparse.Namespace, door: str, rounds: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    ratios = sorted(figure["alone_s"] / figure["seconds"] for figure in rounds)

    def median(name: str, digits: int) -> float:
        return round(statistics.median(figure[name] for figure in rounds), digits)

    return {
        "figure": "streaming overhead",
        "door": door,
        "clients": args.clients,
        "direct_tokens_per_s": round(num_tokens / statistics.median(figure["alone_s"] for figure in rounds)),
        "streamed_tokens_per_s": round(num_tokens / statistics.median(figure["seconds"] for figure in rounds)),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "tokens_per_chunk": round(num_tokens / statistics.median(figure["chunks"] for figure in rounds), 2),
        "loop_us": median("loop_us", 1),
        "loop_ms_a_dispatch": median("loop_ms_a_dispatch", 2),
        "engine_ms_a_dispatch": median("engine_ms_a_dispatch", 2),
        "first_chunk_s": median("first_chunk_s", 3),
        "seconds": median("seconds", 2),
        "server_cpu_s": median("server_cpu_s", 2),
        "clients_cpu_s": median("clients_cpu_s", 2),
        "processors": len(os.sched_getaffinity(0)),
        "simulated_step_ms": args.simulated_step_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--client_processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of a request (default 256)")
    parser.add_argument("--prompt_chars", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--door", action="append", choices=DOORS, help="may be repeated; without it, all four")
    parser.add_argument("--simulated_step_ms", type=float)
    add_engine_flags(parser)
    args = parser.parse_args()
    args.door = args.door or list(DOORS)
    processes = [ClientProcess() for _ in range(args.client_processes)]
    configs = configs_from(args)
    engine = build_engine(configs.run.model_source, configs.engine, configs.mesh)
    if engine.tokenizer is None:
        engine.tokenizer = made_up_tokenizer(engine.model_config.vocab_size)
    if args.simulated_step_ms is not None:
        from simulated_device import SimulatedDevice

        SimulatedDevice(engine, args.simulated_step_ms / 1e3)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # as `headrace serve` does
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(args, engine, processes))
    for process in processes:
        process.close()


if __name__ == "__main__":
    main()
