"""Measured tiles: which file and entry a call takes, and that the packaged files hold what the kernels accept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention import mosaic_gpu_decode, mosaic_gpu_prefill, paged_attention, tuning
from pallas_kernels.paged_attention.tuning import DecodeShape, PrefillShape, entry_of, measured_tuning, read_tiles

DECODE = mosaic_gpu_decode.Tuning(num_stages=3, num_blocks=264, chunks=((2048, 512), (1 << 30, 2048)))
PREFILL = mosaic_gpu_prefill.Tuning(
    block_kv=64, num_key_stages=4, num_value_stages=3, num_query_stages=1, out_columns=128
)
SHARED_BYTES = 227 * 1024  # of a Hopper block


def arrays(num_rows=8, num_queries=1, num_groups=4, page_size=16, kv_dtype="bfloat16"):
    q = jax.ShapeDtypeStruct((num_rows, num_queries, 8, num_groups, 128), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((9, 2, page_size, 8, 128), jnp.dtype(kv_dtype))


def content(**changes):
    decode = entry_of(DecodeShape.of(*arrays()), DECODE, 10.0, 11.0)
    prefill = entry_of(PrefillShape.of(*arrays(num_queries=64)), PREFILL, 10.0, 11.0)
    header = dict(device="A Card", jax="0.11.2", date="2026-11-30", command="python tune_attention.py")
    return header | dict(mosaic_gpu_decode=[decode], mosaic_gpu_prefill=[prefill]) | changes


@pytest.fixture
def a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device kind that has a file."""
    monkeypatch.setattr(tuning, "TILES", tmp_path)
    (tmp_path / "a_card.json").write_text(json.dumps(content()))
    return "A Card"


def test_a_measured_shape_has_its_tiles_and_no_other_has(a_card: str) -> None:
    assert measured_tuning("mosaic_gpu_decode", a_card, *arrays()) == DECODE
    assert measured_tuning("mosaic_gpu_prefill", a_card, *arrays(num_queries=64)) == PREFILL
    assert measured_tuning("mosaic_gpu_prefill", a_card, *arrays(num_rows=3, num_queries=64)) == PREFILL
    for other in (
        dict(num_rows=9),
        dict(num_queries=2),
        dict(num_groups=8),
        dict(page_size=32),
        dict(kv_dtype="float8_e4m3fn"),
    ):
        assert measured_tuning("mosaic_gpu_decode", a_card, *arrays(**other)) is None
    assert measured_tuning("reference", a_card, *arrays()) is None
    assert measured_tuning("mosaic_gpu_decode", None, *arrays()) is None
    assert measured_tuning("mosaic_gpu_decode", "Another Card", *arrays()) is None


def traced(**options) -> str:
    q, kv_pages = arrays()
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    table = jax.ShapeDtypeStruct((8, 256), jnp.int32)

    def attend(*arrays):
        return paged_attention(*arrays, scale=0.1, implementation="mosaic_gpu_decode", **options)

    return str(jax.make_jaxpr(attend)(q, kv_pages, table, rows, rows))


def test_a_call_takes_the_tiles_of_its_device_kind(a_card: str) -> None:
    grid = f"grid=({DECODE.num_blocks},)"
    assert grid in traced(device_kind=a_card)
    assert grid not in traced()
    assert traced(device_kind="Another Card") == traced()


@pytest.mark.parametrize(
    "changes",
    [
        dict(mosaic_gpu_decode=[{}]),
        dict(mosaic_gpu_decode=content()["mosaic_gpu_decode"] * 2),
        dict(mosaic_gpu_decode=content()["mosaic_gpu_prefill"]),
        dict(more=1),
    ],
)
def test_a_malformed_file_is_refused(changes, tmp_path: Path) -> None:
    path = tmp_path / "a_card.json"
    path.write_text(json.dumps(content(**changes)))
    with pytest.raises(AssertionError, match=r"a_card\.json"):
        read_tiles(path)


@pytest.mark.parametrize("path", sorted(tuning.TILES.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tiles_are_ones_that_the_kernels_accept(path: Path) -> None:
    header = json.loads(path.read_text())
    assert path == tuning.tiles_file(header["device"])
    assert all(header[name] for name in tuning.HEADER) or not read_tiles(path)
    for shape, tiles in read_tiles(path).items():
        value_bytes = jnp.dtype(shape.kv_dtype).itemsize
        if isinstance(shape, DecodeShape):
            assert isinstance(tiles, mosaic_gpu_decode.Tuning)
            limits, chunks = zip(*tiles.chunks, strict=True)
            assert list(limits) == sorted(set(limits)) and limits[-1] == 1 << 30
            assert all(chunk % mosaic_gpu_decode.TILE == 0 for chunk in chunks)
            assert shape.num_columns <= mosaic_gpu_decode.MAX_COLUMNS and tiles.num_blocks >= 1
            ring_bytes = tiles.num_stages * 2 * mosaic_gpu_decode.TILE * shape.head_dim * value_bytes
            assert tiles.num_stages >= 1 and ring_bytes < SHARED_BYTES
        else:
            assert isinstance(tiles, mosaic_gpu_prefill.Tuning)
            assert (
                tiles.block_kv % 64 == 0 == max(tiles.block_kv, shape.page_size) % min(tiles.block_kv, shape.page_size)
            )
            assert shape.head_dim % tiles.out_columns == 0
            counts = (tiles.num_key_stages, tiles.num_value_stages, tiles.num_query_stages, tiles.num_blocks)
            assert all(count >= 1 for count in counts)
            # bfloat16 rings, tiles of 128 queries and of the result; two steps before they are widened
            rings = (tiles.num_key_stages + tiles.num_value_stages) * tiles.block_kv * shape.head_dim * 2
            queries = 128 * 2 * (tiles.num_query_stages * shape.head_dim + tiles.out_columns)
            raw = 2 * tiles.block_kv * shape.head_dim if value_bytes == 1 else 0
            assert rings + queries + raw < SHARED_BYTES


def test_an_entry_is_all_of_a_tuning_but_what_interpret_mode_asks_for() -> None:
    for kind, tiles in ((mosaic_gpu_decode.Tuning, DECODE), (mosaic_gpu_prefill.Tuning, PREFILL)):
        names = {field.name for field in dataclasses.fields(kind)}
        assert set(entry_of(DecodeShape.of(*arrays()), tiles, 1.0, 1.0)["tuning"]) == names - {"is_interpretable"}
