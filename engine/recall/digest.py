"""Digests: small summaries of a page's keys that scoring reads instead of the keys. Derived data of closed pages.

A closed page never changes, so a digest is never stale: it is made once, when the page closes or when a scorer that
lacks it asks, and forgotten with the page.

    token    4-bit codes of every key, rotated by its offset in the page as the pool holds it, one scale a key
    subpage  min and max per channel over 16 un-rotated keys
    bounds   the same over all 64
    mean     the mean un-rotated key
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.ops.rope import Rotary

SUBPAGE = 16
AT_ONCE = 256
"""Pages whose keys are laid out at once: bounds the workspace, whatever the context."""
KIND_OF = {"fused": "token", "token": "token", "subpage": "subpage", "bounds": "bounds", "mean": "mean"}
"""Scorers that read keys, and the digest each of them reads."""


def encode_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """keys [..., 64, D] -> codes int8 in -7..7 of that shape, scales float32 [..., 64]: key ~ code x scale."""
    keys = keys.float()
    scales = keys.abs().amax(-1).clamp_min(1e-12) / 7
    return torch.round(keys / scales.unsqueeze(-1)).to(torch.int8), scales


def pack_codes(codes: Tensor) -> Tensor:
    """int8 in -7..7 [..., D] -> uint8 [..., D / 2]: channel d in the low nibble, d + D/2 in the high one."""
    low, high = (codes + 8).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).to(torch.int8) - 8


def digest_token_bytes(kind: str, shape: KVShape, device_type: str) -> int:
    """Device bytes that one token's digest takes over all layers."""
    heads = shape.layers * shape.kv_heads
    if kind == "token":
        return heads * (shape.head_dim if device_type == "cpu" else shape.head_dim // 2) + heads * 4
    span = {"subpage": SUBPAGE, "bounds": PAGE, "mean": PAGE}[kind]
    return -(-heads * shape.head_dim * 4 * (1 if kind == "mean" else 2) // span)


class Digests:
    """Every digest of every page id in the store, allocated by kind when first needed."""

    def __init__(self, shape: KVShape, pages: int, device: torch.device, rope: Rotary) -> None:
        self.shape, self.pages, self.device, self.rope = shape, pages, device, rope
        # On a CPU codes lie unpacked, a byte each: unpacking costs 5 x the product that follows (measured, Zen 4).
        self.packed = device.type != "cpu"
        self._store: dict[str, tuple[Tensor, ...]] = {}
        self._made: dict[str, np.ndarray] = {}

    def _allocate(self, kind: str) -> None:
        layers, heads, dim = self.shape.layers, self.shape.kv_heads, self.shape.head_dim
        lead = (layers, self.pages)
        sizes: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
            "token": (
                (
                    (heads, PAGE, dim // 2 if self.packed else dim),
                    torch.uint8 if self.packed else torch.int8,
                ),
                ((heads, PAGE), torch.float32),
            ),
            "subpage": (((PAGE // SUBPAGE, 2, heads, dim), torch.float32),),
            "bounds": (((1, 2, heads, dim), torch.float32),),
            "mean": (((heads, dim), torch.float32),),
        }
        self._store[kind] = tuple(
            torch.zeros(*lead, *size, dtype=dtype, device=self.device) for size, dtype in sizes[kind]
        )
        self._made[kind] = np.zeros(self.pages, dtype=bool)

    def ensure(self, kind: str, pages: np.ndarray, load: Callable[[int, np.ndarray], Tensor]) -> None:
        """Make what is missing; `load(layer, pages)` gives closed pages as they are stored."""
        if kind not in self._store:
            self._allocate(kind)
        missing = pages[~self._made[kind][pages]]
        if len(missing) == 0:
            return
        for start in range(0, len(missing), AT_ONCE):
            some = missing[start : start + AT_ONCE]
            index = torch.from_numpy(some.astype(np.int64)).to(self.device)
            for layer in range(self.shape.layers):
                made = self._make(kind, self.shape.decode(load(layer, some))[:, 0])
                for store, part in zip(self._store[kind], made, strict=True):
                    store[layer].index_copy_(0, index, part)
        self._made[kind][missing] = True

    def store(self, kind: str) -> tuple[Tensor, ...]:
        """The whole store of one kind, [layer, page, ...] each, for a kernel that reads or fills it."""
        if kind not in self._store:
            self._allocate(kind)
        return self._store[kind]

    def made(self, kind: str, pages: np.ndarray) -> None:
        """A kernel has filled in what `ensure` would have made of `pages`."""
        self._made[kind][pages] = True

    def _make(self, kind: str, keys: Tensor) -> tuple[Tensor, ...]:
        """keys [n, kv_head, 64, head_dim], rotated by offset."""
        if kind == "token":
            codes, scales = encode_keys(keys)
            return (pack_codes(codes) if self.packed else codes), scales
        flat = keys.float().transpose(1, 2)  # [n, 64, kv_head, head_dim]
        offsets = -torch.arange(PAGE, device=keys.device).repeat(len(keys))
        plain = self.rope.rotate(flat.reshape(-1, *flat.shape[2:]), offsets).view(flat.shape)
        if kind == "mean":
            return (plain.mean(1),)
        span = SUBPAGE if kind == "subpage" else PAGE
        parts = plain.view(len(keys), PAGE // span, span, *plain.shape[2:])
        return (torch.stack([parts.amin(2), parts.amax(2)], dim=2),)

    def forget(self, pages: list[int]) -> None:
        for made in self._made.values():
            made[pages] = False

    def read(self, kind: str, layer: int, pages: np.ndarray) -> tuple[Tensor, ...]:
        """The digests of `pages` in one layer, page first; views where the ids are one run."""
        first, count = int(pages[0]), len(pages)
        if count == 1 or (np.diff(pages) == 1).all():
            return tuple(store[layer, first : first + count] for store in self._store[kind])
        index = torch.from_numpy(pages.astype(np.int64)).to(self.device)
        return tuple(store[layer].index_select(0, index) for store in self._store[kind])

    @property
    def bytes(self) -> int:
        return sum(store.numel() * store.element_size() for stores in self._store.values() for store in stores)

    def close(self) -> None:
        """Give the memory back."""
        self._store.clear()
        self._made.clear()
