"""Parts of the Hopper decode kernel that Pallas cannot say: what lies in which register of which thread.

Fragment layouts are those of the PTX ISA (9.7.15, wgmma.m64nNk16; 9.7.14.5.15, ldmatrix). A warp loads 8 x 16 byte
matrices of 8-bit values and widens them to float16 on the way into the first operand of wgmma, which takes it from
registers:

- keys [64 keys, H]: a thread gets 4 neighbours of a row where the operand wants 2 and 2 that lie 8 columns on, so the
  columns of each 16 are out of order. `order_like_widened_keys` puts the queries' in the same order, and sums over
  columns do not care.
- values, turned into [H, 64 keys] by the load: a thread gets 2 neighbouring rows where the operand wants rows 8 apart, so
  the rows of each 16 are out of order. `store_in_order` puts the product's back.

Interpret mode knows none of this; the kernel has another way there, which is slower.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm


def swizzled(width: int, itemsize: int) -> tuple:
    """Transforms of a shared memory buffer whose rows of `width` values a tensor core or ldmatrix reads."""
    row_bytes = math.gcd(128, width * itemsize)
    return (plgpu.TilingTransform((8, row_bytes // itemsize)), plgpu.SwizzleTransform(row_bytes))  # type: ignore[abstract]


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _swizzle(row: ir.Value, row_bytes: int) -> ir.Value:
    """What the 16-byte chunk of a row's place is XORed with: bits 7 to 9 of the address, as far as a row has chunks."""
    return arith.andi(arith.shrui(row, _i32({128: 0, 64: 1, 32: 2}[row_bytes])), _i32(row_bytes // 16 - 1))


class _Tile:
    """A swizzled tile [64, width] of 8-bit values in shared memory."""

    def __init__(self, ref: ir.Value):
        _, self.column_tiles, _, self.row_bytes = ir.MemRefType(ref.type).shape
        self.chunks_per_row = self.row_bytes // 16
        self.row_tile_bytes = self.column_tiles * 8 * self.row_bytes
        self.pointer = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))

    def lane_address(self, row: ir.Value, low_chunk: ir.Value) -> ir.Value:
        """Of the thread's row and 16-byte chunk, before a constant even chunk is XORed in."""
        of_tile = arith.muli(arith.shrui(row, _i32(3)), _i32(self.row_tile_bytes))
        of_row = arith.muli(arith.andi(row, _i32(7)), _i32(self.row_bytes))
        chunk = arith.xori(low_chunk, _swizzle(row, self.row_bytes))
        return arith.addi(arith.addi(of_tile, of_row), arith.shli(chunk, _i32(4)))

    def load(self, lane_address: ir.Value, row: int, chunk: int, *, is_transposed: bool) -> list[ir.Value]:
        """Four matrices; `row` (a multiple of 32) and `chunk` (whose bits no thread's own chunk has) are constants."""
        i32 = ir.IntegerType.get_signless(32)
        column_tile, chunk = divmod(chunk, self.chunks_per_row)
        constant = row // 8 * self.row_tile_bytes + column_tile * 8 * self.row_bytes
        address = arith.xori(lane_address, _i32(chunk * 16)) if chunk else lane_address
        address = arith.addi(self.pointer, arith.addi(address, _i32(constant)))
        words = nvvm.ldmatrix(
            llvm.inttoptr(llvm.PointerType.get(utils.WORKGROUP_NVPTX_ADDRESS_SPACE), address),
            layout=nvvm.MMALayout.col if is_transposed else nvvm.MMALayout.row,
            num=4,
            shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
            elt_type=nvvm.LdStMatrixEltType.B16,
        )
        return [llvm.extractvalue(i32, words, [i]) for i in range(4)]


def _widened(word: ir.Value, dtype: ir.Type, *, is_interleaved: bool) -> tuple[ir.Value, ir.Value]:
    """Bytes 0 and 1, and 2 and 3, as two float16 each; or where interleaved 0 and 2, and 1 and 3."""
    i32 = ir.IntegerType.get_signless(32)
    if isinstance(dtype, ir.Float8E4M3FNType):
        order = "prmt.b32 w, $2, 0, 0x3120; " if is_interleaved else "mov.b32 w, $2; "
        ptx = (
            "{ .reg .b32 w; .reg .b16 low, high; "
            + order
            + "mov.b32 {low, high}, w; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
        )
    else:
        # byte + 128 as the low bits of 1024.0, whose last bit is worth 1
        first, second = ("0x4240", "0x4341") if is_interleaved else ("0x4140", "0x4342")
        ptx = (
            "{ .reg .b32 w, a, b, c; xor.b32 w, $2, 0x80808080; mov.b32 c, 0x64646464; "
            f"prmt.b32 a, w, c, {first}; prmt.b32 b, w, c, {second}; mov.b32 c, 0x64806480; "  # 1152.0 twice
            "sub.f16x2 $0, a, c; sub.f16x2 $1, b, c; }"
        )
    first_pair, second_pair = utils.inline_ptx(ptx, word, result_types=(i32, i32))
    return first_pair, second_pair


def _in_wgmma_layout(words: np.ndarray, shape: tuple[int, int]) -> mgpu.FragmentedArray:
    """words[rows // 64, columns // 8, 2]: two float16 of a thread's row and of the row 8 on."""
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    registers = np.empty(fragmented_array.WGMMA_LAYOUT.registers_shape(shape), object)
    registers.flat = [utils.bitcast(word, pair) for word in words.flat]
    return mgpu.FragmentedArray(_registers=registers, _layout=fragmented_array.WGMMA_LAYOUT, _is_signed=None)


def _lane_and_warp() -> tuple[ir.Value, ir.Value]:
    return arith.andi(utils.thread_idx(), _i32(31)), arith.andi(utils.warp_idx(), _i32(3))


def widened_keys(ref) -> jax.Array:
    """A `_Tile` of 8-bit values -> [64, width] float16, columns in the order of `order_like_widened_keys`."""
    width = ref.shape[-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(width, 1)),),
        return_type=plgpu.ShapeDtypeStruct((64, width), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def widen(_, ref):
        tile, (lane, warp) = _Tile(ref), _lane_and_warp()
        row = arith.addi(arith.muli(warp, _i32(16)), arith.andi(lane, _i32(15)))
        address = tile.lane_address(row, arith.shrui(lane, _i32(4)))
        words = np.empty((1, width // 8, 2), object)
        for chunk in range(0, width // 16, 2):
            loaded = tile.load(address, 0, chunk, is_transposed=False)
            for i, word in enumerate(loaded):
                column = 2 * (chunk + i // 2)
                low, high = _widened(word, ir.MemRefType(ref.type).element_type, is_interleaved=False)
                words[0, column, i % 2], words[0, column + 1, i % 2] = low, high
        return _in_wgmma_layout(words, (64, width))

    return widen(ref)


def order_like_widened_keys(x: jax.Array) -> jax.Array:
    """The last axis in the order in which `widened_keys` has it."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 4, 2, 2), -3, -2).reshape(x.shape)


def widened_values(ref) -> jax.Array:
    """A `_Tile` of 8-bit values -> [width, 64] float16, rows in the order that `store_in_order` undoes."""
    width = ref.shape[-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(swizzled(width, 1)),),
        return_type=plgpu.ShapeDtypeStruct((width, 64), jnp.float16, layout=plgpu.Layout.WGMMA),
    )
    def widen(_, ref):
        tile, (lane, warp) = _Tile(ref), _lane_and_warp()
        address = tile.lane_address(lane, warp)
        words = np.empty((width // 64, 8, 2), object)
        for group in range(width // 64):
            for half in range(2):
                loaded = tile.load(address, 32 * half, 4 * group, is_transposed=True)
                for i, word in enumerate(loaded):
                    words[group, 4 * half + i] = _widened(
                        word, ir.MemRefType(ref.type).element_type, is_interleaved=True
                    )
        return _in_wgmma_layout(words, (width, 64))

    return widen(ref)


def row_scales(ref, part: int) -> jax.Array:
    """ref [copies, 2, rows a copy] float32 in shared memory, of a tile of 64 keys -> [64], beside the rows of a product."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    rows_per_copy = ref.shape[2]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout)
    )
    def load(_, ref):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pointer = llvm.ptrtoint(i32, utils.memref_ptr(ref))
        lane, warp = _lane_and_warp()
        registers = np.empty(2, object)
        for half in range(2):
            row = arith.addi(arith.muli(warp, _i32(16)), arith.addi(arith.shrui(lane, _i32(2)), _i32(8 * half)))
            copy, row = arith.divui(row, _i32(rows_per_copy)), arith.remui(row, _i32(rows_per_copy))
            place = arith.addi(arith.muli(copy, _i32(2 * rows_per_copy)), arith.addi(row, _i32(part * rows_per_copy)))
            address = arith.addi(pointer, arith.muli(place, _i32(4)))
            pointer_type = llvm.PointerType.get(utils.WORKGROUP_NVPTX_ADDRESS_SPACE)
            registers[half] = llvm.load(ir.VectorType.get((1,), f32), llvm.inttoptr(pointer_type, address))
        registers = registers.reshape(layout.to_mgpu().registers_shape((64,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(ref)


# a thread's rows of 16, which `widened_values` makes neighbours
_NEIGHBOURS = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (16, 8), (2, 8), (2,))), warp_dims=(-7,), lane_dims=(-5, -2), vector_dim=-1
)


def store_in_order(ref, x: jax.Array) -> None:
    """x [H, N] float32, the product of `widened_values`, to global memory, its rows in the order of the values' columns."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, x):
        layout = _NEIGHBOURS.to_mgpu()
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None).store_untiled(ref, optimized=False)

    store(ref, x)
