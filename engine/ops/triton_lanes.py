"""What a lane of a warp takes of a packed matrix and of x, for ops/triton_few.py. Triton.

A chunk is eight units, two for each lane (t of 4): of planes of two bits a code 2 t and the next, which one load takes,
else t and t + 4. Sums that a lane gets are of other units than its codes. Tensors are [thread], or [thread, n] of what
a thread loads together.
"""

from __future__ import annotations

import triton.language as tl

from engine.ops.triton_mma import columns, inlined


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
def _summed(chunk, t, HALF: tl.constexpr, ADJACENT: tl.constexpr, SINGLE: tl.constexpr):
    """The first of the two units of which a lane gets sums."""
    half = t // 2 if SINGLE else HALF
    if ADJACENT:
        unit = chunk + 4 * (t % 2) + half
    else:
        unit = chunk + 2 * (t % 2) + 4 * half
    return unit


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
def fetch(
    low_plane, high_plane, d, m, sub, first, rows, chunk, t, g, units, BITS: tl.constexpr, MORE: tl.constexpr,
    LOW: tl.constexpr, SUB: tl.constexpr, PER_BLOCK: tl.constexpr, SINGLE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Words and marks of a chunk of rows first + g and 8 more; with two TILES, of those half the matrix below, too."""
    ADJACENT: tl.constexpr = BITS == 2
    unit = chunk + (2 if ADJACENT else 1) * t
    found = ()
    for half in tl.static_range(2 * TILES):
        row = tl.minimum(first + half // 2 * (rows // 2) + half % 2 * 8 + g, rows - 1)
        words = _words(low_plane, row, unit, units, BITS, ADJACENT)
        if MORE > 0:
            words += _words(high_plane, row, unit, units, MORE, ADJACENT)
        found += ((words, _marks(d, m, sub, row, chunk, t, units, LOW, SUB, PER_BLOCK, ADJACENT, SINGLE)),)
    return found


@inlined
def _small(code):
    """float32 of an integer below 2^23, on the pipe that is not busy."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@inlined
def scales(
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
def numbers(x, row, unit, takes):
    """The 32 columns of a unit of x: 16 int32 that hold two each, zero where a lane takes none."""
    at = x + (row + unit * 16)[:, None] + tl.arange(0, 4)[None, :]
    takes = takes[:, None]
    return (
        columns(tl.load(at, takes, 0)) + columns(tl.load(at + 4, takes, 0))
        + columns(tl.load(at + 8, takes, 0)) + columns(tl.load(at + 12, takes, 0))
    )  # fmt: skip
