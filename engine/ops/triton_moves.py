"""How pages move: between pool and pinned host, and side by side for a kernel that reads them in one run. Triton.

References: plain copies; what is staged is also rotated, as `PartialAttention` would.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import PAGE
from engine.ops.follow import await_results, follow
from engine.ops.triton_codes import Layout, layout_of, load_keys, load_values


@triton.jit
def _gather(host, pool, misses, places, missing, host_page, size, BLOCK: tl.constexpr, FOLLOW: tl.constexpr):
    await_results(FOLLOW)
    pieces = tl.cdiv(size, BLOCK)
    for work in range(tl.program_id(0), tl.load(missing) * pieces, tl.num_programs(0)):
        page = tl.load(misses + work // pieces).to(tl.int64)
        slot = tl.load(places + work // pieces).to(tl.int64)
        at = (work % pieces) * BLOCK + tl.arange(0, BLOCK)
        tl.store(pool + slot * size + at, tl.load(host + page * host_page + at, mask=at < size), mask=at < size)


def _words(pages: Tensor) -> Tensor:
    """Bytes two by two: whoever copies moves as much at once as of 16-bit numbers."""
    return pages.view(torch.int16) if pages.dtype is torch.uint8 else pages


def gather(host: Tensor, pool: Tensor, misses: Tensor, places: Tensor, missing: Tensor, units: int) -> None:
    """Bring `missing` [1] pages of one layer from pinned host memory, read in place, into their slots.

    host [page, ...] (the layer's part of the store), pool [slot, ...]; misses int32 page ids, places int32 slots.
    """
    host, pool = _words(host), _words(pool)
    _gather[(units,)](
        host,
        pool,
        misses,
        places,
        missing,
        host.stride(0),
        pool[0].numel(),
        BLOCK=_block(pool[0].numel()),
        num_warps=8,
        **follow(pool),
    )


@triton.jit
def _store(pool, host, slots, pages, count, pool_slots, layers, size, host_page, BLOCK: tl.constexpr):
    pieces = tl.cdiv(size, BLOCK)
    for work in range(tl.program_id(0), layers * count * pieces, tl.num_programs(0)):
        item, piece = work // pieces, work % pieces
        layer, n = (item % layers).to(tl.int64), item // layers
        slot = tl.load(slots + layer * count + n)
        page = tl.load(pages + n)
        at = piece * BLOCK + tl.arange(0, BLOCK)
        source = tl.load(pool + (layer * pool_slots + slot) * size + at, mask=at < size)
        tl.store(host + page * host_page + layer * size + at, source, mask=at < size)


def store_pages(pool: Tensor, host: Tensor, slots: Tensor, pages: Tensor, units: int) -> None:
    """Copy closed pages of every layer from the pool to pinned host memory. slots int64 [layer, n], pages int64 [n]."""
    host, pool = _words(host), _words(pool)
    size = pool[0, 0].numel()
    _store[(units,)](
        pool,
        host,
        slots,
        pages,
        pages.shape[0],
        pool.shape[1],
        pool.shape[0],
        size,
        host.stride(0),
        BLOCK=_block(size),
        num_warps=8,
    )


def _block(size: int) -> int:
    return min(8192, triton.next_power_of_2(size))


@triton.jit
def _stage(
    pool,  # [slot, page] of one layer
    host,
    slots,  # int64 [n]; -1: read the page from the host
    pages,  # int64 [n]
    distance,  # int64 [n]: pages from each page up to the chunk's origin
    keys,  # [KV_HEADS, n * 64, DIM]: out, rotated to the origin
    values,
    cos,
    sin,
    count,
    reach,
    host_page,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SIZE: tl.constexpr,
):
    key, half, wide = tl.arange(0, PAGE), tl.arange(0, HALF), tl.arange(0, WIDE)
    inside = (half < DIM // 2)[None, :]
    at = key[:, None] * DIM + half[None, :]
    for work in range(tl.program_id(0), count * KV_HEADS, tl.num_programs(0)):
        n, kv_head = work // KV_HEADS, work % KV_HEADS
        slot = tl.load(slots + n)
        source = tl.where(slot < 0, host + tl.load(pages + n) * host_page, pool + slot * SIZE)
        turn = (reach - tl.load(distance + n)) * (DIM // 2) + half
        c = tl.load(cos + turn, mask=half < DIM // 2, other=0.0)[None, :]
        s = tl.load(sin + turn, mask=half < DIM // 2, other=0.0)[None, :]
        k1, k2, unit = load_keys(source, kv_head * PAGE, key, half, DIM, K, KEY_SCALES, False)
        k1, k2 = k1.to(tl.float32), k2.to(tl.float32)
        if K != "plain":
            k1, k2 = k1 * unit[:, None], k2 * unit[:, None]
        v = load_values(source, kv_head * PAGE, key, wide, key >= 0, DIM, WIDE, V, VALUES, VALUE_SCALES)
        to = (kv_head * count + n) * (PAGE * DIM) + at  # a staging part is small
        tl.store(keys + to, (k1 * c - k2 * s).to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + to + DIM // 2, (k2 * c + k1 * s).to(keys.dtype.element_ty), mask=inside)
        to = (kv_head * count + n) * (PAGE * DIM) + key[:, None] * DIM + wide[None, :]
        tl.store(values + to, v.to(values.dtype.element_ty), mask=(wide < DIM)[None, :])


def stage(
    pool: Tensor, host: Tensor, slots: Tensor, pages: Tensor, distance: Tensor, turns, keys: Tensor, values: Tensor,
    units: int, layout: Layout | None = None,
) -> None:  # fmt: skip
    """Lay n pages out as one run of keys, rotated by their base as the chunk sees it, and one of values.

    slots, pages, distance int64 [n]; a page without a slot (-1) is read from `host`, pinned. keys and values
    [kv_head, n * 64, dim].
    """
    kv_heads, _, dim = keys.shape
    _stage[(units,)](
        pool,
        host,
        slots,
        pages,
        distance,
        keys,
        values,
        turns.cos,
        turns.sin,
        pages.shape[0],
        turns.reach,
        host.stride(0),
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=PAGE,
        HALF=triton.next_power_of_2(dim // 2),
        WIDE=triton.next_power_of_2(dim),
        **layout_of(pool, layout),
        num_warps=8,
    )
