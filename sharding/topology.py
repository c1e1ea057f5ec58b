"""Devices by name that this machine does not have: what ahead-of-time compilation needs of an accelerator.

A described device can be compiled for, with memory analysis and serialisation; nothing can run on it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.experimental import topologies

from configs.checks import ConfigError
from configs.engine import MeshConfig
from sharding.mesh import make_mesh

# XLA's GpuTargetConfig (xla/stream_executor/device_description.proto) of an H200 SXM. Sources:
# [g] CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", column 9.0
# [h] NVIDIA H100 whitepaper (the same GH100 chip, SXM)
# [x] XLA's own description of a card (it writes one beside its dumps), which agrees in the rest
H200_TARGET_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024            # [g]
  threads_per_warp: 32                     # [g]
  shared_memory_per_block: 49152           # [g] 48 KiB without opting in
  shared_memory_per_core: 233472           # [g] 228 KiB
  shared_memory_per_block_optin: 232448    # [g] 227 KiB
  threads_per_core_limit: 2048             # [g]
  core_count: 132                          # [h] streaming multiprocessors
  fpus_per_core: 128                       # [h] float32 units
  block_dim_limit_x: 2147483647            # [g]
  block_dim_limit_y: 65535                 # [g]
  block_dim_limit_z: 65535                 # [g]
  memory_bandwidth: 4814304000000          # [x] bytes/s
  l2_cache_size: 62914560                  # [x]
  clock_rate_ghz: 1.98                     # [x] highest clock of the multiprocessors
  device_memory_size: 150109880320         # [x] bytes
  registers_per_core_limit: 65536          # [g]
  registers_per_block_limit: 65536         # [g]
  # [g] 9.0; "accelerated" is what nvcc calls sm_90a, with wgmma and the TMA
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  # Of the least driver that programs here run on. XLA takes loops, branches and library calls out of its command
  # buffers where the driver is not known to take them.
  driver_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }    # [x] cuDNN; no program here calls it
runtime_version { major: 13 minor: 0 patch: 0 }  # CUDA of the plugin
device_description_str: "NVIDIA H200"      # the device kind, as the CUDA driver names the card
"""

# TPU generation -> topologies by libtpu's names, smallest first. Two cores of a 7x chip are two devices.
TPU_TOPOLOGIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "v5e": ("v5e:2x2", "v5e:2x4", "v5e:4x4"),
        "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"),
        "v6e": ("v6e:2x2", "v6e:2x4", "v6e:4x4"),
        "7x": ("tpu7x:2x2x1", "tpu7x:2x2x2"),
    }
)

GPU_TARGETS = ("h200",)
TARGETS = ("cpu", *GPU_TARGETS, *TPU_TOPOLOGIES)


class TargetError(ConfigError):
    """A compile target is unknown, too small, or its compiler is not installed."""


def target_mesh(target: str, config: MeshConfig) -> jax.sharding.Mesh:
    """The mesh of `sharding.mesh.make_mesh` over devices of `target`, one of TARGETS. Raises TargetError."""
    return make_mesh(config, target_devices(target, config.num_devices))


def target_devices(target: str, num_devices: int) -> list[jax.Device]:
    """`num_devices` devices of one host or slice of `target`; "cpu" is this machine, all others are described only.

    Raises TargetError for an unknown name, more devices than the target has, or a compiler that is not installed.
    """
    if target == "cpu":
        devices = jax.devices("cpu")
    elif target in GPU_TARGETS:
        devices = _gpu_devices(num_devices)
    elif target in TPU_TOPOLOGIES:
        devices = _tpu_devices(target, num_devices)
    else:
        raise TargetError(f"target={target!r} is not known; known targets are {', '.join(TARGETS)}")
    if len(devices) < num_devices:
        raise TargetError(f"target={target!r} has {len(devices)} devices here; {num_devices} are asked for")
    return devices[:num_devices]


@functools.cache
def _gpu_devices(num_devices: int) -> list[jax.Device]:
    _require("jax_cuda13_plugin", "jax_plugins.xla_cuda13", extra="aot")
    return topologies.get_topology_desc(
        platform="cuda", target_config=H200_TARGET_CONFIG, topology=f"1x1x{num_devices}"
    ).devices


@functools.cache
def _tpu_devices(target: str, num_devices: int) -> list[jax.Device]:
    """The devices of the smallest topology that has so many, else of the largest."""
    _require("libtpu", extra="aot-tpu")
    # libtpu would else ask the cloud's metadata server, for minutes, what host this is
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # and admits one process at a time, which compiling alone has no need for
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices: list[jax.Device] = []
    for name in TPU_TOPOLOGIES[target]:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        if len(devices) >= num_devices:
            break
    return devices


def _require(*modules: str, extra: str) -> None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # a parent package is missing
            found = False
        if not found:
            raise TargetError(f"compiling for this target needs {module}: pip install 'headrace[{extra}]'")
