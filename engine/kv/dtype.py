"""How a page holds keys and values: the one description that pool, host store, copies, plan and kernels follow.

Tokens are written in the page's form when they are appended, so an open page and a closed one are alike, and what a
ring reads is bit for bit what a dense cache of the same dtype reads. A plain dtype keeps numbers as they are; the
others keep codes with a bfloat16 scale: one for the channels of a key, one for each 32 channels of a value.

One layer of a page is one run of bytes, part after part, each [kv_head, 64, width]:

    plain       keys | values
    quantised   key codes | key scales | value codes | value scales
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.config import PAGE
from engine.errors import ConfigError

GROUP = 32
"""Channels of a value that share a scale."""
_LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""What the largest number of a group becomes."""


@dataclass(frozen=True)
class Code:
    """How the `dim` channels of one head of one token are written. `kind`: plain, or a key of _LARGEST."""

    kind: str
    element: torch.dtype
    group: int = 0  # channels that share a scale; 0: all of them

    @property
    def plain(self) -> bool:
        return self.kind == "plain"

    def width(self, dim: int) -> int:
        """Elements; two channels share a byte of int4: d in the low nibble, d + dim/2 in the high one."""
        return dim // 2 if self.kind == "int4" else dim

    def scales(self, dim: int) -> int:
        return 0 if self.plain else -(-dim // self.group) if self.group else 1

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """numbers [..., dim] -> codes [..., width] of `element`, scales bfloat16 [..., scales].

        A group that holds a NaN or an infinity gets a scale that is none: it comes back as NaN, not as a number.
        """
        numbers = numbers.float()
        dim, count = numbers.shape[-1], self.scales(numbers.shape[-1])
        size = self.group or dim
        padded = torch.nn.functional.pad(numbers, (0, count * size - dim)).unflatten(-1, (count, size))
        largest = _LARGEST[self.kind]
        scales = (padded.abs().amax(-1) / largest).bfloat16()
        unit = scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        scaled = (padded / unit).flatten(-2)[..., :dim].clamp(-largest, largest)
        if self.kind == "fp8":
            return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales
        codes = scaled.round().nan_to_num().to(torch.int8)
        return (codes if self.kind == "int8" else _pack(codes)), scales

    def decode(self, codes: Tensor, scales: Tensor | None, out: Tensor) -> None:
        """The inverse, up to what rounding lost, into `out` [..., dim]."""
        if self.kind == "int4":
            low, high = out.chunk(2, -1)
            low.copy_(codes & 15)
            high.copy_(codes >> 4)
            out.sub_(8)
        else:
            out.copy_(codes.view(torch.float8_e4m3fn) if self.kind == "fp8" else codes)
        if scales is None:
            return
        dim, count = out.shape[-1], scales.shape[-1]
        if dim == count * self.group:
            out.unflatten(-1, (count, self.group)).mul_(scales.unsqueeze(-1))
        else:  # one scale for all, or the last group is a part of one
            out.mul_(scales.repeat_interleave(self.group, -1)[..., :dim] if count > 1 else scales)


def _pack(codes: Tensor) -> Tensor:
    low, high = (codes + 8).to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


@dataclass(frozen=True)
class KVDtype:
    """What keys and what values are written as."""

    name: str
    key: Code
    value: Code

    @property
    def plain(self) -> bool:
        return self.key.plain

    @property
    def element(self) -> torch.dtype:
        """Of the tensors that hold pages: the numbers themselves, or bytes."""
        return self.key.element if self.plain else torch.uint8


@dataclass(frozen=True)
class Part:
    """[kv_head, 64, width] of `element`, `at` bytes behind the start of a layer of a page."""

    at: int
    width: int
    element: torch.dtype


@dataclass(frozen=True)
class Form:
    """One layer of a page of `dtype`, for a model's heads."""

    dtype: KVDtype
    kv_heads: int
    dim: int

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """In their order, as the module says."""
        found, at = [], 0
        for code in (self.dtype.key, self.dtype.value):
            pieces = [(code.width(self.dim), code.element)]
            if not code.plain:
                pieces.append((code.scales(self.dim), torch.bfloat16))
            for width, element in pieces:
                found.append(Part(at, width, element))
                at += self.kv_heads * PAGE * width * element.itemsize
        return tuple(found)

    @cached_property
    def bytes(self) -> int:
        last = self.parts[-1]
        return last.at + self.kv_heads * PAGE * last.width * last.element.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one layer of a page, in elements."""
        return (2, self.kv_heads, PAGE, self.dim) if self.dtype.plain else (self.bytes,)

    @cached_property
    def layout(self) -> dict[str, str | int]:
        """What kernels are told of a page (`ops.triton_codes.Layout`), in elements of the tensors that hold pages."""
        parts, plain = self.parts, self.dtype.plain
        starts = (0, parts[1].at // parts[1].element.itemsize, 0) if plain else [part.at for part in parts[1:]]
        return {
            "K": self.dtype.key.kind,
            "V": self.dtype.value.kind,
            **dict(zip(("KEY_SCALES", "VALUES", "VALUE_SCALES"), starts, strict=True)),
            "SIZE": self.bytes // self.dtype.element.itemsize,
        }

    def arithmetic(self, layers: int) -> str:
        """Bytes of a token, as a person multiplies them."""
        heads = f"{layers} layers x {self.kv_heads} heads"
        if self.dtype.plain:
            return f"2 x {heads} x {self.dim} x {self.dtype.element.itemsize} bytes"
        key, key_scale, value, value_scale = (part.width * part.element.itemsize for part in self.parts)
        return f"{heads} x (keys {key} + {key_scale}, values {value} + {value_scale}) bytes"

    def views(self, data: Tensor) -> list[Tensor]:
        """The parts of `data` [n, *shape], each [n, kv_head, 64, width], in place."""
        if self.dtype.plain:
            return [data[:, 0], data[:, 1]]
        views = []
        for part in self.parts:
            size = self.kv_heads * PAGE * part.width * part.element.itemsize
            run = data[:, part.at : part.at + size].view(part.element)
            views.append(run.unflatten(1, (self.kv_heads, PAGE, part.width)))
        return views

    def write(self, data: Tensor, place: Tensor | int, row: Tensor | int, keys: Tensor, values: Tensor) -> None:
        """Token t of keys and values [T, kv_head, dim] to row[t] of page place[t] of `data`; ints: one token."""
        if self.dtype.plain:
            largest = torch.finfo(self.dtype.element).max
            if self.dtype.element is torch.float16 and keys.dtype is not torch.float16:
                keys, values = keys.clamp(-largest, largest), values.clamp(-largest, largest)
            pieces = [keys, values]
        else:
            pieces = [*self.dtype.key.encode(keys), *self.dtype.value.encode(values)]
        one = isinstance(place, int)
        for view, piece in zip(self.views(data), pieces, strict=True):
            if one:
                view[place, :, row] = piece[0]
            else:
                view[place, :, row] = piece.to(view.dtype)

    def decode(self, data: Tensor, dtype: torch.dtype) -> Tensor:
        """data [n, *shape] -> [n, k|v, kv_head, 64, dim] of `dtype`: itself where nothing is to do."""
        if self.dtype.plain:
            return data.to(dtype)
        out = torch.empty(len(data), 2, self.kv_heads, PAGE, self.dim, dtype=dtype, device=data.device)
        keys, key_scales, values, value_scales = self.views(data)
        self.dtype.key.decode(keys, key_scales, out[:, 0])
        self.dtype.value.decode(values, value_scales, out[:, 1])
        return out


def _coded(name: str, key: str, value: str) -> KVDtype:
    elements = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.uint8}
    return KVDtype(name, Code(key, elements[key]), Code(value, elements[value], GROUP))


def _plain(name: str, element: torch.dtype) -> KVDtype:
    return KVDtype(name, Code("plain", element), Code("plain", element))


_PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KV = {name: _plain(name, element) for element, name in _PLAIN.items()} | {
    "fp8": _coded("fp8", "fp8", "fp8"),
    "int8": _coded("int8", "int8", "int8"),
    "k8v4": _coded("k8v4", "int8", "int4"),
    "int4": _coded("int4", "int4", "int4"),
}
"""Every dtype by its name: those of `config.KV_DTYPES` without auto."""
SMALL = KV["k8v4"]
"""What `auto` takes where the model's own dtype doesn't fit."""


def plain(dtype: torch.dtype) -> KVDtype:
    """Pages that hold the numbers that the model computes with."""
    return KV[_PLAIN[dtype]]


def named(name: str, dtype: torch.dtype) -> KVDtype:
    """The dtype of `--kv-dtype name` for a model that computes in `dtype`; auto is the model's own here."""
    if name == "auto":
        return plain(dtype)
    if name == "fp32" and dtype is not torch.float32:
        raise ConfigError(
            f"the model computes in {_PLAIN[dtype]}: float32 pages would take twice the bytes for the same numbers",
            f"--kv-dtype {_PLAIN[dtype]}, or --dtype float32",
        )
    return KV[name]
