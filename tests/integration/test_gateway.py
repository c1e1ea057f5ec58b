"""A gateway of the wheel `smg` in front of two servers. Runs where HEADRACE_SMG names its `smg` command:

python -m venv /tmp/smg && /tmp/smg/bin/pip install smg
HEADRACE_SMG=/tmp/smg/bin/smg pytest tests/integration/test_gateway.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_harness import free_port
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TINY = Path(__file__).parents[1] / "data" / "tiny"
FLAGS = ["--dtype=float32", "--max_num_seqs=4", "--prefill_token_buckets=32", "--num_pages=400", "--max_decode_steps=1"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())

pytestmark = pytest.mark.skipif("HEADRACE_SMG" not in os.environ, reason="opt in: HEADRACE_SMG names the gateway")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with the tiny config and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture(scope="module")
def gateway(model) -> Iterator[tuple[httpx.Client, list[httpx.Client]]]:
    """Clients of the gateway and, over HTTP, of the two servers behind it."""
    with contextlib.ExitStack() as stack:
        workers, direct = [], []
        for _ in range(2):
            http, grpc = free_port(), free_port()
            command = [sys.executable, "-m", "serving", "serve", f"--model=dummy:{model}", f"--port={http}"]
            command += [f"--grpc_port={grpc}", "--served_model_name=tiny", *FLAGS]
            running = stack.enter_context(process(*command))
            assert running.stdout is not None and "is ready" in running.stdout.readline()
            workers.append(f"grpc://127.0.0.1:{grpc}")
            direct.append(stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=60)))
        port, metrics = free_port(), free_port()
        command = [
            os.environ["HEADRACE_SMG"],
            "launch",
            "--host=127.0.0.1",
            f"--port={port}",
            "--worker-urls",
            *workers,
        ]
        command += ["--policy=prefix_hash", f"--model-path={model}", f"--prometheus-port={metrics}"]
        stack.enter_context(process(*command))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60))
        deadline_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/v1/models").json().get("data"):
                    break
            assert time.monotonic() < deadline_s, "the gateway has found no model"
            time.sleep(0.2)
        yield client, direct


def chat(i: int, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": f"question {i}"}]
    return {"model": "tiny", "messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def readable(gateway) -> dict[int, dict[str, object]]:
    """Answers of one of the servers that are text: random weights write other bytes more often than not."""
    found = {}
    for i in range(500):
        answer = gateway[1][0].post("/v1/chat/completions", json=chat(i)).json()
        content = answer["choices"][0]["message"]["content"]
        if content.isascii() and content.isprintable() and content == content.strip():
            found[i] = answer
        if len(found) == 6:
            break
    assert len(found) == 6
    return found


def test_a_gateway_serves_chats_from_two_servers(gateway, readable):
    client, direct = gateway
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    for i, known in readable.items():
        answer = client.post("/v1/chat/completions", json=chat(i)).json()
        assert answer["choices"][0]["message"]["content"] == known["choices"][0]["message"]["content"]
        assert answer["choices"][0]["finish_reason"] == "length"
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert answer["usage"][name] == known["usage"][name]
    assert [server.get("/load").json()["server_load"] for server in direct] == [0, 0]


def test_a_gateway_streams_with_usage_and_done(gateway, readable):
    client, _ = gateway
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for i, known in readable.items():
        text = client.post("/v1/chat/completions", json=chat(i, **options)).text
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert content == known["choices"][0]["message"]["content"]
        assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_a_gateway_passes_a_refusal_on(gateway):
    client, _ = gateway
    answer = client.post("/v1/chat/completions", json=chat(0, max_tokens=10**6))
    assert 400 <= answer.status_code < 500, answer.text
    assert client.post("/v1/chat/completions", json=chat(1)).status_code == 200
