"""Some thousands of broken files: each opens and loads, or is refused with CheckpointError or ConfigError.

In one process, under a limit on its memory; any other exception, and any crash or hang, fails the test. The files
are a small sound one with bytes flipped, cut, repeated or enlarged, and with every count, length and offset of the
header set to values at the edges.
"""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.gguf_reader import read_gguf
from checkpoints.source import open_source
from configs.checks import ConfigError

NUM_RANDOM = 1000  # of each format
EDGES = (0, 1, 2**7, 2**8 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.fixture
def draw() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def memory_limit() -> Iterator[None]:
    """2 GB of address space above what the process has: a length that is believed fails at once."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2_000_000_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutate(data: bytes, header_end: int, draw: random.Random) -> bytes:
    """One to three faults, most of them in the header."""
    mutant = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        limit = min(len(mutant), header_end if draw.random() < 0.9 else len(data)) or 1
        at = draw.randrange(limit)
        kind = draw.choice(("flip", "byte", "number", "cut", "insert", "repeat", "remove"))
        if kind == "flip" and mutant:
            mutant[at] ^= 1 << draw.randrange(8)
        elif kind == "byte" and mutant:
            mutant[at] = draw.choice((0, 1, 0x22, 0x2D, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == "number":
            size = draw.choice((4, 8))
            mutant[at : at + size] = (draw.choice(EDGES) % 256**size).to_bytes(size, "little")
        elif kind == "cut":
            del mutant[at:]
        elif kind == "insert":
            mutant[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 20)))
        elif kind == "repeat":
            mutant[at:at] = mutant[at : at + draw.randrange(1, 200)]
        else:
            del mutant[at : at + draw.randrange(1, 20)]
    return bytes(mutant)


def outcome(src: Path, load: Callable[..., object]) -> str:
    try:
        source = open_source(str(src))
    except (CheckpointError, ConfigError) as refusal:
        assert len(str(refusal).splitlines()) == 1, str(refusal)
        str(refusal).encode("utf-8")
        return "refused"
    load(source)
    return "loaded"


def small_model(tools, rng) -> tuple[dict, dict]:
    config = tools.llama | {"hidden_size": 8, "head_dim": 2, "num_attention_heads": 4, "intermediate_size": 8,
                            "vocab_size": 16, "num_hidden_layers": 1}  # fmt: skip
    return config, tools.llama_tensors(config, rng)


@pytest.mark.usefixtures("memory_limit")
def test_random_faults_in_safetensors(tools, rng, draw, load, tmp_path):
    config, tensors = small_model(tools, rng)
    folder = tools.write_folder(tmp_path / "m", config, tensors)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    assert outcome(folder, load) == "loaded"
    outcomes = []
    for _ in range(NUM_RANDOM):
        file.write_bytes(mutate(data, header_end, draw))
        outcomes.append(outcome(folder, load))
    assert outcomes.count("refused") > NUM_RANDOM // 2


@pytest.mark.usefixtures("memory_limit")
def test_every_number_of_a_safetensors_header_at_the_edges(tools, rng, load, tmp_path):
    config, tensors = small_model(tools, rng)
    folder = tools.write_folder(tmp_path / "m", config, tensors)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for edge in (*EDGES, length - 1, length + 1, len(data), len(data) - 8, len(data) - 7, 100_000_000, 100_000_001):
        file.write_bytes(edge.to_bytes(8, "little") + data[8:])
        assert outcome(folder, load) == "refused", edge
    header = json.loads(data[8 : 8 + length])
    wrong: list[object] = [*EDGES, -1, 10**4000, 0.5, 1e300, True, None, "4", [], {}, [[1]]]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        for field in ("shape", "data_offsets"):
            for i in range(len(entry[field])):
                for value in wrong:
                    if value == entry[field][i] and type(value) is int:
                        continue
                    changed = entry | {field: [value if j == i else old for j, old in enumerate(entry[field])]}
                    write_header(file, header | {name: changed}, data[8 + length :])
                    assert outcome(folder, load) == "refused", (name, field, value)
        for value in (*wrong, "f32", "F33", "F4", "I8", "\ud800"):
            write_header(file, header | {name: entry | {"dtype": value}}, data[8 + length :])
            assert outcome(folder, load) == "refused", (name, value)
        for value in wrong:
            write_header(file, header | {name: value}, data[8 + length :])
            assert outcome(folder, load) == "refused", (name, value)
        for missing in entry:
            write_header(file, header | {name: {k: v for k, v in entry.items() if k != missing}}, data[8 + length :])
            assert outcome(folder, load) == "refused", (name, missing)


def write_header(file: Path, header: dict, data: bytes) -> None:
    text = dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def dumps(value: object) -> str:
    """json.dumps, which refuses integers of thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**70:
        return "1" + "0" * 4999
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dumps(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


@pytest.mark.usefixtures("memory_limit")
def test_random_faults_in_an_index_and_in_the_configs(tools, rng, draw, load, tmp_path):
    config, tensors = small_model(tools, rng)
    folder = tools.write_folder(tmp_path / "m", config, tensors, num_shards=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "do_sample": false}')
    for name in ("model.safetensors.index.json", "config.json", "generation_config.json"):
        data = (folder / name).read_bytes()
        for _ in range(NUM_RANDOM // 5):
            (folder / name).write_bytes(mutate(data, len(data), draw))
            try:
                outcome(folder, load)
            except ConfigError as refusal:  # a model of other sizes that does not split, say
                assert len(str(refusal).splitlines()) == 1
        (folder / name).write_bytes(data)
    assert outcome(folder, load) == "loaded"


@pytest.mark.usefixtures("memory_limit")
def test_random_faults_in_gguf(tools, rng, draw, load, tmp_path):
    config, tensors = small_model(tools, rng)
    fields = {
        "tokenizer.ggml.tokens": ("array", [f"token {i}" for i in range(16)]),
        "tokenizer.ggml.scores": ("array", [0.5] * 16),
        "tokenizer.ggml.eos_token_id": ("uint32", 3),
    }
    file = tools.write_gguf(tmp_path / "m.gguf", config, tensors, extra_fields=fields)
    data = file.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    assert outcome(file, load) == "loaded"
    outcomes = []
    for _ in range(NUM_RANDOM):
        file.write_bytes(mutate(data, header_end, draw))
        outcomes.append(outcome(file, load))
    assert outcomes.count("refused") > NUM_RANDOM // 2


@pytest.mark.usefixtures("memory_limit")
def test_every_aligned_and_unaligned_number_of_a_gguf_header_at_the_edges(tools, rng, load, tmp_path):
    """Each place of the header, whatever is there, becomes each edge, as 4 and as 8 bytes."""
    config, tensors = small_model(tools, rng)
    file = tools.write_gguf(tmp_path / "m.gguf", config, tensors, extra_fields={"x": ("array", ["a", "b"])})
    data = file.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    tried = 0
    for at in range(header_end - 8):
        for size in (4, 8):
            edge = EDGES[(at + tried) % len(EDGES)] % 256**size  # all edges meet all kinds of places
            file.write_bytes(data[:at] + edge.to_bytes(size, "little") + data[at + size :])
            outcome(file, load)
            tried += 1
    assert tried > 2000
    for value in EDGES:  # the counts, with all edges
        for offset in (8, 16):
            file.write_bytes(data[:offset] + struct.pack("<Q", value) + data[offset + 8 :])
            assert outcome(file, load) == "refused"
