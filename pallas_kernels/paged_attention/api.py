"""The contract of paged attention and the choice of implementation by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill, reference

IMPLEMENTATIONS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "reference": reference.paged_attention,
        "mosaic_gpu_decode": mosaic_gpu_decode.paged_attention,
        "mosaic_gpu_prefill": mosaic_gpu_prefill.paged_attention,
    }
)


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal grouped-query attention of R rows of Q consecutive queries over keys and values in pages.

    Args:
      q: [R, Q, K, G, H], rotated queries; G query heads share one of K KV heads.
      kv_pages: [num_pages, 2, page_size, K, H], keys at [:, 0] and values at [:, 1]. Places past a
        row's end in its last page must hold numbers; pages that no row has may hold anything, NaN included.
      page_table: [R, P] int32, the page ids of each row's sequence in order; entries past its end are not read as
        valid keys, but must be page ids.
      starts: [R] int32, absolute position of each row's first query.
      lengths: [R] int32 in [0, Q], how many of a row's queries are real; 0 for an unused row.
      scale: scores are q . k times this.
      sliding_window: query at position p sees keys in [max(0, p - sliding_window + 1), p]; None: [0, p].
      softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
      implementation: one of IMPLEMENTATIONS; None: the fastest of the platform that takes these arrays.

    Returns:
      [R, Q, K, G, H] in q's dtype, softmax in float32. Exact zeros for queries at and past `lengths`. A row's bits
      do not depend on the other rows.

    Raises ValueError on an unknown implementation or shapes and dtypes that do not fit.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"paged_attention implementation must be one of {sorted(IMPLEMENTATIONS)}: {implementation!r}")
    if q.ndim != 5 or kv_pages.ndim != 5 or kv_pages.shape[1] != 2:
        raise ValueError(
            f"q must be [R, Q, K, G, H] and kv_pages [pages, 2, page_size, K, H]: {q.shape}, {kv_pages.shape}"
        )
    if q.shape[2] != kv_pages.shape[3] or q.shape[4] != kv_pages.shape[4]:
        raise ValueError(f"q {q.shape} and kv_pages {kv_pages.shape} differ in KV heads or head_dim")
    num_rows = q.shape[0]
    if page_table.ndim != 2 or {page_table.shape[0], *starts.shape, *lengths.shape} != {num_rows}:
        raise ValueError(
            f"page_table {page_table.shape}, starts {starts.shape} and lengths {lengths.shape} must have {num_rows} rows"
        )
    for name, array in (("page_table", page_table), ("starts", starts), ("lengths", lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")

    def attend(name: str) -> Callable[..., jax.Array]:
        return functools.partial(IMPLEMENTATIONS[name], scale=scale, sliding_window=sliding_window, softcap=softcap)

    arrays = (q, kv_pages, page_table, starts, lengths)
    if implementation is not None:
        return attend(implementation)(*arrays)
    for name, kernel in (("mosaic_gpu_decode", mosaic_gpu_decode), ("mosaic_gpu_prefill", mosaic_gpu_prefill)):
        if kernel.supports(q, kv_pages):
            return lax.platform_dependent(*arrays, cuda=attend(name), default=attend("reference"))
    return attend("reference")(*arrays)
