"""Clients of streams that cost little: raw sockets in one process, HTTP/1.1 and gRPC, each request on its own connection.

    python benchmarks/stream_clients.py < plan

for `streaming_overhead.py` and `open_loop_load.py`. A line of stdin is a JSON list of requests; "ready" is printed once they
can be sent, a line "go" starts them, and the answer is one JSON line: the processor's seconds and a result for each request.
Then the next list may come. A request has

    door        "http" or "grpc"
    address     [host, port]
    path        /v1/completions, or the gRPC method's
    body        JSON text of HTTP, base64 of gRPC's message
    at_s        when it is sent, after "go"; without it at once, on a connection that was open before
    leave_s     after so long its client goes, if it has no whole answer by then

and a result `status` (of HTTP, or gRPC's code; None where no answer came), times of the monotonic clock, `num_events` (SSE
events or messages) and `num_tokens` by the answer's own usage. An HTTP/2 library would cost more than the server: frames
are read here, and a connection has one stream, so that nothing of its header compression is needed but the first literal.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

RECEIVE_BYTES = 2**18
WINDOW = 2**31 - 1
USAGE = re.compile(rb'"completion_tokens":(\d+)')
DATA, HEADERS, SETTINGS, PING, GOAWAY, RST_STREAM = 0, 1, 4, 6, 7, 3
END_STREAM, END_HEADERS, ACK = 1, 4, 1


class Http:
    """One request, and its answer up to the end of the connection."""

    def __init__(self, request: dict[str, Any]):
        body = request["body"].encode()
        host, port = request["address"]
        self.sent = (
            f"POST {request['path']} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode() + body
        self.num_events = 0
        self._head, self._tail = b"", b""

    def receive(self, data: bytes) -> tuple[bytes, bool]:
        """What to answer, and whether that was the end."""
        if len(self._head) < 16:
            self._head += data[:16]
        self.num_events += data.count(b"data: ")
        self._tail = (self._tail + data)[-1024:]
        return b"", not data

    @property
    def status(self) -> str | None:
        if not self._head.startswith(b"HTTP/1.1 "):
            return None
        status = self._head[9:12].decode()
        if status == "200" and b"data: [DONE]\n\n" not in self._tail:
            return "cut"  # an error event, or the end of the connection
        return status

    @property
    def num_tokens(self) -> int:
        found = USAGE.findall(self._tail)
        return int(found[-1]) if found else 0


class Grpc:
    """One call of a method whose answers are a stream."""

    def __init__(self, request: dict[str, Any]):
        message = base64.b64decode(request["body"])
        host, port = request["address"]
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": request["path"],
            ":authority": f"{host}:{port}",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(
            bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in headers.items()
        )
        data = b"\0" + struct.pack(">I", len(message)) + message
        self.sent = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, 0, struct.pack(">HI", 4, WINDOW))  # of a stream, at its start
            + _frame(8, 0, 0, struct.pack(">I", WINDOW - 65535))  # of the connection
            + _frame(HEADERS, END_HEADERS, 1, block)
            + _frame(DATA, END_STREAM, 1, data)
        )
        self.num_events = 0
        self.status: str | None = None
        self._rest, self._data, self._last = b"", b"", b""

    def receive(self, data: bytes) -> tuple[bytes, bool]:
        if not data:
            return b"", True
        answer, is_end = b"", False
        buffer, at = self._rest + data, 0
        while len(buffer) - at >= 9:
            end = at + 9 + int.from_bytes(buffer[at : at + 3])
            if end > len(buffer):
                break
            kind, flags, payload = buffer[at + 3], buffer[at + 4], buffer[at + 9 : end]
            at = end
            if kind == DATA:
                self._take(payload)
            elif kind == HEADERS and flags & END_STREAM:
                found = payload.find(b"grpc-status")
                if found >= 0:
                    start = found + len(b"grpc-status") + 1
                    self.status = payload[start : start + payload[start - 1]].decode()
                is_end = True
            elif kind in (RST_STREAM, GOAWAY):
                is_end = True
            elif kind in (SETTINGS, PING) and not flags & ACK:
                answer += _frame(kind, ACK, 0, payload if kind == PING else b"")
        self._rest = buffer[at:]
        return answer, is_end

    def _take(self, payload: bytes) -> None:
        self._data += payload
        while len(self._data) >= 5:
            end = 5 + int.from_bytes(self._data[1:5])
            if end > len(self._data):
                return
            self.num_events += 1
            self._last, self._data = self._data[5:end], self._data[end:]

    @property
    def num_tokens(self) -> int:
        from serving.proto.v1 import serving_pb2 as pb

        return pb.GenerateResponse.FromString(self._last).usage.completion_tokens


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


class Client:
    def __init__(self, request: dict[str, Any]):
        self.protocol: Http | Grpc = (Http if request["door"] == "http" else Grpc)(request)
        self.socket: socket.socket | None = None
        self.result: dict[str, Any] = {"door": request["door"], "status": None, "first_s": None, "has_left": False}

    def connect(self, address: list[Any]) -> None:
        self.socket = socket.create_connection(tuple(address), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        assert self.socket is not None
        self.result["sent_s"] = time.monotonic()
        self.socket.sendall(self.protocol.sent)
        self.socket.setblocking(False)

    def receive(self) -> bool:
        """Whether this was the end."""
        assert self.socket is not None
        try:
            data = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data and self.result["first_s"] is None and self.protocol.num_events:
            self.result["first_s"] = time.monotonic()
        answer, is_end = self.protocol.receive(data)
        if answer and not is_end:
            self.socket.setblocking(True)
            self.socket.sendall(answer)
            self.socket.setblocking(False)
        return is_end

    def close(self, *, has_left: bool) -> None:
        if self.socket is not None:
            self.socket.close()
        self.result |= {
            "end_s": time.monotonic(),
            "has_left": has_left,
            "status": self.protocol.status,
            "num_events": self.protocol.num_events,
            "num_tokens": 0 if has_left else self.protocol.num_tokens,
        }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    while line := sys.stdin.readline():
        run(json.loads(line))


def run(requests: list[dict[str, Any]]) -> None:
    clients = [Client(request) for request in requests]
    for client, request in zip(clients, requests, strict=True):
        if "at_s" not in request:
            client.connect(request["address"])
    print("ready", flush=True)
    assert sys.stdin.readline().strip() == "go"
    cpu_s, started_s = time.process_time(), time.monotonic()
    events = [(started_s + request.get("at_s", 0.0), index, "send") for index, request in enumerate(requests)]
    heapq.heapify(events)
    selector = selectors.DefaultSelector()
    num_open, is_done = len(requests), [False] * len(requests)

    def end(index: int, *, has_left: bool = False) -> None:
        nonlocal num_open
        num_open -= 1
        is_done[index] = True
        client = clients[index]
        if client.socket is not None and client.socket.fileno() in selector.get_map():
            selector.unregister(client.socket)
        client.close(has_left=has_left)

    while num_open:
        now_s = time.monotonic()
        while events and events[0][0] <= now_s:
            due_s, index, what = heapq.heappop(events)
            client, request = clients[index], requests[index]
            if is_done[index]:
                continue
            if what == "leave":
                end(index, has_left=True)
                continue
            try:
                if client.socket is None:
                    client.connect(request["address"])
                client.send()
            except OSError:
                client.result.setdefault("sent_s", time.monotonic())
                end(index)
                continue
            client.result["late_s"] = time.monotonic() - due_s
            selector.register(client.socket, selectors.EVENT_READ, index)
            if "leave_s" in request:
                heapq.heappush(events, (due_s + request["leave_s"], index, "leave"))
        timeout = max(events[0][0] - time.monotonic(), 0) if events else None
        for key, _ in selector.select(timeout):
            if clients[key.data].receive():
                end(key.data)
    selector.close()
    cpu_s = time.process_time() - cpu_s
    print(json.dumps({"cpu_s": cpu_s, "results": [client.result for client in clients]}), flush=True)


if __name__ == "__main__":
    main()
