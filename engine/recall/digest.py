"""Digests: small summaries of a page's keys that scoring reads instead of the keys. Derived data of closed pages.

A closed page never changes, so a digest is never stale: it is made once, when the page closes or when a scorer that
lacks it asks, and forgotten with the page.

    token    4-bit codes of every key, rotated by its offset in the page as the pool holds it, one scale a key;
             of the head groups that look far (`far_heads`)
    subpage  min and max per channel over 16 un-rotated keys
    bounds   the same over all 64
    mean     the mean un-rotated key
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.ops.rope import Rotary
from engine.recall.far_heads import FarHeads

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


def digest_token_bytes(kind: str, shape: KVShape, device_type: str, far: FarHeads) -> int:
    """Device bytes that one token's digest takes over all layers."""
    if kind == "token":
        return far.count * ((shape.head_dim if device_type == "cpu" else shape.head_dim // 2) + 4)
    heads = shape.layers * shape.kv_heads
    span = {"subpage": SUBPAGE, "bounds": PAGE, "mean": PAGE}[kind]
    return -(-heads * shape.head_dim * 4 * (1 if kind == "mean" else 2) // span)


class KeyCodes(NamedTuple):
    """One layer's key codes of every page id in the store, of the head groups that look far."""

    codes: Tensor  # uint8 [far, page, 64, D / 2], or int8 [far, page, 64, D] unpacked
    scales: Tensor  # float32 [far, page, 64]
    heads: Tensor  # int32 [far]: which KV heads those are


class Digests:
    """Every digest of every page id in the store, allocated by kind when first needed."""

    def __init__(
        self, shape: KVShape, pages: int, device: torch.device, rope: Rotary, far: FarHeads | None = None
    ) -> None:
        """far: whose keys are coded; None: all."""
        self.shape, self.pages, self.device, self.rope = shape, pages, device, rope
        self.far = far or FarHeads.all(shape.layers, shape.kv_heads)
        layers = [layer for layer, heads in enumerate(self.far.by_layer) for _ in heads]
        heads = [head for heads in self.far.by_layer for head in heads]
        self.groups = torch.tensor([layers, heads], dtype=torch.int32, device=device)
        """int32 [2, far groups of all layers]: the layer and the KV head of each."""
        # On a CPU codes lie unpacked, a byte each: unpacking costs 5 x the product that follows (measured, Zen 4).
        self.packed = device.type != "cpu"
        self._store: dict[str, tuple[Tensor, ...]] = {}
        self._made: dict[str, np.ndarray] = {}

    def _allocate(self, kind: str) -> None:
        layers, heads, dim = self.shape.layers, self.shape.kv_heads, self.shape.head_dim
        far, pages = self.far.count, self.pages
        sizes: dict[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]] = {
            "token": (
                (
                    (far, pages, PAGE, dim // 2 if self.packed else dim),
                    torch.uint8 if self.packed else torch.int8,
                ),
                ((far, pages, PAGE), torch.float32),
            ),
            "subpage": (((layers, pages, PAGE // SUBPAGE, 2, heads, dim), torch.float32),),
            "bounds": (((layers, pages, 1, 2, heads, dim), torch.float32),),
            "mean": (((layers, pages, heads, dim), torch.float32),),
        }
        self._store[kind] = tuple(torch.zeros(*size, dtype=dtype, device=self.device) for size, dtype in sizes[kind])
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
                keys = self.shape.decode(load(layer, some))[:, 0]
                if kind == "token":
                    self._code(layer, keys, index)
                else:
                    self._store[kind][0][layer].index_copy_(0, index, self._make(kind, keys))
        self._made[kind][missing] = True

    def codes(self) -> tuple[Tensor, Tensor]:
        """The key codes of all layers and their scales, [far group, page, ...], for a kernel that fills them."""
        if "token" not in self._store:
            self._allocate("token")
        return self._store["token"]

    def codes_of(self, layer: int) -> KeyCodes:
        first, end = self.far.first[layer : layer + 2]
        codes, scales = self.codes()
        return KeyCodes(codes[first:end], scales[first:end], self.groups[1, first:end])

    def made(self, kind: str, pages: np.ndarray) -> None:
        """A kernel has filled in what `ensure` would have made of `pages`."""
        self._made[kind][pages] = True

    def _code(self, layer: int, keys: Tensor, index: Tensor) -> None:
        """keys [n, kv_head, 64, head_dim], rotated by offset; index int64 [n]: the pages' ids."""
        to = self.codes_of(layer)
        if not self.far.everything(layer):
            keys = keys.index_select(1, to.heads)
        codes, scales = encode_keys(keys.transpose(0, 1))
        to.codes.index_copy_(1, index, pack_codes(codes) if self.packed else codes)
        to.scales.index_copy_(1, index, scales)

    def _make(self, kind: str, keys: Tensor) -> Tensor:
        """keys [n, kv_head, 64, head_dim], rotated by offset."""
        flat = keys.float().transpose(1, 2)  # [n, 64, kv_head, head_dim]
        offsets = -torch.arange(PAGE, device=keys.device).repeat(len(keys))
        plain = self.rope.rotate(flat.reshape(-1, *flat.shape[2:]), offsets).view(flat.shape)
        if kind == "mean":
            return plain.mean(1)
        span = SUBPAGE if kind == "subpage" else PAGE
        parts = plain.view(len(keys), PAGE // span, span, *plain.shape[2:])
        return torch.stack([parts.amin(2), parts.amax(2)], dim=2)

    def forget(self, pages: list[int]) -> None:
        for made in self._made.values():
            made[pages] = False

    def read(self, kind: str, layer: int, pages: np.ndarray) -> Tensor:
        """The digests of `pages` in one layer, page first; a view where the ids are one run."""
        return _at(self._store[kind][0][layer], 0, pages)

    def read_codes(self, layer: int, pages: np.ndarray) -> tuple[Tensor, Tensor]:
        """Key codes and scales of `pages` in one layer, [far, n, 64, ...]; views where the ids are one run."""
        stored = self.codes_of(layer)
        return _at(stored.codes, 1, pages), _at(stored.scales, 1, pages)

    @property
    def bytes(self) -> int:
        return sum(store.numel() * store.element_size() for stores in self._store.values() for store in stores)

    def close(self) -> None:
        """Give the memory back."""
        self._store.clear()
        self._made.clear()


def _at(stored: Tensor, dim: int, pages: np.ndarray) -> Tensor:
    if len(pages) == 1 or (np.diff(pages) == 1).all():
        return stored.narrow(dim, int(pages[0]), len(pages))
    return stored.index_select(dim, torch.from_numpy(pages.astype(np.int64)).to(stored.device))
