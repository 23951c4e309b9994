"""Codes of keys and values, as kernels read and write them. Triton; reference and layout: `engine/kv/dtype.py`.

KIND is `plain` or a kind of `Code`. A page is bytes where it holds codes. Conversions are
integer arithmetic and one multiplication, fp8's too: they run from compute capability 8.0 on.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

GROUP = tl.constexpr(32)  # kv.dtype.GROUP: channels of a value that share a scale
ROUND = tl.constexpr(12582912.0)
"""1.5 x 2^23: a float32 to which it is added and taken away again is rounded, halves to even."""


Layout = dict[str, Any]
"""Constants of a kernel: kinds K and V, where KEY_SCALES, VALUES and VALUE_SCALES begin in a page, and its SIZE."""


def layout_of(pool: Tensor, layout: Layout | None) -> Layout:
    """`layout` (`kv.dtype.Form.layout`); None: `pool` holds plain numbers, [..., 2, kv_head, 64, dim]."""
    if layout is not None:
        return layout
    size = pool.shape[-4:].numel()
    return {"K": "plain", "V": "plain", "KEY_SCALES": 0, "VALUES": size // 2, "VALUE_SCALES": 0, "SIZE": size}


@triton.jit
def number(code, KIND: tl.constexpr):
    """A byte that holds one code -> what it counts, float32."""
    if KIND == "int8":
        x = code.to(tl.int8, bitcast=True).to(tl.float32)
    else:  # e4m3: the exponent goes 120 too low into a float32's, so that its smallest numbers come out right as well
        bits = ((code.to(tl.int32) & 128) << 24) | ((code.to(tl.int32) & 127) << 20)
        x = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return x


@triton.jit
def code_of(scaled, KIND: tl.constexpr):
    """The inverse, rounded: float32 within +-largest -> int32 of one byte, or of one nibble."""
    if KIND == "fp8":
        small = tl.abs(scaled) * 7.52316384526264e-37  # 2^-120
        bits = small.to(tl.int32, bitcast=True)
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) | tl.where(scaled < 0, 128, 0)
    else:
        rounded = ((scaled + ROUND) - ROUND).to(tl.int32)
        code = rounded + 8 if KIND == "int4" else rounded & 255
    return code


@triton.jit
def load_scale(at, mask):
    """bfloat16 at byte pointers -> float32."""
    bits = tl.load(at.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def load_halves(at, mask, DIM: tl.constexpr, KIND: tl.constexpr):
    """Channels d and d + DIM/2, of which `at` points to the first: numbers as they lie, or float32 without scale."""
    if KIND == "int4":
        both = tl.load(at, mask=mask, other=136)  # 8 and 8: two zeros
        low, high = (both & 15).to(tl.float32) - 8.0, (both >> 4).to(tl.float32) - 8.0
    elif KIND == "plain":
        low, high = tl.load(at, mask=mask, other=0.0), tl.load(at + DIM // 2, mask=mask, other=0.0)
    else:
        low = number(tl.load(at, mask=mask, other=0), KIND)
        high = number(tl.load(at + DIM // 2, mask=mask, other=0), KIND)
    return low, high


@triton.jit
def load_keys(page, row, key, half, DIM: tl.constexpr, K: tl.constexpr, KEY_SCALES: tl.constexpr, TURNED: tl.constexpr):
    """Both halves of keys [len(key), len(half)], or [len(half), len(key)] if TURNED, and their units.

    `row` is the head's first. A key is what was loaded times its unit, float32 [len(key)]; that of a plain key is 1.
    """
    W: tl.constexpr = DIM // 2 if K == "int4" else DIM
    if TURNED:
        at, inside = page + row * W + key[None, :] * W + half[:, None], (half < DIM // 2)[:, None]
    else:
        at, inside = page + row * W + key[:, None] * W + half[None, :], (half < DIM // 2)[None, :]
    low, high = load_halves(at, inside, DIM, K)
    if K == "plain":
        unit = tl.full(key.shape, 1.0, tl.float32)
    else:
        unit = load_scale(page + KEY_SCALES + (row + key) * 2, key >= 0)
    return low, high, unit


@triton.jit
def load_values(page, row, key, wide, written, DIM: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr,
                VALUES: tl.constexpr, VALUE_SCALES: tl.constexpr):  # fmt: skip
    """Values [len(key), WIDE]: as they lie, or float32. `row` is the head's first; written [len(key)]: bool."""
    inside = written[:, None] & (wide < DIM)[None, :]
    if V == "plain":
        values = tl.load(page + VALUES + row * DIM + key[:, None] * DIM + wide[None, :], mask=inside, other=0.0)
    else:
        values = _coded_values(page, row, key, wide, written, inside, DIM, WIDE, V, VALUES, VALUE_SCALES)
    return values


@triton.jit
def _coded_values(page, row, key, wide, written, inside, DIM: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr,
                  VALUES: tl.constexpr, VALUE_SCALES: tl.constexpr):  # fmt: skip
    if V == "int4":
        at = page + VALUES + row * (DIM // 2) + key[:, None] * (DIM // 2) + (wide % (DIM // 2))[None, :]
        both = tl.load(at, mask=inside, other=136).to(tl.int32)
        values = ((both >> tl.where(wide < DIM // 2, 0, 4)[None, :]) & 15).to(tl.float32) - 8.0
    else:
        at = page + VALUES + row * DIM + key[:, None] * DIM + wide[None, :]
        values = number(tl.load(at, mask=inside, other=0), V)
    COUNT: tl.constexpr = (DIM + GROUP - 1) // GROUP
    RUNS: tl.constexpr = (WIDE + GROUP - 1) // GROUP
    run = tl.arange(0, RUNS)
    at = page + VALUE_SCALES + ((row + key)[:, None] * COUNT + run[None, :]) * 2
    unit = load_scale(at, written[:, None] & (run < COUNT)[None, :])
    values = tl.reshape(values, [key.shape[0], RUNS, WIDE // RUNS]) * tl.expand_dims(unit, 2)
    return tl.reshape(values, [key.shape[0], WIDE])


@triton.jit
def store_halves(low, high, half, codes, scales, DIM: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr):
    """Write one token's channels d and d + DIM/2, float32 [len(half)], as codes and a scale for each SPAN of them."""
    LARGEST: tl.constexpr = 127.0 if KIND == "int8" else 7.0 if KIND == "int4" else 448.0
    inside = half < DIM // 2
    a_unit, b_unit = tl.zeros_like(low), tl.zeros_like(high)
    for group in tl.static_range((DIM + SPAN - 1) // SPAN):
        a, b = half // SPAN == group, (half + DIM // 2) // SPAN == group
        size = tl.maximum(_largest(low, a & inside), _largest(high, b & inside))
        bits = tl.div_rn(size, LARGEST).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store((scales + 2 * group).to(tl.pointer_type(tl.int16)), bits.to(tl.int16))
        unit = (bits << 16).to(tl.float32, bitcast=True)
        a_unit, b_unit = tl.where(a, unit, a_unit), tl.where(b, unit, b_unit)
    low, high = _code(low, a_unit, LARGEST, KIND), _code(high, b_unit, LARGEST, KIND)
    if KIND == "int4":
        tl.store(codes + half, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(codes + half, low.to(tl.uint8), mask=inside)
        tl.store(codes + DIM // 2 + half, high.to(tl.uint8), mask=inside)


@triton.jit
def _largest(x, mask):
    """The largest size of x where `mask`; infinite where one is no number, so that none comes back as one."""
    return tl.max(tl.where(mask, tl.where(x == x, tl.abs(x), float("inf")), 0.0), 0)


@triton.jit
def _code(x, unit, LARGEST: tl.constexpr, KIND: tl.constexpr):
    scaled = tl.div_rn(x, tl.maximum(unit, 1.1754943508222875e-38))
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    return code_of(tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), KIND)
