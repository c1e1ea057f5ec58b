"""The contracts of the page write. `write_kv` has one implementation; `rotate_and_write_kv` chooses by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_page_write import reference, triton_gpu
from pallas_kernels.kv_page_write.reference import write_kv

__all__ = ["rotate_and_write_kv", "write_kv"]

Result = tuple[jax.Array, jax.Array, jax.Array | None]
IMPLEMENTATIONS: Mapping[str, Callable[..., Result]] = MappingProxyType(
    {"reference": reference.rotate_and_write_kv, "triton_gpu": triton_gpu.rotate_and_write_kv}
)


def rotate_and_write_kv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    kv_pages: jax.Array,
    kv_indices: jax.Array,
    kv_scales: jax.Array | None = None,
    *,
    q_weight: jax.Array | None = None,
    k_weight: jax.Array | None = None,
    eps: float = 0.0,
    num_columns: int | None = None,
    implementation: str | None = None,
) -> Result:
    """From the QKV product to queries for attention, with keys and values written to pages.

    Norm of query and key heads, rotation, then `write_kv`. In place where `kv_pages` and `kv_scales` are donated.

    Args:
      qkv: [T, K, G + 2, H], bfloat16 or float32: for each KV head its G query heads, its key and its value.
      cos, sin: [T, rotary_dim / 2] float32, rotary_dim <= H; dims i and i + rotary_dim / 2 of a head turn together.
      kv_pages, kv_indices, kv_scales: as `write_kv` takes them.
      q_weight, k_weight: [H] float32 of the norms of query and key heads; both or neither.
      eps: of these norms.
      num_columns: query heads of the result; those past G are zeros. None: G.
      implementation: "reference", "triton_gpu" (NVIDIA), or None: the kernel on the platforms that have one.

    Returns:
      (q [T, K, num_columns, H] in qkv's dtype, kv_pages, kv_scales).

    Raises ValueError on an unknown implementation, shapes and dtypes that do not fit, and as `write_kv` does.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"rotate_and_write_kv implementation must be one of {sorted(IMPLEMENTATIONS)}: {implementation!r}"
        )
    if qkv.ndim != 4 or qkv.shape[2] < 3 or qkv.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"qkv must be bfloat16 or float32 [T, K, G + 2, H]: {qkv.dtype}{list(qkv.shape)}")
    num_tokens, num_kv_heads, num_heads, head_dim = qkv.shape
    if kv_pages.ndim != 5 or kv_pages.shape[3:] != (num_kv_heads, head_dim) or kv_indices.shape != (num_tokens,):
        raise ValueError(f"qkv {qkv.shape} does not fit kv_pages {kv_pages.shape} or kv_indices {kv_indices.shape}")
    reference.check_scales(kv_pages, kv_scales)
    half = cos.shape[-1]
    if cos.shape != (num_tokens, half) or sin.shape != cos.shape or not 0 < 2 * half <= head_dim:
        raise ValueError(f"cos {cos.shape} and sin {sin.shape} must be [T, rotary_dim / 2] for qkv {qkv.shape}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must be given both or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None and (weight.shape != (head_dim,) or weight.dtype != jnp.float32):
            raise ValueError(f"{name} must be float32[{head_dim}]: {weight.dtype}{list(weight.shape)}")
    num_columns = num_heads - 2 if num_columns is None else num_columns
    if num_columns < num_heads - 2:
        raise ValueError(f"num_columns must be at least the {num_heads - 2} query heads of qkv: {num_columns}")
    arrays = (qkv, cos, sin, kv_pages, kv_indices, kv_scales, q_weight, k_weight)

    def run(name: str) -> Callable[..., Result]:
        return functools.partial(IMPLEMENTATIONS[name], eps=eps, num_columns=num_columns)

    if implementation is not None:
        return run(implementation)(*arrays)
    return lax.platform_dependent(*arrays, cuda=run("triton_gpu"), default=run("reference"))
