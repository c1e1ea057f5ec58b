"""The modules generated from serving.proto are those that it gives."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "serving" / "proto" / "v1"
GENERATED = ("serving_pb2.py", "serving_pb2.pyi", "serving_pb2_grpc.py")
BUILT = ROOT / ".venv-proto" / "bin" / "python"  # of `make proto`


def test_neither_the_proto_nor_its_modules_have_changed_alone():
    lines = (FOLDER / "generated.sha256").read_text(encoding="utf-8").splitlines()
    recorded = {name: digest for digest, name in (line.split() for line in lines)}
    assert recorded.keys() == {"serving.proto", *GENERATED}
    for name, digest in recorded.items():
        data = (FOLDER / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest, f"{name} has changed: run make proto"


def test_they_come_from_a_generator_that_the_oldest_accepted_grpc_and_protobuf_take():
    pins = [Requirement(line) for line in (FOLDER / "requirements.txt").read_text().splitlines() if line[0] != "#"]
    (generator,) = (pin for pin in pins if pin.name == "grpcio-tools")
    ((_, version),) = ((spec.operator, Version(spec.version)) for spec in generator.specifier)
    assert version <= Version("1.81.1")
    text = (FOLDER / "serving_pb2.py").read_text(encoding="utf-8")
    assert "# Protobuf Python Version: 6.33.5\n" in text


def generator() -> str | None:
    """An interpreter that has the generator."""
    if BUILT.exists():
        return str(BUILT)
    if importlib.util.find_spec("grpc_tools") and metadata.version("grpcio-tools") == "1.81.1":
        return sys.executable
    return os.environ.get("HEADRACE_PROTO_PYTHON")


@pytest.mark.skipif(generator() is None, reason="needs grpcio-tools 1.81.1, as `make proto` installs it")
def test_the_modules_are_what_the_generator_writes(tmp_path):
    target = tmp_path / "serving" / "proto" / "v1"
    target.mkdir(parents=True)
    subprocess.run(["sh", str(FOLDER / "generate.sh"), generator(), str(tmp_path)], check=True)
    for name in GENERATED:
        assert (target / name).read_bytes() == (FOLDER / name).read_bytes(), name
