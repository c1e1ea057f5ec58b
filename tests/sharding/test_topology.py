"""Names of compile targets, and what is said where they cannot be compiled for."""

from __future__ import annotations

import jax
import pytest

from configs.engine import MeshConfig
from sharding.topology import TargetError, _require, target_devices, target_mesh


def test_cpu_is_this_machine() -> None:
    assert target_devices("cpu", 1) == jax.devices("cpu")[:1]
    assert dict(target_mesh("cpu", MeshConfig()).shape) == {"data": 1, "tensor": 1, "expert": 1}


def test_unknown_names_and_too_many_devices_are_refused() -> None:
    with pytest.raises(TargetError, match="target='h300' is not known; known targets are cpu, h200, v5e, v5p, v6e, 7x"):
        target_devices("h300", 1)
    count = len(jax.devices("cpu"))
    with pytest.raises(TargetError, match=f"target='cpu' has {count} devices here; {count + 1} are asked for"):
        target_devices("cpu", count + 1)


def test_a_missing_compiler_is_named_with_the_extra_that_brings_it() -> None:
    with pytest.raises(TargetError, match=r"needs no_such_compiler: pip install 'headrace\[aot\]'"):
        _require("json", "no_such_compiler", extra="aot")
    with pytest.raises(TargetError, match=r"needs no_such_package.compiler: pip install 'headrace\[aot-tpu\]'"):
        _require("no_such_package.compiler", extra="aot-tpu")
