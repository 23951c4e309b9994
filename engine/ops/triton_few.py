"""Products of 1 to 8 rows of x with packed matrices, on tensor cores straight from the codes. Triton.

A warp multiplies 16 rows of the matrix by x with `mma.m16n8k16`: its lane (g of 8, t of 4) holds the codes of rows g
and g + 8 and, of the columns, whole units of its own t. So no code is moved between threads; it becomes a number where
it lies (ops/triton_numbers.py), as 2^e + code; what was added is taken off with the same product of x and constants.
The eight columns of the instruction keep groups' sums apart: column n holds units of t = n % 4, and the n // 4-th of
two rows of x, or half of the units if there is one row. Sums are float32.

Reference and layout: ops/packed.py. Tensors are [thread], or [thread, n] of what a thread loads together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.follow import await_results, follow
from engine.ops.packed import UNIT, Packed
from engine.ops.triton_mma import ahead, columns, in_order, inlined, mma
from engine.ops.triton_numbers import constants, number, taken
from engine.weights.quant import BYTES, NIBBLES, NONE, SIGNED, QuantType

MANY = 1 << 14
"""Rows of a matrix. Q4_K, 24,576 x 4,096: an H200 takes 21.5 us with 4 warps, 23.8 with 8; of 6,144: 8.0 and 6.5."""
_SUBS = {NONE: 0, SIGNED: 1, NIBBLES: 2, BYTES: 3}


@inlined
def _step(
    words, words_too, x, c, F: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr, TABLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):  # fmt: skip
    """Add (magic + code) x of field F of a unit, for rows g and g + 8."""
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
def _constants(
    x, zero, ADDED: tl.constexpr, ADDED_TOO: tl.constexpr, ONE: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Sums over a part of units, the same for every row: of what was added to codes; of x if ONE is not 0."""
    added = (zero, zero, zero, zero)
    total = added
    for F in tl.static_range(8 // PARTS * PART, 8 // PARTS * (PART + 1)):
        if ADDED[F] != 0:
            added = _same(x, added, F, ADDED, MANTISSA)
        if ADDED_TOO[F] != 0:
            added = _same(x, added, F, ADDED_TOO, MANTISSA)
        if ONE[F] != 0:
            total = _same(x, total, F, ONE, MANTISSA)
    return added, total


@inlined
def _sums(
    words, words_too, x, zero, BITS: tl.constexpr, MORE: tl.constexpr, MAGIC: tl.constexpr, MORE_MAGIC: tl.constexpr,
    TABLE: tl.constexpr, HALF: tl.constexpr, BOTH: tl.constexpr,
    PART: tl.constexpr, PARTS: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Sums over a part of units: of (magic + code) x, of one unit, and of the other if BOTH.

    Side by side, because each waits for its last.
    """
    ADJACENT: tl.constexpr = BITS == 2
    c = (zero, zero, zero, zero)
    upper = c
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
        if MORE > 0:
            c = _step(high, high_too, x, c, F, MORE, MORE_MAGIC, None, MANTISSA)
            if BOTH:
                upper = _step(top, top_too, x, upper, F, MORE, MORE_MAGIC, None, MANTISSA)
    return c, upper


@inlined
def _small(code):
    """float32 of an integer below 2^23, on the pipe that is not busy."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@inlined
def _words(plane, row, unit, units, BITS: tl.constexpr, ADJACENT: tl.constexpr):
    """A plane's words of a lane's two units of a row: one [thread, 2 n], or two [thread, n]."""
    at_once: tl.constexpr = 2 if ADJACENT else 1
    base = plane + row * (units * BITS)
    found = ()
    for half in tl.static_range(2 // at_once):
        own = unit + 4 * half
        at = (own * BITS)[:, None] + tl.arange(0, BITS * at_once)[None, :]
        found += (tl.load(base[:, None] + at, (own < units)[:, None], eviction_policy="evict_first"),)
    return found


@inlined
def _marks(
    d, m, sub, row, chunk, t, units, LOW: tl.constexpr, SUB: tl.constexpr, PER_BLOCK: tl.constexpr,
    ADJACENT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """What the file holds of the scales of those units of a row of which a lane gets sums."""
    found = ()
    stride: tl.constexpr = 2 if ADJACENT else 1
    if PER_BLOCK > 1:
        inside = (chunk < units)[:, None]
        block = (row * (units // PER_BLOCK) + chunk // PER_BLOCK)[:, None]
        found += (tl.load(d + block, inside, 0.0),)
        if LOW != 0:
            found += (tl.load(m + block, inside, 0.0),)
    for half in tl.static_range(1 if SINGLE else 2):
        unit = _summed(chunk, t, half, ADJACENT, SINGLE)[:, None] + stride * tl.arange(0, 2)[None, :]
        at, inside = (row * units)[:, None] + unit, unit < units
        if PER_BLOCK == 1:
            found += (tl.load(d + at, inside, 0.0),)
            if LOW != 0:
                found += (tl.load(m + at, inside, 0.0),)
        if SUB > 0:
            found += (tl.load(sub + at, inside, 0),)
    return found


@inlined
def _fetch(
    low_plane, high_plane, d, m, sub, first, apart, rows, chunk, t, g, units, BITS: tl.constexpr, MORE: tl.constexpr,
    LOW: tl.constexpr, SUB: tl.constexpr, PER_BLOCK: tl.constexpr, SINGLE: tl.constexpr, TILES: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Words and marks of a chunk, of both of a lane's rows of each tile."""
    ADJACENT: tl.constexpr = BITS == 2
    unit = chunk + (2 if ADJACENT else 1) * t
    found = ()
    for half_tile in tl.static_range(2 * TILES):
        row = first + half_tile // 2 // BESIDE * apart + half_tile % (2 * BESIDE) * 8 + g
        row = tl.minimum(row, rows - 1)
        words = _words(low_plane, row, unit, units, BITS, ADJACENT)
        if MORE > 0:
            words += _words(high_plane, row, unit, units, MORE, ADJACENT)
        found += ((words, _marks(d, m, sub, row, chunk, t, units, LOW, SUB, PER_BLOCK, ADJACENT, SINGLE)),)
    return found


@inlined
def _summed(chunk, t, HALF: tl.constexpr, ADJACENT: tl.constexpr, SINGLE: tl.constexpr):
    """The first of the two units of which a lane gets sums."""
    half = t // 2 if SINGLE else HALF
    if ADJACENT:
        unit = chunk + 4 * (t % 2) + half
    else:
        unit = chunk + 2 * (t % 2) + 4 * half
    return unit


@inlined
def _scales(
    marks, HALF: tl.constexpr, PART: tl.constexpr, LOW: tl.constexpr, SUB: tl.constexpr, PER_BLOCK: tl.constexpr
):  # fmt: skip
    """Of two units, float32: what codes are multiplied by (two), and what is added (two)."""
    each: tl.constexpr = 2 if LOW != 0 else 1
    own: tl.constexpr = 1 if SUB > 0 else 0
    first: tl.constexpr = HALF * (each + own) if PER_BLOCK == 1 else 0
    scale = marks[first].to(tl.float32)
    low = scale
    if LOW != 0:
        low = marks[first + 1].to(tl.float32) * LOW
    if SUB > 0:
        small = marks[first + each if PER_BLOCK == 1 else each + HALF].to(tl.int32)
        if SUB == 1:
            scale *= _small(((small >> 8 * PART) & 255) ^ 128) - 128.0
        if SUB == 2:
            scale *= _small((small >> 8 * PART) & 15)
            low *= _small((small >> 8 * PART + 4) & 15)
        if SUB == 3:
            scale *= _small(small & 255)
            low *= _small((small >> 8) & 255)
    scale, low = tl.broadcast_to(scale, [scale.shape[0], 2]), tl.broadcast_to(low, [low.shape[0], 2])
    return tl.split(scale) + tl.split(low)


@inlined
def _numbers(x, row, unit, takes):
    """The 32 columns of a unit of x: 16 int32 that hold two each, zero where a lane takes none."""
    at = x + (row + unit * 16)[:, None] + tl.arange(0, 4)[None, :]
    takes = takes[:, None]
    return (
        columns(tl.load(at, takes, 0)) + columns(tl.load(at + 4, takes, 0))
        + columns(tl.load(at + 8, takes, 0)) + columns(tl.load(at + 12, takes, 0))
    )  # fmt: skip


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


@inlined
def _rounded(value, out):
    """To what `out` can hold, float32."""
    return value.to(out.dtype.element_ty).to(tl.float32)


@inlined
def _moved_up(queue, last):
    found = ()
    for index in tl.static_range(1, len(queue)):
        found += (queue[index],)
    return found + (last,)


@triton.jit
def _multiply_few(
    x, low_plane, high_plane, d, m, sub, out, count, rows, units, x_stride, out_stride, apart,
    BITS: tl.constexpr, MORE: tl.constexpr, MAGIC: tl.constexpr, MORE_MAGIC: tl.constexpr,
    ADDED: tl.constexpr, ADDED_TOO: tl.constexpr, ONE: tl.constexpr, TABLE: tl.constexpr, TOTALS: tl.constexpr,
    STEP: tl.constexpr, LOW: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, PER_BLOCK: tl.constexpr,
    MANTISSA: tl.constexpr, PAIRS: tl.constexpr, SINGLE: tl.constexpr, GATED: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr, PROBE: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    STRIDE: tl.constexpr = 2 if BITS == 2 else 1
    NEXT: tl.constexpr = 1 if BITS == 2 else 4
    thread = tl.arange(0, 32 * WARPS)
    t, g, warp = thread % 4, thread // 4 % 8, thread // 32
    BESIDE: tl.constexpr = TILES // 2 if GATED else TILES
    first_row = tl.program_id(0).to(tl.int64) * (16 * BESIDE)
    # The first fetch waits for nobody: of the kernels that take part, none writes a matrix.
    queue = ()
    for early in tl.static_range(DEPTH):
        queue += (_fetch(
            low_plane, high_plane, d, m, sub, first_row, apart, rows, 8 * (early * WARPS + warp), t, g, units, BITS,
            MORE, LOW, SUB, PER_BLOCK, SINGLE, TILES, BESIDE,
        ),)  # fmt: skip
    if AHEAD:
        for beside in tl.static_range(TILES // BESIDE):
            at = first_row + beside * apart
            ahead(low_plane + at * units * BITS, tl.minimum(rows - at, 16 * BESIDE) * units * (4 * BITS), 32 * beside)
    await_results(FOLLOW)
    zero = tl.zeros([32 * WARPS], tl.float32)
    results = ()
    for _ in tl.static_range(2 * PAIRS * TILES):
        results += (zero,)
    for first in range(0, units, 8 * WARPS):
        chunk = first + 8 * warp
        own = queue[0]
        coming = _fetch(
            low_plane, high_plane, d, m, sub, first_row, apart, rows, chunk + 8 * DEPTH * WARPS, t, g, units, BITS,
            MORE, LOW, SUB, PER_BLOCK, SINGLE, TILES, BESIDE,
        )  # fmt: skip
        in_order()
        if PROBE:
            for read in tl.static_range(2 * TILES):
                mixed = tl.zeros([32 * WARPS], tl.int32)
                for plane in tl.static_range(len(own[read][0])):
                    words = columns(own[read][0][plane])
                    for word in tl.static_range(len(words)):
                        mixed ^= words[word]
                scale = _scales(own[read][1], 0, 0, LOW, SUB, PER_BLOCK)
                results = _added(results, scale[0] + scale[1] + scale[2] + (mixed & 3).to(tl.float32), read)
        for step in tl.static_range(0 if PROBE else 1 if SINGLE else 2 * PAIRS):
            if SINGLE:
                x_row, unit = g * 0, chunk + STRIDE * t + NEXT * (g // 4)
            else:
                x_row, unit = 2 * (step % PAIRS) + g // 4, chunk + STRIDE * t + NEXT * (step // PAIRS)
            numbers = _numbers(x, x_row * x_stride, unit, (g % 4 == t) & (unit < units) & (x_row < count))
            in_order()
            for part in tl.static_range(PARTS):
                added, total = _constants(numbers, zero, ADDED, ADDED_TOO, ONE, part, PARTS, MANTISSA)
                if TOTALS != 0:
                    total = added[0] * TOTALS, added[1] * TOTALS, added[2], added[3]
                for tile in tl.static_range(TILES):
                    sums, upper = _sums(
                        own[2 * tile][0], own[2 * tile + 1][0], numbers, zero, BITS, MORE, MAGIC, MORE_MAGIC,
                        TABLE, step // PAIRS, SINGLE, part, PARTS, MANTISSA,
                    )  # fmt: skip
                    if SINGLE:
                        sums = (
                            tl.where(t < 2, sums[0], upper[0]), tl.where(t < 2, sums[1], upper[1]),
                            tl.where(t < 2, sums[2], upper[2]), tl.where(t < 2, sums[3], upper[3]),
                        )  # fmt: skip
                    for which in tl.static_range(2):
                        scale = _scales(own[2 * tile + which][1], step // PAIRS, part, LOW, SUB, PER_BLOCK)
                        found = scale[0] * (sums[2 * which] - added[0]) + scale[1] * (sums[2 * which + 1] - added[1])
                        if LOW != 0:
                            found += scale[2] * total[0] + scale[3] * total[1]
                        results = _added(results, found, 2 * (TILES * (step % PAIRS) + tile) + which)
        queue = _moved_up(queue, coming)
    if GATED:
        for tile in tl.static_range(BESIDE):
            gate = _whole(results[2 * tile], results[2 * tile + 1], SINGLE, STEP)
            up = _whole(results[2 * (BESIDE + tile)], results[2 * (BESIDE + tile) + 1], SINGLE, STEP)
            gate, up = _rounded(gate, out), _rounded(up, out)
            found = _rounded(gate * tl.sigmoid(gate), out) * up
            _store(out, found, first_row + 16 * tile, 0, count, rows // 2, out_stride)
    else:
        for pair in tl.static_range(PAIRS):
            for tile in tl.static_range(TILES):
                whole = _whole(
                    results[2 * (TILES * pair + tile)], results[2 * (TILES * pair + tile) + 1], SINGLE, STEP
                )  # fmt: skip
                _store(out, whole, first_row + 16 * tile, 2 * pair, count, rows, out_stride)


def _scaling(kind: QuantType) -> dict[str, int]:
    return {
        "STEP": kind.step,
        "LOW": kind.low,
        "SUB": _SUBS[kind.sub],
        "PARTS": UNIT // min(kind.group, UNIT),
        "PER_BLOCK": kind.block // UNIT,
    }


def multiply_few(
    x: Tensor, matrix: Packed, out: Tensor, tiles: int = 1, warps: int | None = None, *, gated: bool = False,
    ahead: bool = False, depth: int = 1, top: bool = False, probe: bool = False, **more: int,
) -> None:  # fmt: skip
    """As `Kernels.multiply`, for 1 to 8 rows of x of 16 bits an element.

    tiles: of 16 rows of the matrix that a warp multiplies by what it loaded of x. warps: that share tiles, chunk by
    chunk. gated: the matrix is gate's rows above up's, and out [1, rows / 2] gets silu(gate) * up.
    """
    warps = warps or (4 if matrix.rows >= MANY else 8)
    count, units = len(x), matrix.columns // UNIT
    pairs = triton.next_power_of_2(triton.cdiv(count, 2))
    words = [plane.view(torch.int32) for plane in matrix.planes]
    m, sub = (matrix.d if tensor is None else tensor for tensor in (matrix.m, matrix.sub))
    if matrix.kind.group == UNIT // 2:
        sub = sub.view(torch.int16)
    beside = tiles // 2 if gated else tiles
    made = constants(matrix.kind, matrix.dtype) | _scaling(matrix.kind)
    if top:
        made |= {"MAGIC": None, "ADDED": (0,) * 8, "ADDED_TOO": (0,) * 8, "STEP": 0.5}
    _multiply_few[(triton.cdiv(matrix.rows // 2 if gated else matrix.rows, 16 * beside),)](
        x.contiguous().view(torch.int32), words[0], words[-1], matrix.d, m, sub, out, count, matrix.rows, units,
        UNIT // 2 * units, out.stride(0), matrix.rows // 2 if gated else 16, **made,
        PAIRS=pairs, SINGLE=count == 1, GATED=gated, TILES=tiles, WARPS=warps, DEPTH=depth, AHEAD=ahead,
        PROBE=probe, num_warps=warps, **more, **follow(x),
    )  # fmt: skip
