"""A server under more load than it can take: open-loop arrivals at 0.5 to 5 times its capacity, and what it must keep.

    python benchmarks/open_loop_load.py [--seconds=300] [--model=dummy:tests/data/tiny] [flags of `headrace serve`]

`headrace serve` runs as a process of its own. Its capacity is measured first: requests of the mix, as many as may be in
flight, at once. Then requests arrive at random (Poisson), whatever became of those before, for --seconds in ten equal
parts: two rounds of 0.5, 1, 2, 3 and 5 times the capacity. Half come over HTTP and half over gRPC, all as streams on connections of
their own (`stream_clients.py`, a process for each part); prompts of 4 to 200 and outputs of 1 to 120 tokens (log-uniform); one
client in ten leaves within two seconds. Once a second the server's memory, open files, threads and load are read, and its
/health is asked for four times, each on a new connection, and beside it a process that does nothing else (`machine_ms_p99`:
what the machine alone, busy with the clients, takes).

Ends with status 1, and says why, unless
- the server ran throughout, logged no error, and ended with status 0 at SIGTERM;
- every answer is whole, or a refusal as documented (429 and 503; RESOURCE_EXHAUSTED and UNAVAILABLE);
- /health answered each time, and in 99 of 100 within 200 ms;
- the most resident memory of the second round is less than --max_growth_mib above that of the first, which had the same
  loads;
- at the end no request is in flight, and pages, slots and open files are as at the start.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from serving.proto.v1 import serving_pb2 as pb

ROOT = Path(__file__).parents[1]
LOADS = (0.5, 1.0, 2.0, 3.0, 5.0)
ROUNDS = 2
REFUSALS = {"http": ("429", "503"), "grpc": ("8", "14")}  # RESOURCE_EXHAUSTED, UNAVAILABLE
WHOLE = {"http": "200", "grpc": "0"}
LEAVERS, LONGEST_STAY_S = 0.1, 2.0
HEALTH_EVERY_S = 0.25
MAX_HEALTH_P99_S = 0.2
TINY_FLAGS = ("--dtype=float32", "--max_num_seqs=32", "--max_model_len=512", "--prefill_token_buckets=256")


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in taken]
    for listener in taken:
        listener.close()
    return ports


class Server:
    def __init__(self, model: str, flags: list[str], log: Path):
        self.port, self.grpc_port, self.admin_port = free_ports(3)
        command = [sys.executable, "-m", "serving", "serve", f"--model={model}", f"--port={self.port}"]
        command += [f"--grpc_port={self.grpc_port}", f"--admin_port={self.admin_port}", *flags]
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "is ready" not in line:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        self._usage = psutil.Process(self.process.pid)

    def get(self, path: str, *, admin: bool = False, timeout_s: float = 60.0) -> Any:
        url = f"http://127.0.0.1:{self.admin_port if admin else self.port}{path}"
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read()

    def stats(self) -> dict[str, Any]:
        return json.loads(self.get("/server_info", admin=True))["stats"]

    def usage(self) -> dict[str, float]:
        return {
            "rss_mib": self._usage.memory_info().rss / 2**20,
            "open_files": self._usage.num_fds(),
            "threads": self._usage.num_threads(),
        }


class Requests:
    """Draws the mix."""

    def __init__(self, rng: random.Random, server: Server):
        self._rng, self._server = rng, server

    def draw(self, at_s: float, *, may_leave: bool = True) -> dict[str, Any]:
        rng = self._rng
        prompt = [rng.randrange(3, 250) for _ in range(self._length(4, 200))]
        fields: dict[str, Any] = {"max_tokens": self._length(1, 120), "ignore_eos": True, "temperature": 1.0}
        fields |= {"stream": True, "return_token_ids": True}
        request: dict[str, Any] = {"at_s": at_s}
        if rng.random() < 0.5:
            body = {"prompt": prompt, **fields, "stream_options": {"include_usage": True}}
            request |= {"door": "http", "path": "/v1/completions", "body": json.dumps(body)}
            request["address"] = ["127.0.0.1", self._server.port]
        else:
            completion = pb.CompletionRequest(
                prompt=[pb.Prompt(tokens=pb.TokenIds(token_ids=prompt))],
                stream_options=pb.StreamOptions(include_usage=True),
                **fields,
            )
            body = base64.b64encode(pb.GenerateRequest(completion=completion).SerializeToString()).decode()
            request |= {"door": "grpc", "path": "/serving.v1.Serving/Generate", "body": body}
            request["address"] = ["127.0.0.1", self._server.grpc_port]
        if may_leave and rng.random() < LEAVERS:
            request["leave_s"] = rng.random() * LONGEST_STAY_S
        return request

    def _length(self, least: int, most: int) -> int:
        return round(math.exp(self._rng.uniform(math.log(least), math.log(most))))


class Clients:
    """One process of `stream_clients.py` with its requests."""

    def __init__(self, requests: list[dict[str, Any]]):
        self._process = subprocess.Popen(
            [sys.executable, "benchmarks/stream_clients.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
        )
        self._send(json.dumps(requests))
        assert self._receive() == "ready\n"

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def _receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def go(self) -> None:
        self._send("go")

    def results(self) -> list[dict[str, Any]]:
        results = json.loads(self._receive())["results"]
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        return results


def measure_capacity(requests: Requests, count: int) -> float:
    """Requests a second."""
    clients = Clients([requests.draw(0.0, may_leave=False) for _ in range(count)])
    clients.go()
    results = clients.results()
    bad = [result for result in results if result["status"] != WHOLE[result["door"]]]
    if bad:
        raise SystemExit(f"{len(bad)} of {count} requests of the first measurement failed, the first: {bad[0]}")
    return count / (max(r["end_s"] for r in results) - min(r["sent_s"] for r in results))


def arrivals(requests: Requests, rng: random.Random, rate: float, start_s: float, end_s: float) -> list[dict[str, Any]]:
    drawn, at_s = [], start_s
    while (at_s := at_s + rng.expovariate(rate)) < end_s:
        drawn.append(requests.draw(at_s))
    return drawn


class Bystander:
    """A process that answers one byte to each connection and does nothing else: what the machine alone takes."""

    CODE = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"a")
    connection.close()
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", self.CODE], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self._address = ("127.0.0.1", int(self.process.stdout.readline()))

    def ask(self) -> float:
        """Seconds."""
        started_s = time.monotonic()
        with socket.create_connection(self._address) as connection:
            connection.recv(1)
        return time.monotonic() - started_s

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Watch:
    """Reads the server's state until `stop`."""

    def __init__(self, server: Server):
        self._server = server
        self._is_over = threading.Event()
        self.samples: list[dict[str, float]] = []
        self.health: list[tuple[float, float]] = []  # when asked, seconds
        self.machine: list[float] = []  # seconds of the bystander
        self._bystander = Bystander()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=target) for target in (self._sample, self._ask)]
        for thread in self._threads:
            thread.start()

    def _sample(self) -> None:
        while not self._is_over.wait(1.0):
            sample = {"at_s": time.monotonic(), **self._server.usage()}
            try:
                load = json.loads(self._server.get("/load"))
            except OSError as error:
                self.failures.append(f"/load: {error}")
                continue
            self.samples.append({**sample, **{name: value for name, value in load.items()}})

    def _ask(self) -> None:
        while not self._is_over.wait(HEALTH_EVERY_S):
            started_s = time.monotonic()
            try:
                self._server.get("/health")
            except OSError as error:
                self.failures.append(f"/health: {error}")
            self.health.append((started_s, time.monotonic() - started_s))
            self.machine.append(self._bystander.ask())

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self._bystander.close()


def part_figures(load: float, rate: float, results: list[dict[str, Any]], health: list[float]) -> dict[str, Any]:
    whole = [r for r in results if r["status"] == WHOLE[r["door"]] and not r["has_left"]]
    first_s = sorted(r["first_s"] - r["sent_s"] for r in whole if r["first_s"] is not None) or [math.nan]
    return {
        "figure": "open loop",
        "load": load,
        "offered_per_s": round(rate, 1),
        "requests": len(results),
        "whole": len(whole),
        "refused": sum(r["status"] in REFUSALS[r["door"]] for r in results),
        "left": sum(r["has_left"] for r in results),
        "first_chunk_s_p50": round(statistics.median(first_s), 3),
        "first_chunk_s_p99": round(float(np.quantile(first_s, 0.99)), 3),
        "health_ms_p50": round(float(np.quantile(health, 0.5)) * 1e3, 1),
        "health_ms_p99": round(float(np.quantile(health, 0.99)) * 1e3, 1),
        "client_late_ms_p99": round(float(np.quantile([r.get("late_s", 0.0) for r in results], 0.99)) * 1e3, 1),
    }


def wait_idle(server: Server, before: dict[str, Any], open_files: int) -> str | None:
    """What is not as it was before, a minute after the last client."""
    names = ("num_running", "num_waiting", "num_free_slots", "num_free_pages")
    wanted = {name: before[name] for name in names}
    deadline_s = time.monotonic() + 60
    while True:
        stats = server.stats()
        now = {name: stats[name] for name in names}
        in_flight = json.loads(server.get("/load"))["server_load"]
        num_files = int(server.usage()["open_files"])
        if now == wanted and in_flight == 0 and num_files <= open_files + 1:  # the connection that asks
            return None
        if time.monotonic() > deadline_s:
            return f"{in_flight} in flight, {now} instead of {wanted}, {num_files} open files instead of {open_files}"
        time.sleep(0.5)


def run(args: argparse.Namespace, flags: list[str], log: Path) -> list[str]:
    """What is not as it must be."""
    rng = random.Random(args.seed)
    server = Server(args.model, flags, log)
    faults: list[str] = []
    try:
        requests = Requests(rng, server)
        measure_capacity(requests, 64)  # connections and threads are there
        capacity = measure_capacity(requests, args.capacity_requests)
        idle_health = []
        for _ in range(40):
            started_s = time.monotonic()
            server.get("/health")
            idle_health.append(time.monotonic() - started_s)
        before, open_files = server.stats(), int(server.usage()["open_files"])
        print(
            json.dumps(
                {
                    "figure": "capacity",
                    "model": args.model,
                    "flags": flags,
                    "requests_per_s": round(capacity, 1),
                    "idle_health_ms_p50": round(statistics.median(idle_health) * 1e3, 1),
                    "processors": len(os.sched_getaffinity(0)),
                    "load_average": round(os.getloadavg()[0], 1),
                }
            ),
            flush=True,
        )
        loads = ROUNDS * LOADS
        part_s = args.seconds / len(loads)
        plans = [
            arrivals(requests, rng, load * capacity, index * part_s, (index + 1) * part_s)
            for index, load in enumerate(loads)
        ]
        clients = [Clients(plan) for plan in plans]
        watch = Watch(server)
        started_s = time.monotonic()
        for process in clients:
            process.go()
        all_results = [process.results() for process in clients]
        watch.stop()
        for index, (load, results) in enumerate(zip(loads, all_results, strict=True)):
            start_s = started_s + index * part_s
            health = [seconds for at_s, seconds in watch.health if start_s <= at_s < start_s + part_s]
            print(json.dumps(part_figures(load, load * capacity, results, health)), flush=True)
        faults += check(args, server, watch, [result for results in all_results for result in results], started_s)
        if (difference := wait_idle(server, before, open_files)) is not None:
            faults.append(f"a minute after the last client: {difference}")
        server.process.send_signal(signal.SIGTERM)
        if server.process.wait(timeout=60) != 0:
            faults.append(f"the server ended with status {server.process.returncode}")
        errors = [line for line in log.read_text().splitlines() if "Traceback" in line or "ERROR" in line]
        if errors:
            faults.append(f"{len(errors)} errors in the server's log, the first: {errors[0]}")
    finally:
        server.process.kill()
        server.process.wait()
    return faults


def check(
    args: argparse.Namespace, server: Server, watch: Watch, results: list[dict[str, Any]], started_s: float
) -> list[str]:
    faults = list(watch.failures)
    if server.process.poll() is not None:
        faults.append(f"the server ended by itself with status {server.process.returncode}")
    allowed = {door: (WHOLE[door], *REFUSALS[door]) for door in WHOLE}
    others = Counter(
        f"{r['door']} {r['status']}" for r in results if not r["has_left"] and r["status"] not in allowed[r["door"]]
    )
    if others:
        faults.append(f"answers that are neither whole nor a documented refusal: {dict(others)}")
    health = np.array([seconds for _, seconds in watch.health])
    p99_s = float(np.quantile(health, 0.99))
    if p99_s >= MAX_HEALTH_P99_S:
        faults.append(f"/health takes {p99_s * 1e3:.0f} ms at the 99th percentile")
    last_s = max(sample["at_s"] for sample in watch.samples)
    second_s = started_s + (last_s - started_s) / ROUNDS
    first_mib = max(sample["rss_mib"] for sample in watch.samples if sample["at_s"] < second_s)
    second_mib = max(sample["rss_mib"] for sample in watch.samples if sample["at_s"] >= second_s)
    growth_mib = second_mib - first_mib
    if growth_mib >= args.max_growth_mib:
        faults.append(f"resident memory came to {growth_mib:.1f} MiB more in the second round than in the first")
    print(
        json.dumps(
            {
                "figure": "all",
                "requests": len(results),
                "statuses": dict(
                    sorted(Counter(f"{r['door']} {'left' if r['has_left'] else r['status']}" for r in results).items())
                ),
                "health_samples": health.size,
                "health_ms_p50": round(float(np.median(health)) * 1e3, 1),
                "health_ms_p99": round(p99_s * 1e3, 1),
                "health_ms_max": round(float(health.max()) * 1e3, 1),
                "machine_ms_p99": round(float(np.quantile(watch.machine, 0.99)) * 1e3, 1),
                "rss_mib_at_start": round(watch.samples[0]["rss_mib"], 1),
                "rss_mib_max_by_round": [round(first_mib, 1), round(second_mib, 1)],
                "open_files_max": max(sample["open_files"] for sample in watch.samples),
                "threads_max": max(sample["threads"] for sample in watch.samples),
                "in_flight_max": max(sample["server_load"] for sample in watch.samples),
                "load_average": round(os.getloadavg()[0], 1),
            }
        ),
        flush=True,
    )
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dummy:tests/data/tiny")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--capacity_requests", type=int, default=512)
    parser.add_argument("--max_growth_mib", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=0)
    args, flags = parser.parse_known_args()
    if not flags:
        flags = list(TINY_FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        faults = run(args, flags, Path(folder) / "server.log")
    for fault in faults:
        print(f"FAULT: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
