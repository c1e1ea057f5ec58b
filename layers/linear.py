"""Every matrix product with a weight goes through `linear`: the one place that knows the forms a weight may have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from layers.params import ParamSpecs, make_param
from sharding.placement import mesh_of, sum_over_shards

# XLA's CPU backend packs the second operand of a product anew on every call. For few rows it must not be the kernel:
# at 8 rows of 576 x 3072 in float32 this halves the time.
MAX_KERNEL_FIRST_ROWS = 64


def _kernel_first(product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`product(x, kernel)` by way of its transpose; the barrier keeps XLA from swapping the operands back."""
    return lax.optimization_barrier(product(kernel, x)).T


def _local_product(x: jax.Array, kernel: jax.Array, num_in: int, out_dtype: Any) -> jax.Array:
    """Sum over the last `num_in` axes of both, as one product of two matrices: XLA's CPU backend would first write
    out a transposed copy of a kernel with more axes, for every call."""
    num_summed = math.prod(kernel.shape[-num_in:])
    x_TI, kernel_OI = x.reshape(-1, num_summed), kernel.reshape(-1, num_summed)
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        # full float32: a GPU's default for float32, TF32, keeps 10 bits of the mantissa
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    if 1 < x_TI.shape[0] <= MAX_KERNEL_FIRST_ROWS:
        y = lax.platform_dependent(x_TI, kernel_OI, cpu=functools.partial(_kernel_first, product), default=product)
    else:
        y = product(x_TI, kernel_OI)
    return y.reshape(x.shape[:-num_in] + kernel.shape[:-num_in])


def linear(x: jax.Array, kernel: jax.Array, num_in: int = 1, *, out_dtype: Any = None) -> jax.Array:
    """x [lead..., in...] times kernel [out..., in...] -> [lead..., out...], summed over the `num_in` last axes.

    The result is split over the mesh as x's leading and the kernel's out axes are. Where the summed axes are split,
    it is summed over the shards, by one all-reduce. Products are summed in float32 and given in `out_dtype`
    (default: x's dtype).
    """
    out_dtype = out_dtype or x.dtype
    x_spec, kernel_spec = jax.typeof(x).sharding.spec, jax.typeof(kernel).sharding.spec
    assert x_spec[-num_in:] == kernel_spec[-num_in:], (x_spec, kernel_spec)
    shard_axes = tuple(kernel_spec[-num_in:])
    out_spec = PartitionSpec(*x_spec[:-num_in], *kernel_spec[:-num_in])
    return sum_over_shards(
        lambda x, kernel: _local_product(x, kernel, num_in, out_dtype),
        shard_axes,
        mesh=mesh_of(kernel),
        in_specs=(x_spec, kernel_spec),
        out_specs=out_spec,
    )(x, kernel)


class Linear(nnx.Module):
    """A kernel stored [out..., in...] and, where the model has one, a bias [out...]."""

    def __init__(self, specs: ParamSpecs, path: str, num_in: int = 1):
        self.kernel = make_param(specs[f"{path}/kernel"])
        bias = specs.get(f"{path}/bias")
        self.bias = None if bias is None else make_param(bias)
        self.num_in = num_in

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [T, in...] -> [T, out...]: the product of `linear` plus the bias."""
        y = linear(x, self.kernel.get_value(), self.num_in)
        return y if self.bias is None else y + self.bias.get_value()
