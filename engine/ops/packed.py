"""Matrices that stay quantised: the planes of their codes and their scales, and products by dequantising in slices.

A unit is 32 columns: four lanes of eight fields. Field i of lane j is column 4 i + j, so a plane of b bits is an
integer of 8 b bits a lane, a kernel's thread reads a unit in one load, and eight shifts take it apart.
Nothing of the file is lost by this and no value is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.four_bit import BLOCK, FEW, GROUP, FourBit, order, pack_four_bit, stack_four_bit
from engine.weights.quant import BYTES, NIBBLES, SIGNED, Parts, QuantType

UNIT, LANES, FIELDS = 32, 4, 8
ALL = slice(None)
PLANE_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SLICE = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Weights that are dequantised at once: what stays in a CPU's second-level cache; 64 MiB of a card, in bfloat16."""


@dataclass(frozen=True)
class Kernels:
    """One way to compute with packed matrices; results agree to rounding."""

    multiply: Callable[[Tensor, Packed, Tensor], None]  # x [N, columns], matrix, out [N, rows], of one dtype
    rows_of: Callable[[Packed, Tensor], Tensor]  # matrix, index int64 [n] -> [n, columns]
    gated: Callable[[Tensor, Packed, Tensor], None] | None = None  # x [1, columns] -> out [1, rows / 2], its swiglu


@dataclass(frozen=True)
class Packed:
    """A matrix [rows, columns] of one type, that computes in `dtype`."""

    kind: QuantType
    columns: int
    dtype: torch.dtype
    planes: tuple[Tensor, ...]  # [rows, columns / 32, 4] of PLANE_TYPES
    d: Tensor  # float16 [rows, columns / block]
    m: Tensor | None  # as d
    sub: Tensor | None  # [rows, columns / group]
    table: Tensor | None  # float32 [16]
    kernels: Kernels
    four: FourBit | None = None  # the codes as a CPU multiplies few rows with them, instead of planes
    ternary: bool = False  # every code is below 3

    @property
    def rows(self) -> int:
        return self.d.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        return self.d.device

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self.planes, self.d, self.m, self.sub, self.table) if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors) + (self.four.nbytes if self.four else 0)

    def part(self, rows: slice) -> Packed:
        """A view of some of its rows; of a matrix that has planes."""
        m, sub = (None if tensor is None else tensor[rows] for tensor in (self.m, self.sub))
        return replace(self, planes=tuple(plane[rows] for plane in self.planes), d=self.d[rows], m=m, sub=sub)

    def slices(self) -> Iterator[slice]:
        """Its rows in slices that are small enough to be dequantised one after the other."""
        step = max(1, SLICE[self.device.type] // self.columns // BLOCK) * BLOCK
        return (slice(row, min(row + step, self.rows)) for row in range(0, self.rows, step))

    def dequantise(self, rows: slice | Tensor = ALL) -> Tensor:
        """[n, columns] of rows: the values that `gguf.dequantize` gives, rounded once to its dtype."""
        scale, low = self.scales(rows)
        values = self._values(self.codes(rows)).view(len(scale), scale.shape[1], -1)
        values.mul_(scale[..., None])
        if low is not None:
            values.add_(low[..., None])
        return values.view(len(scale), self.columns).to(self.dtype)

    def codes(self, rows: slice | Tensor = ALL) -> Tensor:
        """uint8 [n, columns]"""
        if self.four is not None:
            return self.four.codes(rows)
        planes, at = [plane[rows] for plane in self.planes], 0
        codes = torch.zeros(*planes[0].shape[:2], FIELDS, LANES, dtype=torch.uint8, device=self.device)
        for plane, bits in zip(planes, self.kind.planes, strict=True):
            shifts = torch.arange(0, FIELDS * bits, bits, dtype=plane.dtype, device=plane.device)[:, None]
            codes |= ((plane[:, :, None, :] >> shifts) & ((1 << bits) - 1)).to(torch.uint8) << at
            at += bits
        return codes.view(len(codes), self.columns)

    def scales(self, rows: slice | Tensor = ALL) -> tuple[Tensor, Tensor | None]:
        """float32 [n, groups]: what a value is multiplied by, and what is added; a group is a block without s."""
        kind, scale = self.kind, self.d[rows].float()
        low = None if self.m is None else kind.low * self.m[rows].float()
        if self.sub is None:
            return scale, low
        sub = self.sub[rows].view(*scale.shape, -1)
        if kind.sub == SIGNED:
            return (scale[..., None] * sub).flatten(1), None
        bits = {NIBBLES: 4, BYTES: 8}[kind.sub]
        scale = scale[..., None] * (sub & ((1 << bits) - 1))
        return scale.flatten(1), (low[..., None] * (sub >> bits)).flatten(1)

    def _values(self, codes: Tensor) -> Tensor:
        if self.table is not None:
            return self.table[codes.int()]
        values = codes.float()
        if self.kind.step != 1:
            values.mul_(self.kind.step)
        return values.sub_(self.kind.offset) if self.kind.offset else values


def pack(parts: Parts, kind: QuantType, dtype: torch.dtype, kernels: Kernels) -> Packed:
    """The held form of a matrix, on the device of its parts."""
    sub = None if parts.sub is None else parts.sub.contiguous()
    m = None if parts.m is None else parts.m.contiguous()
    table = torch.tensor(kind.table, dtype=torch.float32, device=parts.codes.device) if kind.table else None
    ternary = kind.ternary and not bool((parts.codes == 3).any())  # a file may hold what no quantiser writes
    planes = _planes(parts.codes, kind)
    return Packed(
        kind, parts.codes.shape[1], dtype, planes, parts.d.contiguous(), m, sub, table, kernels, ternary=ternary
    )


def _planes(codes: Tensor, kind: QuantType) -> tuple[Tensor, ...]:
    """codes uint8 [rows, columns] -> `Packed.planes`"""
    units = codes.view(codes.shape[0], -1, FIELDS, LANES)
    planes, at = [], 0
    for bits in kind.planes:
        plane = torch.zeros(len(codes), units.shape[1], LANES, dtype=PLANE_TYPES[bits], device=codes.device)
        for field in range(FIELDS):
            plane |= ((units[:, :, field] >> at) & ((1 << bits) - 1)).to(plane.dtype) << (bits * field)
        planes.append(plane)
        at += bits
    return tuple(planes)


def pack_blocks(
    raw: Tensor,
    kind: QuantType,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
    *,
    multiply: bool = True,
) -> Packed:
    """raw: uint8 [rows, bytes of a row] as a GGUF file holds them. Taken apart in slices, to need little beside it.

    kernels: left out, the reference's. multiply: in the form that products are fastest in, not look-ups.
    """
    columns = raw.shape[1] // kind.block_bytes * kind.block
    step = max(1, SLICE[device.type] // columns // BLOCK) * BLOCK
    pieces = []
    for row in range(0, len(raw), step):
        blocks = raw[row : row + step].to(device).view(-1, columns // kind.block, kind.block_bytes)
        piece = pack(kind.read(blocks), kind, dtype, kernels or TORCH)
        pieces.append(multiplied(piece) if multiply and len(raw) % BLOCK == 0 else piece)
    return stack(pieces)


def stack(pieces: Sequence[Packed]) -> Packed:
    """Matrices of one type, form and width, one below the other."""
    if len(pieces) == 1:
        return pieces[0]

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(piece, name) for piece in pieces]
        return None if tensors[0] is None else torch.cat(tensors)

    planes = tuple(torch.cat(planes) for planes in zip(*(piece.planes for piece in pieces), strict=True))
    four = None if pieces[0].four is None else stack_four_bit([piece.four for piece in pieces])
    ternary = all(piece.ternary for piece in pieces)
    return replace(
        pieces[0], planes=planes, d=joined("d"), m=joined("m"), sub=joined("sub"), four=four, ternary=ternary
    )


@dataclass(frozen=True)
class Mixed:
    """Matrices of one width and several types, one below the other."""

    parts: tuple[Tensor | Packed, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def takes_four_bit(kind: QuantType, dtype: torch.dtype) -> bool:
    """Whether torch's 4-bit product for CPUs computes with such a matrix, and fast: not in other dtypes, and not where
    this processor has none.
    """
    fits = kind.group == GROUP and not kind.table and kind.step == 1 and dtype == torch.bfloat16
    return fits and order() is not None


def multiplied(matrix: Packed) -> Packed:
    """The matrix in the form that products with it are fastest in: torch's 4-bit one, where a CPU has that."""
    if matrix.device.type != "cpu" or not takes_four_bit(matrix.kind, matrix.dtype):
        return matrix
    scale, low = matrix.scales()
    centre = -matrix.kind.offset * scale + (0 if low is None else low)
    four = pack_four_bit(matrix.codes(), scale, centre, sum(matrix.kind.planes))
    return matrix if four is None else replace(matrix, planes=(), four=four)


def multiply_by_slices(x: Tensor, matrix: Packed, out: Tensor) -> None:
    """The reference, and what serves where there is no kernel: no more than a slice is ever dequantised."""
    if matrix.four is not None and len(x) <= FEW:
        out.copy_(matrix.four.multiply(x))
        return
    for rows in matrix.slices():
        out[:, rows] = F.linear(x, matrix.dequantise(rows))


def rows_by_index(matrix: Packed, index: Tensor) -> Tensor:
    """The reference of `Kernels.rows_of`."""
    return matrix.dequantise(index)


TORCH = Kernels(multiply_by_slices, rows_by_index)
