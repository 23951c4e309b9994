"""Products of 1 to 8 rows of x with packed matrices, on tensor cores straight from the codes. Triton.

A warp multiplies 16 rows of the matrix by x with `mma.m16n8k16`: its lane (g of 8, t of 4) holds the codes of rows g
and g + 8 and, of the columns, whole units of its own t. So no code is moved between threads; it becomes a number where
it lies (ops/triton_numbers.py), as 2^e + code; what was added is taken off with the same product of x and constants.
The eight columns of the instruction keep groups' sums apart: column n holds units of t = n % 4, and the n // 4-th of
two rows of x, or half of the units if there is one row. Sums are float32.

A tile is 16 rows; warps share its columns, chunk by chunk. A program has one, or gate's and up's, whose sums meet in it
before they are written. Reference and layout: ops/packed.py. Tensors are [thread].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.follow import await_results, follow
from engine.ops.packed import UNIT, Packed
from engine.ops.triton_lanes import fetch, numbers, scales
from engine.ops.triton_layers import silu_times
from engine.ops.triton_mma import in_order, inlined, mma
from engine.ops.triton_numbers import constants, number, taken
from engine.weights.quant import BYTES, NIBBLES, NONE, SIGNED, QuantType

_SUBS = {NONE: 0, SIGNED: 1, NIBBLES: 2, BYTES: 3}


@inlined
def _step(
    words, words_too, x, c, F: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr, TABLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):  # fmt: skip
    """Add `number` x of field F of a unit, for rows g and g + 8."""
    return mma(
        number(words, F, 0, BITS, MAGIC, TABLE, MANTISSA), number(words_too, F, 0, BITS, MAGIC, TABLE, MANTISSA),
        number(words, F, 1, BITS, MAGIC, TABLE, MANTISSA), number(words_too, F, 1, BITS, MAGIC, TABLE, MANTISSA),
        x[2 * F], x[2 * F + 1], c, MANTISSA,
    )  # fmt: skip


@inlined
def _same(x, c, F: tl.constexpr, WEIGHT: tl.constexpr, MANTISSA: tl.constexpr):
    """Add a constant times x of field F, the same for every row."""
    a = tl.full(x[0].shape, WEIGHT[F], tl.int32)
    return mma(a, a, a, a, x[2 * F], x[2 * F + 1], c, MANTISSA)


@inlined
def _sums(
    words, words_too, x, zero, BITS: tl.constexpr, MORE: tl.constexpr, MAGIC: tl.constexpr, MORE_MAGIC: tl.constexpr,
    ADDED: tl.constexpr, ADDED_TOO: tl.constexpr, ONE: tl.constexpr, TABLE: tl.constexpr,
    HALF: tl.constexpr, BOTH: tl.constexpr, SAME: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Sums over a part of units: of `number` x, of one unit, and of the other if BOTH.

    And if SAME, those that are the same for every row: of what was added to codes; of x if ONE is not 0. All side by
    side, because each waits for its last.
    """
    ADJACENT: tl.constexpr = BITS == 2
    c = (zero, zero, zero, zero)
    upper, added, total = c, c, c
    low, low_too = taken(words, 0, HALF, BITS, ADJACENT, TABLE), taken(words_too, 0, HALF, BITS, ADJACENT, TABLE)
    if BOTH:
        up, up_too = taken(words, 0, 1, BITS, ADJACENT, TABLE), taken(words_too, 0, 1, BITS, ADJACENT, TABLE)
    if MORE > 0:
        high, high_too = taken(words, 1, HALF, MORE, ADJACENT, None), taken(words_too, 1, HALF, MORE, ADJACENT, None)
        if BOTH:
            top, top_too = taken(words, 1, 1, MORE, ADJACENT, None), taken(words_too, 1, 1, MORE, ADJACENT, None)
    for F in tl.static_range(8 // PARTS * PART, 8 // PARTS * (PART + 1)):
        c = _step(low, low_too, x, c, F, BITS, MAGIC, TABLE, MANTISSA)
        if BOTH:
            upper = _step(up, up_too, x, upper, F, BITS, MAGIC, TABLE, MANTISSA)
        if SAME and ADDED[F] != 0:
            added = _same(x, added, F, ADDED, MANTISSA)
        if SAME and ADDED_TOO[F] != 0:
            added = _same(x, added, F, ADDED_TOO, MANTISSA)
        if MORE > 0:
            c = _step(high, high_too, x, c, F, MORE, MORE_MAGIC, None, MANTISSA)
            if BOTH:
                upper = _step(top, top_too, x, upper, F, MORE, MORE_MAGIC, None, MANTISSA)
        if SAME and ONE[F] != 0:
            total = _same(x, total, F, ONE, MANTISSA)
    return c, upper, added, total


@inlined
def _added(results, value, AT: tl.constexpr):
    """The tuple with a value added to one of its tensors."""
    found = ()
    for index in tl.static_range(len(results)):
        found += (results[index] + value,) if index == AT else (results[index],)
    return found


@inlined
def _whole(result, result_too, SINGLE: tl.constexpr, STEP: tl.constexpr):
    """Threads' sums added up: [8, rows of x, 2] of the rows g and g + 8 of a tile."""
    WARPS: tl.constexpr = result.shape[0] // 32
    HALVES: tl.constexpr = 1 if SINGLE else 2
    by_row = tl.reshape(tl.join(result, result_too), [WARPS, 8, HALVES, 4 // HALVES, 2])
    return tl.sum(tl.sum(by_row, 3), 0) * STEP


@inlined
def _store(out, total, first, x_row, count, rows, out_stride):
    """Write the sums of rows first .. first + 15."""
    row = first + tl.arange(0, 8)[:, None, None] + 8 * tl.arange(0, 2)[None, None, :]
    x_row = x_row + tl.arange(0, total.shape[1])[None, :, None]
    tl.store(out + x_row * out_stride + row, total.to(out.dtype.element_ty), mask=(row < rows) & (x_row < count))


@triton.jit
def _multiply_few(
    x, low_plane, high_plane, d, m, sub, out, count, rows, units, x_stride, out_stride,
    BITS: tl.constexpr, MORE: tl.constexpr, MAGIC: tl.constexpr, MORE_MAGIC: tl.constexpr,
    ADDED: tl.constexpr, ADDED_TOO: tl.constexpr, ONE: tl.constexpr, TABLE: tl.constexpr, TOTALS: tl.constexpr,
    STEP: tl.constexpr, LOW: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, PER_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, PAIRS: tl.constexpr, SINGLE: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = 2 if BITS == 2 else 1
    NEXT: tl.constexpr = 1 if BITS == 2 else 4
    TILES: tl.constexpr = 2 if GATED else 1
    thread = tl.arange(0, 32 * WARPS)
    t, g, warp = thread % 4, thread // 4 % 8, thread // 32
    first_row = tl.program_id(0).to(tl.int64) * 16
    # The first fetch waits for nobody: of the kernels that take part, none writes a matrix.
    own = fetch(
        low_plane, high_plane, d, m, sub, first_row, rows, 8 * warp, t, g, units, BITS, MORE, LOW, SUB, PER_BLOCK,
        SINGLE, TILES,
    )  # fmt: skip
    await_results(FOLLOW)
    zero = tl.zeros([32 * WARPS], tl.float32)
    results = ()
    for _ in tl.static_range(2 * PAIRS * TILES):
        results += (zero,)
    for first in range(0, units, 8 * WARPS):
        chunk = first + 8 * warp
        coming = fetch(
            low_plane, high_plane, d, m, sub, first_row, rows, chunk + 8 * WARPS, t, g, units, BITS, MORE, LOW, SUB,
            PER_BLOCK, SINGLE, TILES,
        )  # fmt: skip
        in_order()
        for step in tl.static_range(1 if SINGLE else 2 * PAIRS):
            if SINGLE:
                x_row, unit = g * 0, chunk + STRIDE * t + NEXT * (g // 4)
            else:
                x_row, unit = 2 * (step % PAIRS) + g // 4, chunk + STRIDE * t + NEXT * (step // PAIRS)
            chosen = numbers(x, x_row * x_stride, unit, (g % 4 == t) & (unit < units) & (x_row < count))
            in_order()
            for part in tl.static_range(PARTS):
                for tile in tl.static_range(TILES):
                    sums, upper, added_here, total_here = _sums(
                        own[2 * tile][0], own[2 * tile + 1][0], chosen, zero, BITS, MORE, MAGIC, MORE_MAGIC, ADDED,
                        ADDED_TOO, ONE, TABLE, step // PAIRS, SINGLE, tile == 0, part, PARTS, MANTISSA,
                    )  # fmt: skip
                    if tile == 0:
                        added, total = added_here, total_here
                        if TOTALS != 0:
                            total = added[0] * TOTALS, added[1] * TOTALS, added[2], added[3]
                    if SINGLE:
                        sums = (
                            tl.where(t < 2, sums[0], upper[0]), tl.where(t < 2, sums[1], upper[1]),
                            tl.where(t < 2, sums[2], upper[2]), tl.where(t < 2, sums[3], upper[3]),
                        )  # fmt: skip
                    for which in tl.static_range(2):
                        scale = scales(own[2 * tile + which][1], step // PAIRS, part, LOW, SUB, PER_BLOCK)
                        found = scale[0] * (sums[2 * which] - added[0]) + scale[1] * (sums[2 * which + 1] - added[1])
                        if LOW != 0:
                            found += scale[2] * total[0] + scale[3] * total[1]
                        results = _added(results, found, 2 * (step % PAIRS + tile) + which)
        own = coming
    if GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        gate = _whole(results[0], results[1], SINGLE, STEP).to(dtype).to(tl.float32)
        up = _whole(results[2], results[3], SINGLE, STEP).to(dtype).to(tl.float32)
        _store(out, silu_times(gate, up, dtype), first_row, 0, count, rows // 2, out_stride)
    else:
        for pair in tl.static_range(PAIRS):
            whole = _whole(results[2 * pair], results[2 * pair + 1], SINGLE, STEP)
            _store(out, whole, first_row, 2 * pair, count, rows, out_stride)


def _scaling(kind: QuantType) -> dict[str, int]:
    return {
        "LOW": kind.low,
        "SUB": _SUBS[kind.sub],
        "PARTS": UNIT // min(kind.group, UNIT),
        "PER_BLOCK": kind.block // UNIT,
    }


def _warps(matrix: Packed, count: int) -> int:
    """How many share a tile's columns: few where rows alone fill a card, many where few rows do not.

    An H200, us: Q4_K, 24,576 x 4,096: 21.5 with 4, 23.8 with 8; 6,144 x 4,096: 8.0 and 6.5. TQ2_0, whose threads need
    half the registers: 4,096 x 4,096: 3.9 with 8, 3.6 with 16; 4,096 x 12,288: 8.9 and 7.2. 16 of Q4_K are slower.
    """
    if matrix.rows >= 1 << 14:
        return 4
    return 16 if matrix.ternary and count == 1 and matrix.rows <= 1 << 12 <= matrix.columns else 8


def multiply_few(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """As `Kernels.multiply`, for 1 to 8 rows of x of 16 bits an element."""
    _launch(x, matrix, out, matrix.ternary, gated=False)


def multiply_gated(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """As `Kernels.gated`, for x of 16 bits an element.

    Codes are not put at the top of floats: TQ2_0, 24,576 x 4,096, takes an H200 14.2 us so, and 14.6 with them there.
    """
    _launch(x, matrix, out, False, gated=True)


def _launch(x: Tensor, matrix: Packed, out: Tensor, top: bool, gated: bool) -> None:
    count, units, warps = len(x), matrix.columns // UNIT, _warps(matrix, len(x))
    words = [plane.view(torch.int32) for plane in matrix.planes]
    m, sub = (matrix.d if tensor is None else tensor for tensor in (matrix.m, matrix.sub))
    if matrix.kind.group == UNIT // 2:
        sub = sub.view(torch.int16)
    _multiply_few[(triton.cdiv(matrix.rows // 2 if gated else matrix.rows, 16),)](
        x.contiguous().view(torch.int32), words[0], words[-1], matrix.d, m, sub, out, count, matrix.rows, units,
        UNIT // 2 * units, out.stride(0), **constants(matrix.kind, matrix.dtype, top),
        **_scaling(matrix.kind), PAIRS=triton.next_power_of_2(triton.cdiv(count, 2)), SINGLE=count == 1, GATED=gated,
        WARPS=warps, num_warps=warps, **follow(x),
    )  # fmt: skip
