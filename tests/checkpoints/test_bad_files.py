"""Damaged and hostile files: each is refused by name, before anything is computed, in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.source import open_source

BAD_FILES = Path(__file__).parents[1] / "data" / "bad_files"

# what the message names: file, tensor or field, value found and limit (see the README beside the files)
REFUSALS = {
    "st-header-too-long": ["model.safetensors", "header length 88874", "88864 bytes"],
    "st-offsets-past-end": ["model.safetensors", "tensor 'model.", "data_offsets [", "0 <= begin <= end <="],
    "st-overlapping": ["model.safetensors", "tensor 'model.", "overlaps", "which ends at"],
    "st-shape-mismatch": ["model.safetensors", "model.embed_tokens.weight", "[48, 32] is not [", "config"],
    "st-duplicate-names": ["model-00002-of-00002.safetensors", "appears twice", "model-00001-of-00002.safetensors"],
    "st-truncated-shard": ["model.safetensors", "data_offsets", "86655"],
    "st-missing-shard": ["model-00001-of-00002.safetensors", "tensor 'lm_head.weight'", "index.json puts it in"],
    "st-path-outside": [
        "'/outside.safetensors'",
        "not a plain file name",
        "index.json for tensor 'model.layers.0.self",
    ],
    "st-unknown-dtype": ["model.safetensors", "dtype 'float32' is not one of"],
    "st-zero-length": ["model-00001-of-00002.safetensors", "has 0 bytes"],
    "gguf-truncated.gguf": ["gguf-truncated.gguf", "needs 8 bytes at byte 16", "has 20"],
    "gguf-wrong-magic.gguf": ["gguf-wrong-magic.gguf", "b'FUGG'", "b'GGUF'"],
    "gguf-huge-count.gguf": ["gguf-huge-count.gguf", "tensor count 4294967296", "cannot fit"],
    "gguf-offset-past-end.gguf": ["gguf-offset-past-end.gguf", "tensor '", "offset", "pass the end"],
    "gguf-unknown-type.gguf": ["gguf-unknown-type.gguf", "tensor '", "type 4294967295 is not supported"],
    "gguf-string-overflow.gguf": ["gguf-string-overflow.gguf", "field '", "string length 89696", "left in the file"],
}


def test_every_bad_file_has_its_expected_refusal():
    bad = {path.name for path in BAD_FILES.iterdir() if path.name.startswith(("st-", "gguf-"))}
    assert bad == REFUSALS.keys()


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_file_is_refused_by_name(name):
    with pytest.raises(CheckpointError) as refusal:
        open_source(str(BAD_FILES / name))
    message = str(refusal.value)
    assert len(message.splitlines()) == 1
    for part in REFUSALS[name]:
        assert part in message, message


@pytest.mark.parametrize("name", ["valid-sharded", "valid-tiny.gguf"])
def test_sound_files_open(name):
    source = open_source(str(BAD_FILES / name))
    assert source.model_config.num_layers == 2 and source.model_config.vocab_size == 48


MEASURE = """
import json, sys
from checkpoints.errors import CheckpointError
from checkpoints.source import open_source

def peak_bytes():  # not ru_maxrss, which starts with the peak of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

folder, *names = sys.argv[1:]
for name in ("valid-sharded", "valid-tiny.gguf"):
    open_source(f"{folder}/{name}")
peaks = {"sound": peak_bytes()}
for name in names:
    try:
        open_source(f"{folder}/{name}")
        sys.exit(f"{name} opened")
    except CheckpointError:
        peaks[name] = peak_bytes()
print(json.dumps(peaks))
"""


def test_bad_files_take_little_memory():
    # the largest of them has 95 kB, so the bound of twice the file + 100 MB is 100 MB; 10 are held to
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(BAD_FILES), *REFUSALS],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout)
    assert max(peaks.values()) - peaks["sound"] < 10e6, peaks


# Files of some MB made to grow in memory: deep or long JSON, many tiny strings, one wide character in much text.
INFLATE = """
import json, os, pathlib, shutil, struct, sys
from checkpoints.errors import CheckpointError
from checkpoints.source import open_source

def peak_bytes():  # not ru_maxrss, which starts with the peak of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

folder = pathlib.Path(sys.argv[1])
sound = pathlib.Path(sys.argv[2])
open_source(str(sound))

def safetensors(header):
    target = folder / "st"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes((sound / "config.json").read_bytes())
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return target

def string(text):
    return struct.pack("<Q", len(text)) + text

def gguf(entries):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries))
    target = folder / "x.gguf"
    target.write_bytes(head + b"".join(entries))
    return target

def strings(count, text):
    return string(b"a") + struct.pack("<IIQ", 9, 8, count) + string(text) * count

N = 2 << 20
cases = {
    "objects": lambda: safetensors(b'{"a":[' + b"{}," * (N // 3 - 5) + b"{}]}"),
    "deep": lambda: safetensors(b'{"a":' + b"[" * (N - 10) + b"}"),
    "long integer": lambda: safetensors(b'{"a":' + b"9" * (N - 10) + b"}"),
    "too long": lambda: safetensors(b'{"a":"' + b" " * (20 << 20) + b'"}'),
    "entries": lambda: safetensors(b"{" + b",".join(
        b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(33000)) + b"}"),
    "short strings": lambda: gguf([strings(2_000_000, b"ab")]),
    "too many strings": lambda: gguf([strings(3_000_000, b"ab")]),
    "wide text": lambda: gguf([string(b"a") + struct.pack("<I", 8) + string(b"x" * (15 << 20) + "\\U0001F600".encode())]),
    "much text": lambda: gguf([string(b"%d" % i) + struct.pack("<I", 8) + string(b"x" * (1 << 20)) for i in range(32)]),
    "many fields": lambda: gguf([string(b"%d" % i) + struct.pack("<IB", 0, 0) for i in range(65_000)]),
    "numbers": lambda: gguf([string(b"a") + struct.pack("<IIQ", 9, 12, 2_000_000) + b"\\x01" * 16_000_000]),
    "nested": lambda: gguf([string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100000 + bytes(100)]),
}
def in_child(action):  # a process of its own: a peak stays
    if os.fork() == 0:
        action()
        os._exit(0)
    _, status = os.wait()
    assert status == 0, status

def measure():
    target = next(folder.iterdir())
    size = sum(f.stat().st_size for f in ([target] if target.is_file() else target.iterdir()))
    before = peak_bytes()
    try:
        open_source(str(target))
        message = "opened"
    except CheckpointError as error:
        message = str(error)
    print(json.dumps({"name": name, "grown": peak_bytes() - before, "size": size, "message": message}), flush=True)

for name, make in cases.items():
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    in_child(make)
    in_child(measure)
"""
CASES = {
    "objects": "must have exactly dtype",
    "deep": "nested too deep",
    "long integer": "is not JSON",
    "too long": "above the 2097152 bytes",
    "entries": "is missing",
    "short strings": "general.architecture",
    "too many strings": "above 2097152 elements",
    "wide text": "general.architecture",
    "much text": "above 16777216 bytes",
    "many fields": "general.architecture",
    "numbers": "general.architecture",
    "nested": "nested deeper",
}


def test_files_made_to_grow_in_memory_stay_small(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", INFLATE, str(tmp_path / "case"), str(BAD_FILES / "valid-sharded")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert [result["name"] for result in results] == list(CASES)
    for result in results:
        print(result)
        assert CASES[result["name"]] in result["message"], result
        assert result["grown"] <= 2 * result["size"] + 100e6, result
