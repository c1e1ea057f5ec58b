"""The register code of the Hopper decode kernel, run over numpy: each value is an array over the 128 threads.

What the instructions do, and where wgmma wants its operand, is written here anew from the PTX ISA (9.7.14.5.15 ldmatrix,
9.7.9.7 prmt, 9.7.15.5.1 wgmma register fragments) and from the TMA's swizzle, bits 7 to 9 of the address XORed into bits 4
to 6 (5 and 4 for rows of 64 and 32 bytes).
"""

from __future__ import annotations

import re
import secrets
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention import mosaic_gpu_registers as registers

LANE, WARP = np.arange(128) % 32, np.arange(128) // 32


class Float8E4M3FNType:
    pass


class Int8Type:
    pass


def run_ptx(ptx: str, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the block's instructions, over uint32 registers; $2 in, ($0, $1) out."""
    values: dict[str, np.ndarray] = {"$2": source.astype(np.uint32)}

    def value(name: str) -> np.ndarray:
        return values[name] if name in values else np.full(128, int(name, 0), np.uint32)

    for statement in ptx.strip("{ }").split(";"):
        name, _, operands = statement.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        if match := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", operands):
            word = value(match[3])
            values[match[1]], values[match[2]] = word & 0xFFFF, word >> 16
            continue
        target, *sources = operands.split(", ")
        inputs = [value(s) for s in sources]
        if name == "mov.b32":
            values[target] = inputs[0]
        elif name == "xor.b32":
            values[target] = inputs[0] ^ inputs[1]
        elif name == "prmt.b32":
            eight = np.stack([(inputs[i // 4] >> (8 * (i % 4))) & 0xFF for i in range(8)])
            picks = [eight[(int(sources[2], 0) >> (4 * i)) & 7] << (8 * i) for i in range(4)]
            values[target] = picks[0] | picks[1] | picks[2] | picks[3]
        elif name == "cvt.rn.f16x2.e4m3x2":
            pair = inputs[0].astype(np.uint16).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
            values[target] = pair.astype(np.float16).view(np.uint32)
        elif name == "sub.f16x2":
            a, b = (np.ascontiguousarray(x.astype(np.uint32)).view(np.float16) for x in inputs)
            values[target] = (a - b).view(np.uint32)
        else:
            raise AssertionError(f"not known: {statement}")
    return values["$0"], values["$1"]


class Machine:
    """Shared memory with one buffer in it, and the instructions that reach it."""

    def __init__(self, content: np.ndarray, memref_shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
        self.memory = np.concatenate([np.zeros(4096, np.uint8), content.reshape(-1).view(np.uint8)])
        element_type = Int8Type() if content.dtype == np.int8 else Float8E4M3FNType()
        self.ref = types.SimpleNamespace(
            shape=content.shape, type=types.SimpleNamespace(shape=memref_shape, element_type=element_type)
        )
        arith = dict(addi="add", muli="multiply", andi="bitwise_and", xori="bitwise_xor", shli="left_shift")
        arith |= dict(shrui="right_shift", divui="floor_divide", remui="remainder")
        fakes = dict(
            _i32=lambda value: np.full(128, value),
            _in_wgmma_layout=lambda words, shape: words,
            arith=types.SimpleNamespace(**{name: getattr(np, of) for name, of in arith.items()}),
            llvm=types.SimpleNamespace(
                ptrtoint=lambda _, pointer: pointer,
                inttoptr=lambda _, address: address,
                load=lambda _, address: self.memory[address[:, None] + np.arange(4)].view(np.float32)[:, 0],
                extractvalue=lambda _, values, index: values[index[0]],
                PointerType=types.SimpleNamespace(get=lambda _: None),
            ),
            nvvm=types.SimpleNamespace(
                ldmatrix=self.ldmatrix,
                MMALayout=types.SimpleNamespace(row="row", col="col"),
                LdStMatrixEltType=types.SimpleNamespace(B16=None),
            ),
            utils=types.SimpleNamespace(
                memref_ptr=lambda _: np.full(128, 4096),
                thread_idx=lambda: np.arange(128),
                warp_idx=lambda: WARP,
                inline_ptx=lambda ptx, word, result_types: run_ptx(ptx, word),
                WORKGROUP_NVPTX_ADDRESS_SPACE=3,
            ),
            mgpu=types.SimpleNamespace(FragmentedArray=lambda _registers, **_: _registers),
            ir=types.SimpleNamespace(
                MemRefType=lambda memref_type: memref_type,
                IntegerType=types.SimpleNamespace(get_signless=lambda _: None),
                Attribute=types.SimpleNamespace(parse=lambda _: None),
                F32Type=types.SimpleNamespace(get=lambda: None),
                VectorType=types.SimpleNamespace(get=lambda *_: None),
                Float8E4M3FNType=Float8E4M3FNType,
            ),
        )
        for name, fake in fakes.items():
            monkeypatch.setattr(registers, name, fake)
        monkeypatch.setattr(
            registers.plgpu, "inline_mgpu", lambda **_: lambda function: lambda ref: function(None, ref)
        )

    def ldmatrix(self, address: np.ndarray, *, layout: str, num: int, **_) -> list[np.ndarray]:
        """Lanes 8 i to 8 i + 7 point at the 8 rows, of 16 bytes, of matrix i."""
        assert (address % 16 == 0).all()
        rows = self.memory[address[:, None] + np.arange(16)].view(np.uint16).reshape(4, num, 8, 8)
        if layout == "col":
            rows = rows.swapaxes(2, 3)
        rows = np.ascontiguousarray(rows)
        # a lane has elements 2 (lane % 4) and the next of row lane // 4
        words = rows.view(np.uint32)  # [warp, matrix, 8, 4]
        return [words[WARP, i, LANE // 4, LANE % 4] for i in range(num)]


def operand(words: np.ndarray) -> np.ndarray:
    """wgmma's first operand from its registers."""
    parts, tiles, _ = words.shape
    out = np.full((64 * parts, 8 * tiles), np.nan, np.float16)
    for (part, tile, half), word in np.ndenumerate(words):
        pair = np.ascontiguousarray(word).view(np.float16).reshape(128, 2)
        for i in range(2):
            out[64 * part + 16 * WARP + LANE // 4 + 8 * half, 8 * tile + 2 * (LANE % 4) + i] = pair[:, i]
    return out


def swizzled_tile(tile: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The tile as copies leave it."""
    rows, width = tile.shape
    row_bytes = min(128, width)
    row, column = np.indices(tile.shape)
    memref_shape = (rows // 8, width // row_bytes, 8, row_bytes)
    address = ((row // 8 * (width // row_bytes) + column // row_bytes) * 8 + row % 8) * row_bytes + column % row_bytes
    address ^= ((address >> 7) & (row_bytes // 16 - 1)) << 4
    content = np.zeros_like(tile)
    content.reshape(-1)[address] = tile
    return Machine(content, memref_shape, monkeypatch)


def in_tiles(array: np.ndarray, tiles: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Each tile in turn cuts the last axes into how many and how large."""
    for tile in tiles:
        outer, inner = array.shape[: -len(tile)], array.shape[-len(tile) :]
        split = [size for d, t in zip(inner, tile, strict=True) for size in (d // t, t)]
        axes = [*range(len(outer)), *(len(outer) + 2 * i + part for part in (0, 1) for i in range(len(tile)))]
        array = array.reshape(*outer, *split).transpose(axes)
    return array


def random_tile(dtype, width: int) -> np.ndarray:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    raw = np.random.default_rng(seed).integers(0, 256, (64, width), np.uint8)
    if dtype != np.int8:
        raw[(raw & 0x7F) == 0x7F] = 0x80  # NaN differs from itself
    return raw.view(dtype)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_keys_come_widened_in_the_order_of_the_queries(dtype, width: int, monkeypatch) -> None:
    tile = random_tile(dtype, width)
    order = np.asarray(registers.order_like_widened_keys(jnp.arange(width)))
    assert sorted(order) == list(range(width))
    out = operand(registers.widened_keys(swizzled_tile(tile, monkeypatch).ref))
    np.testing.assert_array_equal(out, tile.astype(np.float16)[:, order])


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_values_come_widened_in_the_order_that_the_store_undoes(dtype, width: int, monkeypatch) -> None:
    tile = random_tile(dtype, width)
    layout = registers._NEIGHBOURS.to_mgpu()
    out = operand(registers.widened_values(swizzled_tile(tile, monkeypatch).ref))
    # where the store puts what register (group, 0, half) of a thread holds, of a product of 8 columns
    places = in_tiles(np.arange(width * 8).reshape(width, 8), layout.tiling.tiles)
    assert (layout.warp_dims, layout.lane_dims, layout.vector_dim) == ((-7,), (-5, -2), -1)
    for group in range(width // 64):
        for half in range(2):
            place = places[group, 0, WARP, 0, LANE // 4, 0, half, LANE % 4, 0]
            product_row = 64 * group + 16 * WARP + LANE // 4 + 8 * half
            np.testing.assert_array_equal(out[product_row], tile.astype(np.float16).T[place // 8])
            np.testing.assert_array_equal(place % 8, 2 * (LANE % 4))


@pytest.mark.parametrize("num_copies", [1, 2, 4])
@pytest.mark.parametrize("part", [0, 1])
def test_scales_come_beside_the_rows_of_a_product(num_copies: int, part: int, monkeypatch) -> None:
    rows = 64 // num_copies
    scales = np.arange(128, dtype=np.float32).reshape(num_copies, 2, rows)
    values = registers.row_scales(Machine(scales, scales.shape, monkeypatch).ref, part)
    for half, value in enumerate(values.flat):
        row = 16 * WARP + LANE // 4 + 8 * half
        np.testing.assert_array_equal(value, scales[row // rows, part, row % rows])
