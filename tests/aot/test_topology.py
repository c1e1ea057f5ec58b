"""Described devices: their kind, number and mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from configs.engine import MeshConfig
from pallas_kernels.paged_attention.tuning import tiles_file
from sharding.placement import device_kind_of, replicated
from sharding.topology import TPU_TOPOLOGIES, TargetError, target_devices, target_mesh

# what a process on the real device reports as device_kind: tile choices are looked up by it
DEVICE_KINDS = {"h200": "NVIDIA H200", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "7x": "TPU7x"}


@pytest.mark.gate
@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_h200s_are_described_with_their_kind_and_mesh(num_devices: int) -> None:
    mesh = target_mesh("h200", MeshConfig(tensor=num_devices))
    assert dict(mesh.shape) == {"data": 1, "tensor": num_devices, "expert": 1}
    assert {(d.platform, d.device_kind) for d in mesh.devices.flat} == {("gpu", "NVIDIA H200")}
    assert [d.id for d in mesh.devices.flat] == list(range(num_devices))


@pytest.mark.gate
def test_programs_for_a_described_h200_take_the_tiles_of_a_real_one() -> None:
    kinds = []
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=replicated(target_mesh("h200", MeshConfig()), 1))
    jax.jit(lambda x: kinds.append(device_kind_of(x))).trace(x)
    assert kinds == ["NVIDIA H200"]
    assert tiles_file("NVIDIA H200").is_file()


@pytest.mark.parametrize("target", TPU_TOPOLOGIES)
@pytest.mark.parametrize("num_devices", [1, 4, 8])
def test_tpus_are_described_with_their_kind_and_mesh(target: str, num_devices: int) -> None:
    mesh = target_mesh(target, MeshConfig(tensor=num_devices))
    assert mesh.size == num_devices
    assert {(d.platform, d.device_kind) for d in mesh.devices.flat} == {("tpu", DEVICE_KINDS[target])}


def test_more_devices_than_the_largest_topology_are_refused() -> None:
    with pytest.raises(TargetError, match="target='v5e' has 16 devices here; 32 are asked for"):
        target_devices("v5e", 32)
