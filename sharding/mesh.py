"""MeshConfig -> jax.sharding.Mesh with explicit axes (data, tensor, expert)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from configs.checks import ConfigError, fail
from configs.engine import MeshConfig
from sharding.rules import MESH_AXES


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The device mesh of one engine. Takes the first `config.num_devices` of `devices` (default: jax.devices()).

    Every axis is explicit: arrays carry their sharding in their type, so a model that would need a hidden
    collective fails while it is traced. Raises ConfigError for an axis that nothing uses and for too few devices.
    """
    if config.data > 1:
        fail(config, "data", "is not supported inside one engine: run one engine per replica, each with its own mesh")
    if config.expert > 1:
        fail(config, "expert", "is not supported: the model architectures served here are dense and have no experts")
    available = list(jax.devices() if devices is None else devices)
    if config.num_devices > len(available):
        raise ConfigError(
            f"MeshConfig.tensor={config.tensor} needs {config.num_devices} devices; {len(available)} are available"
        )
    shape = (config.data, config.tensor, config.expert)
    return jax.make_mesh(
        shape, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES), devices=available[: config.num_devices]
    )
