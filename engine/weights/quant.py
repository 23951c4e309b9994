"""GGUF's quantised types: one description of each, from which sizes, kernels and sayings are derived.

    weight = d * s * (step * code - offset)  +  low * m * n        (or d * s * table[code])

d and m are float16 of a block; s and n small integers of a group of its columns, one where a type has none. Here the
blocks of a file become `Parts`. Block layouts: ggml-quants.h of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

NONE, SIGNED, NIBBLES, BYTES = "none", "signed", "nibbles", "bytes"
"""How s and n of a group are held: not at all; s as int8; s | n << 4 as uint8; s | n << 8 as int16."""
SUB_BYTES = {NONE: 0, SIGNED: 1, NIBBLES: 1, BYTES: 2}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Parts:
    """A matrix taken out of its blocks."""

    codes: Tensor  # uint8 [rows, columns]
    d: Tensor  # float16 [rows, columns / block]
    m: Tensor | None = None  # as d
    sub: Tensor | None = None  # [rows, columns / group] of the type that `QuantType.sub` says


@dataclass(frozen=True)
class QuantType:
    """One type. Codes are held as `planes` of so many bits each, the lowest first."""

    name: str
    planes: tuple[int, ...]
    read: Callable[[Tensor], Parts]  # uint8 [rows, blocks, bytes of a block] -> Parts
    group: int  # columns that share s and n
    offset: int = 0
    step: int = 1
    low: int = 0  # sign of the minimum; 0 = none
    sub: str = NONE
    table: tuple[int, ...] = ()
    ternary: bool = False

    @property
    def block(self) -> int:
        """Weights in a block of the file."""
        return GGML_QUANT_SIZES[GGMLQuantizationType[self.name]][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the file."""
        return GGML_QUANT_SIZES[GGMLQuantizationType[self.name]][1]

    @property
    def file_bits(self) -> float:
        """Of a weight in the file."""
        return 8 * self.block_bytes / self.block

    @property
    def bits(self) -> float:
        """Of a weight as it is held: a little more than in the file where that packs scales or codes denser."""
        floats = 32 if self.low else 16
        return sum(self.planes) + floats / self.block + 8 * SUB_BYTES[self.sub] / self.group


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 2 n]: all the low halves, then all the high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[..., n] -> [..., 8 / bits, n]: the bytes' lowest fields, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _bits(packed: Tensor) -> Tensor:
    """[..., n] -> [..., 8 n], the lowest bit of each byte first."""
    return _fields(packed, 1).transpose(-1, -2).flatten(-2)


def _flat(codes: Tensor) -> Tensor:
    """[rows, blocks, ...] -> [rows, columns]"""
    return codes.flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_flat(_nibbles(blocks[..., 2:])), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_flat(_nibbles(blocks[..., 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_flat(_nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return Parts(_flat(codes), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    return Parts(_flat(blocks[..., 2:] ^ 128), _half(blocks, 0))  # two's complement -> what 128 is taken from


def _q2_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    return Parts(_flat(codes), _half(blocks, 80), _half(blocks, 82), _flat(blocks[..., :16]))


def _q3_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    high = _fields(blocks[..., :32], 1).flatten(-2)
    scales = _nibbles(blocks[..., 96:104]) | _fields(blocks[..., 104:108], 2).flatten(-2) << 4
    return Parts(_flat(low | high << 2), _half(blocks, 108), sub=_flat(scales.to(torch.int8) - 32))


def _k_scales(packed: Tensor) -> Tensor:
    """12 bytes of 6-bit scales and minima of 8 groups -> int16 [rows, groups]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return _flat(scales.to(torch.int16) | minima.to(torch.int16) << 8)


def _q4_k(blocks: Tensor) -> Parts:
    codes = _fields(blocks[..., 16:].unflatten(-1, (4, 32)), 4)
    return Parts(_flat(codes), _half(blocks, 0), _half(blocks, 2), _k_scales(blocks[..., 4:16]))


def _q5_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-3)
    high = _fields(blocks[..., 16:48], 1).flatten(-2)
    return Parts(_flat(low | high << 4), _half(blocks, 0), _half(blocks, 2), _k_scales(blocks[..., 4:16]))


def _q6_k(blocks: Tensor) -> Parts:
    low = _fields(blocks[..., :128].unflatten(-1, (2, 64)), 4).flatten(-3)
    high = _fields(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    return Parts(
        _flat(low | high << 4), _half(blocks, 208), sub=_flat(blocks[..., 192:208].contiguous()).view(torch.int8)
    )


def _iq4_xs(blocks: Tensor) -> Parts:
    low = _fields(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    high = _fields(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return Parts(_flat(codes), _half(blocks, 0), sub=_flat(scales))


def _iq3_s(blocks: Tensor) -> Parts:
    """A code of the file stands for four odd numbers and is looked up; here each is its own sign and size: 2 c - 15."""
    from gguf.quants import IQ3_S

    IQ3_S.init_grid()
    grid = torch.from_numpy(IQ3_S.grid.reshape(512, 4)).to(blocks.device, torch.int8)
    index = blocks[..., 2:66].long() | _bits(blocks[..., 66:74]).long() << 8
    sign = 1 - 2 * _bits(blocks[..., 74:106]).to(torch.int8)
    values = grid[index].flatten(-2) * sign
    low_first = _fields(blocks[..., 106:110], 4).transpose(-1, -2).flatten(-2)
    return Parts(_flat(values + 15).to(torch.uint8) >> 1, _half(blocks, 0), sub=_flat(2 * low_first + 1).to(torch.int8))


def _tq1_0(blocks: Tensor) -> Parts:
    """Five digits a byte, the first in the largest place, as a fraction of 243 in 256ths."""

    def digits(packed: Tensor, count: int) -> Tensor:
        powers = torch.tensor([3**n for n in range(count)], dtype=torch.uint8, device=packed.device)
        return ((packed[..., None, :] * powers[:, None]).to(torch.int16) * 3 >> 8).to(torch.uint8).flatten(-2)

    parts = [digits(blocks[..., :32], 5), digits(blocks[..., 32:48], 5), digits(blocks[..., 48:52], 4)]
    return Parts(_flat(torch.cat(parts, -1)), _half(blocks, 52))


def _tq2_0(blocks: Tensor) -> Parts:
    return Parts(_flat(_fields(blocks[..., :64].unflatten(-1, (2, 32)), 2)), _half(blocks, 64))


TYPES = {
    quant.name: quant
    for quant in (
        QuantType("Q4_0", (4,), _q4_0, 32, offset=8),
        QuantType("Q4_1", (4,), _q4_1, 32, low=1),
        QuantType("Q5_0", (4, 1), _q5_0, 32, offset=16),
        QuantType("Q5_1", (4, 1), _q5_1, 32, low=1),
        QuantType("Q8_0", (4, 4), _q8_0, 32, offset=128),
        QuantType("Q2_K", (2,), _q2_k, 16, low=-1, sub=NIBBLES),
        QuantType("Q3_K", (2, 1), _q3_k, 16, offset=4, sub=SIGNED),
        QuantType("Q4_K", (4,), _q4_k, 32, low=-1, sub=BYTES),
        QuantType("Q5_K", (4, 1), _q5_k, 32, low=-1, sub=BYTES),
        QuantType("Q6_K", (4, 2), _q6_k, 16, offset=32, sub=SIGNED),
        QuantType("IQ4_NL", (4,), _q4_0, 32, table=IQ4),
        QuantType("IQ4_XS", (4,), _iq4_xs, 32, sub=SIGNED, table=IQ4),
        QuantType("IQ3_S", (4,), _iq3_s, 32, offset=15, step=2, sub=SIGNED),
        QuantType("TQ1_0", (2,), _tq1_0, 256, offset=1, ternary=True),
        QuantType("TQ2_0", (2,), _tq2_0, 256, offset=1, ternary=True),
    )
}
"""Types that stay packed; a file's others are dequantised when they are loaded."""
