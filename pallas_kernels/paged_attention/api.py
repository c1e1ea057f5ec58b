"""The contract of paged attention and the choice of implementation by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_scales import QUANTISED, check_kv_scales
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill, mosaic_tpu, reference
from pallas_kernels.paged_attention.tuning import measured_tuning

IMPLEMENTATIONS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "reference": reference.paged_attention,
        "mosaic_gpu_decode": mosaic_gpu_decode.paged_attention,
        "mosaic_gpu_prefill": mosaic_gpu_prefill.paged_attention,
        "mosaic_tpu": mosaic_tpu.paged_attention,
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
    kv_scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
    device_kind: str | None = None,
) -> jax.Array:
    """Causal grouped-query attention of R rows of Q consecutive queries over keys and values in pages.

    Args:
      q: [R, Q, K, G, H], rotated queries; G query heads share one of K KV heads.
      kv_pages: [num_pages, 2, page_size, K, H], keys at [:, 0] and values at [:, 1], in q's dtype, or quantised in
        float8_e4m3fn or int8. Places past a row's end in its last page must hold numbers; pages that no row has may
        hold anything, NaN included.
      page_table: [R, P] int32, the page ids of each row's sequence in order; entries past its end are not read as
        valid keys, but must be page ids.
      starts: [R] int32, absolute position of each row's first query.
      lengths: [R] int32 in [0, Q], how many of a row's queries are real; 0 for an unused row.
      scale: scores are q . k times this.
      kv_scales: float32, what quantised values are multiplied by; None for pages in q's dtype. [2], one for all keys and
        one for all values; or [num_pages, 2, K, page_size], one a token and head, laid beside its page.
      sinks: [K, G] float32, a score a query head that takes part in its softmax and has no value (gpt-oss); not
        multiplied by `scale` nor capped.
      sliding_window: query at position p sees keys in [max(0, p - sliding_window + 1), p]; None: [0, p].
      softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
      implementation: one of IMPLEMENTATIONS; None: the fastest of the platform that takes these arrays.
      device_kind: `jax.Device.device_kind` of what the call is for, whose measured tiles GPU kernels take (`tuning.py`).
        None, or a kind or shape that nobody tuned: the tiles of the kernel's `default_tuning`.

    Returns:
      [R, Q, K, G, H] in q's dtype, softmax in float32. Exact zeros for queries at and past `lengths`. A row's bits
      are a function of the device kind, the shapes and options of the call, and the row; never of the other rows.

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
    if kv_pages.dtype not in {q.dtype, *QUANTISED}:
        raise ValueError(
            f"kv_pages must have q's dtype or one of {sorted(map(str, QUANTISED))}: {q.dtype}, {kv_pages.dtype}"
        )
    check_kv_scales(kv_pages, kv_scales)
    if sinks is not None and (sinks.dtype != jnp.float32 or sinks.shape != q.shape[2:4]):
        raise ValueError(f"sinks must be float32{list(q.shape[2:4])}: {sinks.dtype}{list(sinks.shape)}")
    num_rows = q.shape[0]
    if page_table.ndim != 2 or {page_table.shape[0], *starts.shape, *lengths.shape} != {num_rows}:
        raise ValueError(
            f"page_table {page_table.shape}, starts {starts.shape} and lengths {lengths.shape} must have {num_rows} rows"
        )
    for name, array in (("page_table", page_table), ("starts", starts), ("lengths", lengths)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")

    arrays = (q, kv_pages, page_table, starts, lengths, kv_scales, sinks)

    def attend(name: str) -> Callable[..., jax.Array]:
        options: dict[str, Any] = dict(scale=scale, sliding_window=sliding_window, softcap=softcap)
        tuning = measured_tuning(name, device_kind, q, kv_pages)
        if tuning is not None:
            options["tuning"] = tuning
        if name.startswith("mosaic_gpu") and device_kind is not None and device_kind.startswith("NVIDIA"):
            return lowered_once(IMPLEMENTATIONS[name], **options)
        return functools.partial(IMPLEMENTATIONS[name], **options)

    if implementation is not None:
        return attend(implementation)(*arrays)
    kernels: dict[str, Callable[..., jax.Array]] = {}
    for name, kernel in (("mosaic_gpu_decode", mosaic_gpu_decode), ("mosaic_gpu_prefill", mosaic_gpu_prefill)):
        if "cuda" not in kernels and kernel.supports(q, kv_pages, kv_scales, sinks):
            kernels["cuda"] = attend(name)
    if mosaic_tpu.supports(q, kv_pages, kv_scales, sinks):
        kernels["tpu"] = attend("mosaic_tpu")
    if not kernels:
        return attend("reference")(*arrays)
    return lax.platform_dependent(*arrays, **kernels, default=attend("reference"))
