"""Compilation for accelerators that this machine need not have. Run by `make aot`, in an environment with the extra
`aot`; without it these tests fail. What is compiled here is not run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # read when the first kernel is compiled: registers and spills on stdout

from configs.hf import model_config_from_hf
from configs.model import ModelConfig

LLAMA_8B = Path(__file__).parents[2] / "benchmarks" / "models" / "llama-3.1-8b" / "config.json"


@pytest.fixture(scope="session")
def llama_8b() -> ModelConfig:
    return model_config_from_hf(json.loads(LLAMA_8B.read_text()))
