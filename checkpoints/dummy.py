"""Random parameters for a config without weights: made where they live, the same over any number of shards.

Values are a hash of their place and the parameter's path. JAX's generators would do, but take ten times as long to
compile, once for each shape.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.kv_layout import regroup
from checkpoints.load import Progress, check_specs
from checkpoints.param_names import param_shapes
from configs.model import ModelConfig
from sharding.param_spec import ParamSpec


def random_params(
    config: ModelConfig,
    specs: Mapping[str, ParamSpec],
    shardings: Mapping[str, jax.sharding.Sharding],
    tensor_shards: int,
    progress: Progress | None,
) -> dict[str, jax.Array]:
    """Uniform values with each spec's `init_scale` as standard deviation, ones where it has none. Padding rows of the vocabulary are zero
    and copies of a KV head are equal, so the model does not depend on `tensor_shards`."""
    check_specs(specs, config, tensor_shards)
    base_shapes = param_shapes(config, 1)  # each KV head once
    total_bytes = sum(spec.nbytes for spec in specs.values())
    done_bytes = 0
    params = {}
    for path, spec in specs.items():
        base_shape = base_shapes[path]
        if path in ("embed/weight", "lm_head/weight"):
            base_shape = (config.vocab_size, *base_shape[1:])
        # without the layer's number, so that layers share programs
        kind = "layer/" + path.split("/", 2)[2] if path.startswith("layers/") else path
        make = _maker(kind, base_shape, config.num_kv_heads, spec, shardings[path])
        params[path] = make(np.uint32(zlib.crc32(path.encode())))
        done_bytes += spec.nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    return params


@functools.lru_cache(maxsize=64)
def _maker(
    kind: str, base_shape: tuple[int, ...], num_kv_heads: int, spec: ParamSpec, sharding: jax.sharding.Sharding
) -> Callable[[np.uint32], jax.Array]:
    """A compiled function from a seed, uint32, to one parameter."""

    def make(seed: jax.Array) -> jax.Array:
        if spec.init_scale is None:
            return jnp.ones(spec.shape, spec.dtype)
        scale = np.float32(3**0.5 * spec.init_scale)  # of values in [-1, 1), whose deviation is 3**-0.5
        values = (_uniform(seed, base_shape) * scale).astype(spec.dtype)
        if "/qkv/" in kind or kind.endswith("/o/kernel"):
            return regroup(kind, values, num_kv_heads, spec.shape["/o/kernel" in kind], jnp)
        return jnp.pad(values, [(0, size - old) for size, old in zip(spec.shape, base_shape, strict=True)])

    return jax.jit(make, out_shardings=sharding)


def _uniform(seed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Float32 in [-1, 1), each value a hash of its flat index and `seed`."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        index = index * np.uint32(shape[axis]) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mix(_mix(index) ^ seed)
    return jax.lax.bitcast_convert_type(bits, jnp.int32).astype(jnp.float32) * np.float32(2.0**-31)


def _mix(bits: jax.Array) -> jax.Array:
    """lowbias32 (C. Wellons, hash-prospector): a bijection of uint32 that looks random."""
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
