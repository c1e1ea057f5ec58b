"""Loading holds the finished arrays and little more: measured as the peak of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import json, sys
import jax, jax.numpy as jnp
from checkpoints.source import open_source
from layers.params import param_specs

def load(src):
    source = open_source(src)
    specs = param_specs(source.model_config, jnp.bfloat16, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = source.load_params(specs, dict.fromkeys(specs, sharding), 1)
    return sum(array.nbytes for array in params.values()), params

def resident_bytes(field):  # ru_maxrss will not do: it starts with the peak of the process that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

small, big = sys.argv[1:]
load(small)  # imports and pools are not what is measured
before = resident_bytes("VmRSS")
array_bytes, params = load(big)
print(json.dumps({"array_bytes": array_bytes, "extra_bytes": resident_bytes("VmHWM") - before - array_bytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_loading_takes_less_than_two_shards_beyond_the_arrays(kind, tools, rng, tmp_path):
    num_layers, num_shards = 4, 8
    config = tools.llama | {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": num_layers, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    }  # fmt: skip
    layer = tools.llama_tensors(config | {"num_hidden_layers": 1}, rng)
    tensors = {}
    for i in range(num_layers):
        tensors |= {name.replace("layers.0", f"layers.{i}"): value for name, value in layer.items()}
    if kind == "safetensors":
        folder = tools.write_folder(tmp_path / "m", config, tensors, num_shards)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        assert len(sizes) == num_shards
        src, shard_bytes = folder, max(sizes)
    else:
        src = tools.write_gguf(tmp_path / "m.gguf", config, tensors, "Q8_0")
        # one file: the largest tensor as numbers takes the place of a shard; the 8 safetensors would have 34 MB
        shard_bytes = max(value.nbytes for value in tensors.values()) * 2
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tools.data / "bad_files" / "valid-tiny.gguf"), str(src)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    print(result, shard_bytes)
    num_values = sum(value.size for value in tensors.values())
    assert result["array_bytes"] >= 2 * num_values > 100e6
    assert result["extra_bytes"] < 2 * shard_bytes, "nor are the arrays there twice"
