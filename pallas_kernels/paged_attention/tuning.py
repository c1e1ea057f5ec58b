"""Tiles that were measured: a data file a device kind, each entry for one shape of a kernel's call.

`benchmarks/kernels/tune_attention.py` writes the files. A shape that none has takes its kernel's `default_tuning`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill

TILES = Path(__file__).parent / "tiles"
HEADER = ("device", "jax", "date", "command")  # of a file: what the times are of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """What an entry of `mosaic_gpu_decode` is for; `num_columns` queries times query heads share a KV head."""

    num_rows: int
    num_kv_heads: int
    num_columns: int
    head_dim: int
    kv_dtype: str
    page_size: int

    @staticmethod
    def of(q: jax.Array, kv_pages: jax.Array) -> DecodeShape:
        return DecodeShape(
            num_rows=q.shape[0],
            num_kv_heads=q.shape[2],
            num_columns=q.shape[1] * q.shape[3],
            head_dim=q.shape[4],
            kv_dtype=str(kv_pages.dtype),
            page_size=kv_pages.shape[2],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """What an entry of `mosaic_gpu_prefill` is for: rows of `num_queries` queries, `num_groups` query heads a KV head."""

    num_queries: int
    num_groups: int
    head_dim: int
    kv_dtype: str
    page_size: int

    @staticmethod
    def of(q: jax.Array, kv_pages: jax.Array) -> PrefillShape:
        return PrefillShape(
            num_queries=q.shape[1],
            num_groups=q.shape[3],
            head_dim=q.shape[4],
            kv_dtype=str(kv_pages.dtype),
            page_size=kv_pages.shape[2],
        )


Shape = DecodeShape | PrefillShape
Tuning = mosaic_gpu_decode.Tuning | mosaic_gpu_prefill.Tuning
KINDS: Mapping[str, tuple[type[Shape], type[Tuning]]] = MappingProxyType(
    {
        "mosaic_gpu_decode": (DecodeShape, mosaic_gpu_decode.Tuning),
        "mosaic_gpu_prefill": (PrefillShape, mosaic_gpu_prefill.Tuning),
    }
)


def measured_tuning(kernel: str, device_kind: str | None, q: jax.Array, kv_pages: jax.Array) -> Tuning | None:
    """The fastest tiles of `kernel` for these shapes on a `jax.Device.device_kind`; None where no file has them."""
    if device_kind is None or kernel not in KINDS:
        return None
    return read_tiles(tiles_file(device_kind)).get(KINDS[kernel][0].of(q, kv_pages))


def tiles_file(device_kind: str) -> Path:
    return TILES / f"{device_kind.lower().replace(' ', '_')}.json"


@functools.cache
def read_tiles(path: Path) -> Mapping[Shape, Tuning]:
    """The entries of a file; none if there is no such file. The files are ours: a malformed one is an AssertionError."""
    if not path.is_file():
        return MappingProxyType({})
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) == {*HEADER, *KINDS}, f"{path}: {sorted(content)}"
    tiles: dict[Shape, Tuning] = {}
    for kernel, (shape_class, tuning_class) in KINDS.items():
        for entry in content[kernel]:
            assert set(entry) == {"shape", "tuning", "us", "default_us"}, f"{path}, {kernel}: {entry}"
            assert set(entry["shape"]) == _field_names(shape_class), f"{path}, {kernel}: {entry}"
            assert set(entry["tuning"]) == _field_names(tuning_class) - {"is_interpretable"}, (
                f"{path}, {kernel}: {entry}"
            )
            shape = shape_class(**entry["shape"])
            assert shape not in tiles, f"{path}, {kernel}: twice {entry['shape']}"
            tiles[shape] = tuning_class(**{name: _frozen(value) for name, value in entry["tuning"].items()})
    return MappingProxyType(tiles)


def entry_of(shape: Shape, tuning: Tuning, us: float, default_us: float) -> dict[str, Any]:
    """What a file says of one shape: `us` is the time that the tuner measured, `default_us` that of `default_tuning`."""
    fields = dataclasses.asdict(tuning)
    del fields["is_interpretable"]
    return dict(shape=dataclasses.asdict(shape), tuning=fields, us=us, default_us=default_us)


def _field_names(kind: type[Shape | Tuning]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _frozen(value: int | list) -> Any:
    """JSON's lists as tuples, of numbers alone."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    assert type(value) is int, f"not a whole number: {value!r}"
    return value
