"""Matrices in the form of torch's 4-bit product, the fastest there is for a few rows on a CPU.

For the matrices of one layer of SmolLM2 on two EPYC cores, one row: oneDNN's 16-bit product, tuned for many rows,
515 us; torch's own vector product 230 us; its 4-bit product 117 us, because its weights are a quarter. Codes of more
than four bits are two such matrices: 16 high + low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

GROUP = 32
FEW = 96
"""Rows of x up to which it is faster than dequantising and multiplying: 28 us a row of 1,536 x 768, and 1.9 ms + 12 us
a row (an EPYC core)."""
BLOCK = 64
"""A piece of the matrix is a number of so many rows: torch's kernel packs 64 of them together, or 32 with AVX2."""


@dataclass(frozen=True)
class FourBit:
    """Codes of 4 or 8 bits. Made by `pack_four_bit`; computes in bfloat16."""

    packed: tuple[Tensor, ...]  # of each digit, the lowest first: uint8 [rows, columns / 2] as torch's kernel wants it
    scales: tuple[Tensor, ...]  # of each digit: bfloat16 [columns / 32, rows, 2]: scale and centre
    bias: int  # what was added to the second digit

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.packed, *self.scales))

    def multiply(self, x: Tensor) -> Tensor:
        """x bfloat16 [N, columns] -> [N, rows]"""
        first, *more = (
            torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)
            for packed, scales in zip(self.packed, self.scales, strict=True)
        )
        return first if not more else first + more[0]

    def codes(self, rows: slice | Tensor) -> Tensor:
        """uint8 [n, columns]: of a slice that begins with a block, or of rows by number."""
        low, *more = (_unpack(packed, rows) for packed in self.packed)
        return low if not more else low | (more[0] - self.bias) << 4


def pack_four_bit(codes: Tensor, scale: Tensor, centre: Tensor, bits: int) -> FourBit | None:
    """weight = code * scale + centre; codes uint8 [rows, columns] of up to `bits`, scales float32 [rows, columns / 32].

    Scales are rounded to bfloat16, which errs by as much as rounding the weights would. None where the kernel can't
    take the shape, or packs otherwise than `FourBit.codes` unpacks.
    """
    if codes.shape[0] % BLOCK or order() is None:
        return None
    bias = 8 - (1 << max(0, bits - 5)) if bits > 4 else 0  # the kernel takes 8 off: the middle digit is 0
    first = centre + 8 * scale + (16 * (8 - bias) * scale if bits > 4 else 0)
    digits, scales = [codes & 15], [_scales(scale, first)]
    if bits > 4:
        digits.append((codes >> 4) + bias)
        scales.append(_scales(16 * scale, torch.zeros_like(scale)))
    found = FourBit(tuple(map(_pack, digits)), tuple(scales), bias)
    return found if torch.equal(found.codes(slice(0, BLOCK)), codes[:BLOCK]) else None


def stack_four_bit(pieces: Sequence[FourBit]) -> FourBit:
    """Matrices of whole blocks, one below the other."""
    packed = (torch.cat(parts) for parts in zip(*(piece.packed for piece in pieces), strict=True))
    scales = (torch.cat(parts, 1) for parts in zip(*(piece.scales for piece in pieces), strict=True))
    return FourBit(tuple(packed), tuple(scales), pieces[0].bias)


@cache
def order() -> Tensor | None:
    """int64 [64 or 32]: where each row of what is packed together lies among its nibbles, low halves first; None where
    there is no kernel, or where it packs in no such order.

    It depends on the processor, so it is read off what the kernel makes of numbered rows.
    """
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return None
    for together in (BLOCK, BLOCK // 2):
        number = torch.arange(together, dtype=torch.uint8)[:, None].expand(together, GROUP)
        digits = (_pack(digit.contiguous()).view(GROUP, together // 2) for digit in (number & 15, number >> 4))
        low, high = map(_nibbles, digits)
        found = (low | high << 4).long()
        if bool((found == found[0]).all()) and found[0].sort().values.tolist() == list(range(together)):
            return torch.argsort(found[0])
    return None


@cache
def _in_order() -> bool:
    return order().tolist() == list(range(len(order())))


def _scales(scale: Tensor, centre: Tensor) -> Tensor:
    return torch.stack([scale, centre], -1).transpose(0, 1).contiguous().bfloat16()


def _pack(digit: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(digit.int(), 1)


def _nibbles(blocks: Tensor) -> Tensor:
    """[..., n] -> [..., 2 n]"""
    return torch.cat([blocks & 15, blocks >> 4], -1)


def _unpack(packed: Tensor, rows: slice | Tensor) -> Tensor:
    columns, together = 2 * packed.shape[1], len(order())
    half = together // 2
    blocks = packed.view(-1, columns, half)
    if isinstance(rows, slice):
        first, last, _ = rows.indices(packed.shape[0])
        chosen = _nibbles(blocks[first // together : -(-last // together)])
        if not _in_order():
            chosen = chosen[..., order()]
        return chosen.transpose(1, 2).reshape(-1, columns)[: last - first]
    place = order()[rows % together]
    byte = blocks[rows // together, :, place % half]
    return (byte >> (place // half * 4)[:, None].to(torch.uint8)) & 15
