"""How codes become the numbers that tensor cores take, two in each int32, where they lie. Triton.

Put into the mantissa of a power of two that is large enough, a code makes 2^e + code: a shift that neighbours share,
and one operation for two codes. The codes' second plane is numbers of its own, of larger powers. What a table holds is
looked up byte by byte. Codes below 3 are numbers at the top of a float. Layout of codes: ops/packed.py.
"""

from __future__ import annotations

import functools
import math

import torch
import triton.language as tl

from engine.ops.triton_mma import INTERPRETED, bytes_of, columns, inlined
from engine.weights.quant import QuantType

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}


@inlined
def _pairs(words, BITS: tl.constexpr):
    """The words of a unit so that the halves of each hold neighbouring columns: fields F of the V-th pair."""
    if BITS == 4:
        pairs = (
            bytes_of(words[0], words[1], 0x5410), bytes_of(words[2], words[3], 0x5410),
            bytes_of(words[0], words[1], 0x7632), bytes_of(words[2], words[3], 0x7632),
        )  # fmt: skip
    elif BITS == 2:
        pairs = words
    else:
        zero = words[0] & 0
        pairs = bytes_of(words[0], zero, 0x4140), bytes_of(words[0], zero, 0x4342)
    return pairs


@inlined
def _looked_up(word, UPPER: tl.constexpr, TABLE: tl.constexpr):
    """What a table of 16 two-byte numbers holds for four codes of a word, two numbers in each of two int32.

    TABLE: the numbers' lower bytes in four int32, then their upper ones.
    """
    place, second = word & 0x77777777, ((word >> 1) & 0x44444444) | 0x32103210
    if UPPER:
        place, second = place >> 16, second >> 16
    lower = bytes_of(bytes_of(TABLE[0], TABLE[1], place), bytes_of(TABLE[2], TABLE[3], place), second)
    upper = bytes_of(bytes_of(TABLE[4], TABLE[5], place), bytes_of(TABLE[6], TABLE[7], place), second)
    return bytes_of(lower, upper, 0x5140), bytes_of(lower, upper, 0x7362)


@inlined
def _all_looked_up(words, TABLE: tl.constexpr):
    """The 16 pairs of numbers of a unit's four words, as `number` would give them for [2 F + V]."""
    found = ()
    for upper in tl.static_range(2):
        first, second = _looked_up(words[0], upper, TABLE), _looked_up(words[1], upper, TABLE)
        third, fourth = _looked_up(words[2], upper, TABLE), _looked_up(words[3], upper, TABLE)
        for half in tl.static_range(2):
            found += (
                bytes_of(first[half], second[half], 0x5410), bytes_of(third[half], fourth[half], 0x5410),
                bytes_of(first[half], second[half], 0x7632), bytes_of(third[half], fourth[half], 0x7632),
            )  # fmt: skip
    return found


@inlined
def number(
    pairs, F: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr, TABLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):  # fmt: skip
    """Columns 4 F + 2 V and the next of a unit as two floats: what MAGIC holds + code, or what the table holds.

    MAGIC None: 2 (code - 1) of codes below 3. As a float's topmost bits ~0, ~1 and ~2 are -2, -0 and 2.
    """
    if MAGIC is None:
        number = ~(pairs[V] << (14 - 2 * F)) & (0xC000C000 - (1 << 32))
    elif TABLE is None:
        per: tl.constexpr = MANTISSA // BITS
        field: tl.constexpr = F % 4 if BITS == 4 else F
        mask: tl.constexpr = ((1 << BITS) - 1) * 0x10001 << BITS * (field % per)
        number = pairs[(F // 4 * 2 if BITS == 4 else 0) + V] >> (BITS * (field // per * per))
        if INTERPRETED:
            number = (number & mask) | MAGIC[F]
        else:  # one instruction has place for one constant: the second comes in a register
            number = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [number, mask, MAGIC[F]], tl.int32, is_pure=True, pack=1
            )
    else:
        number = pairs[2 * F + V]
    return number


@inlined
def taken(
    words, AT: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, ADJACENT: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Pairs of one unit of a row, from what `_words` gave."""
    if not ADJACENT:
        own = columns(words[2 * AT + HALF])
    else:
        both = columns(words[AT])
        own = (both[2 * HALF], both[2 * HALF + 1]) if BITS == 2 else (both[HALF],)
    if TABLE is None:
        pairs = _pairs(own, BITS)
    else:
        pairs = _all_looked_up(own, TABLE)
    return pairs


def _pattern(value: float, mantissa: int) -> int:
    """Two of a 16-bit float in an int32."""
    if value == 0:
        return 0
    exponent, bias = math.frexp(value)[1] - 1, 127 if mantissa == 7 else 15
    fraction = value / 2**exponent * 2**mantissa - 2**mantissa
    assert fraction == int(fraction)
    half = exponent + bias << mantissa | int(fraction)
    return half | half << 16


def _exact(value: float, mantissa: int) -> bool:
    return math.frexp(value)[0] * 2 ** (mantissa + 1) % 1 == 0


@functools.cache
def constants(kind: QuantType, dtype: torch.dtype, top: bool) -> dict[str, object]:
    """What kernels are compiled with: how codes of a type become numbers of x's dtype, and what that makes of them.

    That is, a multiple of them and something more: STEP, and ADDED. top: of codes below 3, as `number` without MAGIC.
    """
    mantissa = _MANTISSA[dtype]
    powers, at = [], 0
    for bits in kind.planes:
        each = mantissa // bits
        fields = [field % 4 if bits == 4 else field for field in range(8)]
        powers.append([2.0 ** (mantissa - bits * (field % each) + at) for field in fields])
        at += bits
    added = []
    for values in zip(*powers, strict=True):
        sums = [kind.offset / kind.step]
        for value in () if kind.table else values:
            if _exact(sums[-1] + value, mantissa):
                sums[-1] += value
            else:
                sums.append(value)
        added.append([_pattern(value, mantissa) for value in sums] + [0])
    same = len(kind.planes) == 1 and len(set(powers[0])) == 1
    found = {
        "BITS": kind.planes[0],
        "MORE": kind.planes[1] if len(kind.planes) > 1 else 0,
        "MAGIC": tuple(_pattern(power, mantissa) for power in powers[0]),
        "MORE_MAGIC": tuple(_pattern(power, mantissa) for power in powers[-1]),
        "ADDED": tuple(values[0] for values in added),
        "ADDED_TOO": tuple(values[1] for values in added),
        "ONE": (_pattern(1.0, mantissa) if kind.low and not same else 0,) * 8,
        "STEP": kind.step,
        "TABLE": _byte_table(kind.table, dtype) if kind.table else None,
        "TOTALS": 1 / powers[0][0] if kind.low and same else 0.0,
        "MANTISSA": mantissa,
    }
    return found | {"MAGIC": None, "ADDED": (0,) * 8, "ADDED_TOO": (0,) * 8, "STEP": 0.5} if top else found


def _byte_table(table: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The lower bytes of 16 numbers in four int32, then the upper ones."""
    numbers = torch.tensor(table, dtype=dtype).view(torch.uint8).view(16, 2)
    return tuple(numbers.T.contiguous().view(torch.int32).flatten().tolist())
