"""The device mesh and what it refuses."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from configs.checks import ConfigError
from configs.engine import MeshConfig
from sharding.mesh import make_mesh


def test_mesh_has_three_explicit_axes() -> None:
    mesh = make_mesh(MeshConfig(tensor=1))
    assert mesh.axis_names == ("data", "tensor", "expert")
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert mesh.devices.ravel().tolist() == jax.devices()[:1]


def test_mesh_takes_the_devices_it_is_given() -> None:
    devices = jax.devices()[-1:]
    assert make_mesh(MeshConfig(), devices).devices.ravel().tolist() == devices


@pytest.mark.parametrize("axis", ["data", "expert"])
def test_axis_that_nothing_uses_is_refused_by_name(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"MeshConfig\.{axis}=2 is not supported"):
        make_mesh(MeshConfig(**{axis: 2}))


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"MeshConfig\.tensor=4 needs 4 devices; 1 are available"):
        make_mesh(MeshConfig(tensor=4), jax.devices()[:1])
