"""Products with packed matrices: a few rows straight from the codes, many by dequantising slices. Triton.

Reference and layout: ops/packed.py. Few rows of 16 bits an element go to tensor cores, in ops/triton_few.py; here is
what serves float32 and older cards. A code is put into the mantissa of a power of two that is large enough for its
last bit to be 1: the float 2^n + code, in two instructions. What was added is taken off with a sum of x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import triton_few
from engine.ops.packed import UNIT, Kernels, Packed
from engine.weights.quant import BYTES, NIBBLES, NONE, SIGNED

FEW = 8
"""Rows of x that are computed straight from the codes."""
_SUBS = {NONE: 0, SIGNED: 1, NIBBLES: 2, BYTES: 3}
_WARPS = 4
_BIAS = 127


@triton.jit
def _put(words, FIELD: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr):
    """Field number FIELD of lanes of BITS, moved to bit TO of an int32; all else zero."""
    mask: tl.constexpr = ((1 << BITS) - 1) << TO
    if TO >= BITS * FIELD:
        moved = words << (TO - BITS * FIELD)
    else:
        moved = words >> (BITS * FIELD - TO)
    return moved & mask


@triton.jit
def _value(low, high, table, bias, FIELD: tl.constexpr, BITS: tl.constexpr, MORE: tl.constexpr, AT: tl.constexpr):
    """float32 2^(23 - AT[FIELD]) + code of one field; what the table holds for the code where AT is None.

    bias: 127, the exponent's, a variable because an instruction takes one constant, and the mask is it.
    """
    if AT is None:
        value = tl.load(table + _put(low, FIELD, BITS, 0))
    else:
        bits = _put(low, FIELD, BITS, AT[FIELD]) | (bias + 23 - AT[FIELD] << 23)
        if MORE > 0:
            bits |= _put(high, FIELD, MORE, AT[FIELD] + BITS)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _scales(d, m, sub, block, group, inside, LOW: tl.constexpr, SUB: tl.constexpr):
    """float32: what codes are multiplied by and what is added, at index `block` and `group` of each element."""
    scale = tl.load(d + block, mask=inside, other=0.0).to(tl.float32)
    low = tl.zeros_like(scale)
    if LOW != 0:
        low = tl.load(m + block, mask=inside, other=0.0).to(tl.float32) * LOW
    if SUB > 0:
        small = tl.load(sub + group, mask=inside, other=0).to(tl.int32)
        if SUB == 1:
            scale *= small.to(tl.float32)
        if SUB == 2:
            scale *= (small & 15).to(tl.float32)
            low *= (small >> 4).to(tl.float32)
        if SUB == 3:
            scale *= (small & 255).to(tl.float32)
            low *= (small >> 8).to(tl.float32)
    return scale, low


@triton.jit
def _multiply(
    x, low_plane, high_plane, d, m, sub, table, out, count, rows, units, x_stride, out_stride, bias,
    BITS: tl.constexpr, MORE: tl.constexpr, AT: tl.constexpr, STEP: tl.constexpr, OFFSET: tl.constexpr,
    LOW: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    # Dimensions are [unit, row of x, row, lane]: Triton gives neighbouring threads to the first of equals.
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, 4)
    which = tl.arange(0, COUNT)
    acc = tl.zeros([UNITS, COUNT, ROWS], tl.float32)
    for first in range(0, units, UNITS):
        u = first + tl.arange(0, UNITS)
        unit = n[None, :] * units + u[:, None]
        inside = (u < units)[:, None] & (n < rows)[None, :]
        at = unit[:, :, None] * 4 + lanes[None, None, :]
        low_words = tl.load(low_plane + at, mask=inside[:, :, None], other=0).to(tl.int32)[:, None]
        high_words = low_words
        if MORE > 0:
            high_words = tl.load(high_plane + at, mask=inside[:, :, None], other=0).to(tl.int32)[:, None]
        block = n[None, :] * (units // PER_BLOCK) + (u // PER_BLOCK)[:, None]
        x_at = x + which[None, :, None, None] * x_stride + (u[:, None] * 32 + lanes[None, :])[:, None, None]
        x_inside = (u < units)[:, None, None, None] & (which < count)[None, :, None, None]
        for part in tl.static_range(32 // GROUP):
            scale, low = _scales(d, m, sub, block, unit * (32 // GROUP) + part, inside, LOW, SUB)
            products = tl.zeros([UNITS, COUNT, ROWS, 4], tl.float32)
            totals = tl.zeros([UNITS, COUNT, 1, 4], tl.float32)
            powers = tl.zeros([UNITS, COUNT, 1, 4], tl.float32)
            for step in tl.static_range(GROUP // 4):
                value = _value(low_words, high_words, table, bias, part * (GROUP // 4) + step, BITS, MORE, AT)
                chosen = tl.load(x_at + part * GROUP + 4 * step, mask=x_inside, other=0.0).to(tl.float32)
                products += value * chosen
                if AT is not None:
                    totals += chosen
                    powers += chosen * (1 << 23 - AT[part * (GROUP // 4) + step])
            product, total = tl.sum(products, 3), tl.sum(totals, 3)
            if AT is not None:
                product = (product - tl.sum(powers, 3)) * STEP - total * OFFSET
            acc += scale[:, None] * product
            if LOW != 0:
                acc += low[:, None] * total
    result = tl.sum(acc, 0)
    where = out + which[:, None] * out_stride + n[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=(which < count)[:, None] & (n < rows)[None, :])


@triton.jit
def _dequantise(
    index, low_plane, high_plane, d, m, sub, table, out, rows, units, bias,
    BITS: tl.constexpr, MORE: tl.constexpr, AT: tl.constexpr, STEP: tl.constexpr, OFFSET: tl.constexpr,
    LOW: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr, PER_BLOCK: tl.constexpr,
    INDEXED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    to = tl.program_id(0).to(tl.int64)
    n = to
    if INDEXED:
        n = tl.load(index + to).to(tl.int64)
    u = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    at = (n * units + u)[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = u < units
    low_words = tl.load(low_plane + at, mask=inside[:, None], other=0).to(tl.int32)
    high_words = low_words
    if MORE > 0:
        high_words = tl.load(high_plane + at, mask=inside[:, None], other=0).to(tl.int32)
    block = n * (units // PER_BLOCK) + u // PER_BLOCK
    for part in tl.static_range(32 // GROUP):
        scale, low = _scales(d, m, sub, block, (n * units + u) * (32 // GROUP) + part, inside, LOW, SUB)
        for step in tl.static_range(GROUP // 4):
            value = _value(low_words, high_words, table, bias, part * (GROUP // 4) + step, BITS, MORE, AT)
            if AT is not None:
                value = (value - (1 << 23 - AT[part * (GROUP // 4) + step])) * STEP - OFFSET
            value = value * scale[:, None]
            if LOW != 0:
                value += low[:, None]
            where = out + to * units * 32 + u[:, None] * 32 + part * GROUP + 4 * step + tl.arange(0, 4)[None, :]
            tl.store(where, value.to(out.dtype.element_ty), mask=inside[:, None])


def _description(matrix: Packed) -> dict[str, int | bool]:
    kind = matrix.kind
    return {
        "BITS": kind.planes[0],
        "MORE": kind.planes[1] if len(kind.planes) > 1 else 0,
        "AT": None if kind.table else _places(kind.planes),
        "STEP": kind.step,
        "OFFSET": kind.offset,
        "LOW": kind.low,
        "SUB": _SUBS[kind.sub],
        "GROUP": min(kind.group, UNIT),
        "PER_BLOCK": kind.block // UNIT,
    }


def _places(planes: tuple[int, ...]) -> tuple[int, ...]:
    """To which bit of a float each field is moved: 12 at least, so that what it adds to a code costs no accuracy.

    Fields that lie right after the same shift share it.
    """
    if sum(planes) > 7:
        return (12,) * 8
    return {4: (12, 12, 16, 12, 16, 12, 16, 16), 2: (16, 18, 16, 18, 20, 18, 20, 18)}[planes[0]]


def _tensors(matrix: Packed) -> tuple[Tensor, ...]:
    """What the kernels read, in their order; a stand-in where a type has none."""
    d = matrix.d
    m, sub, table = (d if tensor is None else tensor for tensor in (matrix.m, matrix.sub, matrix.table))
    return matrix.planes[0], matrix.planes[-1], d, m, sub, table


def multiply_few(x: Tensor, matrix: Packed, out: Tensor, rows: int = 8, units: int = 128, warps: int = _WARPS) -> None:
    """As `multiply`, for 1 to FEW rows of x.

    rows, units: the piece of the matrix that a program takes at once, for one row of x; for more it has fewer rows,
    because each keeps sums in registers.
    """
    count = triton.next_power_of_2(len(x))
    rows = min(rows, max(2, 16 // count))
    wide = triton.next_power_of_2(matrix.columns // UNIT)
    _multiply[(triton.cdiv(matrix.rows, rows),)](
        x, *_tensors(matrix), out, len(x), matrix.rows, matrix.columns // UNIT, x.stride(0), out.stride(0),
        _BIAS, **_description(matrix),
        COUNT=count, ROWS=rows, UNITS=min(units, wide), num_warps=warps,
    )  # fmt: skip


def dequantise(matrix: Packed, index: Tensor | None = None) -> Tensor:
    """[rows, columns] of its dtype; of the rows of `index` (int64 [n]) if given."""
    rows, units = matrix.rows if index is None else len(index), matrix.columns // UNIT
    out = torch.empty(rows, matrix.columns, dtype=matrix.dtype, device=matrix.device)
    wide = min(128, triton.next_power_of_2(units))
    _dequantise[(rows, triton.cdiv(units, wide))](
        matrix.planes[0] if index is None else index, *_tensors(matrix), out, rows, units, _BIAS,
        **_description(matrix), INDEXED=index is not None, UNITS=wide, num_warps=_WARPS,
    )  # fmt: skip
    return out


def multiply(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """x [N, columns] -> out [N, rows], each row contiguous."""
    if x.shape[0] <= FEW:
        multiply_few(x, matrix, out)
        return
    for rows in matrix.slices():
        torch.mm(x, dequantise(matrix.part(rows)).T, out=out[:, rows])


def rows_of(matrix: Packed, index: Tensor) -> Tensor:
    """Rows of an embedding; index int64 [n] -> [n, columns]."""
    return dequantise(matrix, index)


def multiply_on_tensor_cores(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """As `multiply`, for x of 16 bits an element."""
    (triton_few.multiply_few if x.shape[0] <= FEW else multiply)(x, matrix, out)


TRITON = Kernels(multiply, rows_of)
TENSOR_CORES = Kernels(multiply_on_tensor_cores, rows_of, triton_few.multiply_gated)
LEAST_CAPABILITY = (8, 0)
"""Of TENSOR_CORES."""
