"""What happens to pages: tokens are appended, a full page closes, bytes move between pool and pinned host. Triton.

References: `Runner._store`, `recall.digest.encode_keys` with `pack_codes`, and plain copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.triton_codes import GROUP, ROUND, Layout, layout_of, load_keys, load_values, store_halves

PAST, FIRST, TOKENS = map(tl.constexpr, (g.PAST, g.FIRST, g.TOKENS))


@triton.jit
def _append(
    q,  # [T, HEADS, DIM], k and v [T, KV_HEADS, DIM]; rows `stride` elements apart
    k,
    v,
    turned,  # float32 [T, HEADS, DIM]: out
    pool,  # [slot, page] of one layer, pages as the layout says
    slot_of,
    ids,
    geometry,
    cos,  # float32 [tokens, DIM / 2]: rotation by so many tokens
    sin,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    FOLLOW: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SIZE: tl.constexpr,
):
    await_results(FOLLOW)
    token, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < DIM // 2
    row = tl.load(geometry + FIRST) + token
    page = tl.load(ids + tl.load(geometry + PAST) + row // PAGE)
    slot = tl.load(slot_of + page).to(tl.int64)
    if head < HEADS:
        source = q + token.to(tl.int64) * q_stride + head * DIM
        offset = row
    else:
        source = k + token.to(tl.int64) * k_stride + (head - HEADS) * DIM
        offset = row % PAGE
    c = tl.load(cos + offset * (DIM // 2) + half, mask=inside, other=0.0)
    s = tl.load(sin + offset * (DIM // 2) + half, mask=inside, other=0.0)
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
    low, high = first * c - second * s, second * c + first * s
    if head < HEADS:
        out = turned + (token.to(tl.int64) * HEADS + head) * DIM
        tl.store(out + half, low, mask=inside)
        tl.store(out + DIM // 2 + half, high, mask=inside)
    elif token < tl.load(geometry + TOKENS):
        kv_head = head - HEADS
        at, line = pool + slot * SIZE, kv_head * PAGE + offset
        source = v + token.to(tl.int64) * v_stride + kv_head * DIM
        first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + DIM // 2 + half, mask=inside, other=0.0).to(tl.float32)
        _write(at, line, low, high, half, at + KEY_SCALES + 2 * line, DIM, DIM, K)
        groups = (DIM + GROUP - 1) // GROUP
        _write(at + VALUES, line, first, second, half, at + VALUE_SCALES + 2 * groups * line, DIM, GROUP, V)


@triton.jit
def _write(at, line, low, high, half, scales, DIM: tl.constexpr, SPAN: tl.constexpr, KIND: tl.constexpr):
    """The halves of one token's channels, float32, as line `line` of a part that begins at `at`."""
    if KIND == "plain":
        to = at + line * DIM + half
        if at.dtype.element_ty == tl.float16:
            low, high = tl.clamp(low, -65504.0, 65504.0), tl.clamp(high, -65504.0, 65504.0)
        tl.store(to, low.to(at.dtype.element_ty), mask=half < DIM // 2)
        tl.store(to + DIM // 2, high.to(at.dtype.element_ty), mask=half < DIM // 2)
    else:
        store_halves(low, high, half, at + line * (DIM // 2 if KIND == "int4" else DIM), scales, DIM, SPAN, KIND)


def append(
    q: Tensor, k: Tensor, v: Tensor, turned: Tensor, pool: Tensor, slot_of: Tensor, ids: Tensor, geometry: Tensor,
    offsets: tuple[Tensor, Tensor], layout: Layout | None = None,
) -> None:  # fmt: skip
    """Store one chunk's k and v [T, kv_head, dim] in its own pages, keys rotated by their offset, and turn its q.

    The geometry says how many of the T are tokens; the others are not stored.

    turned float32 [T, heads, dim]: q rotated by its distance from the first own page. offsets: cos and sin float32
    [tokens, dim / 2] of 0, 1, ... tokens.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    _append[(tokens, heads + kv_heads)](
        q,
        k,
        v,
        turned,
        pool,
        slot_of,
        ids,
        geometry,
        *offsets,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=PAGE,
        HALF=triton.next_power_of_2(dim // 2),
        **layout_of(pool, layout),
        num_warps=1,
        **follow(q),
    )


@triton.jit
def _close(
    pool,  # [layer, slot, page]
    slots,  # int64 [layer, n]
    pages,  # int64 [n]
    codes,  # uint8 [group, page, 64, DIM / 2]
    scales,  # float32 [group, page, 64]
    groups,  # int32 [2, group]: layer and KV head
    count,
    pool_slots,
    code_pages,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SIZE: tl.constexpr,
):
    group, n = tl.program_id(0), tl.program_id(1)
    layer, kv_head = tl.load(groups + group).to(tl.int64), tl.load(groups + tl.num_programs(0) + group)
    key, half = tl.arange(0, PAGE), tl.arange(0, HALF)
    inside = (half < DIM // 2)[None, :]
    slot = tl.load(slots + layer * count + n)
    at = pool + (layer * pool_slots + slot) * SIZE
    low, high, unit = load_keys(at, kv_head * PAGE, key, half, DIM, K, KEY_SCALES, False)
    low, high = low.to(tl.float32), high.to(tl.float32)
    if K != "plain":
        low, high = low * unit[:, None], high * unit[:, None]
    size = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    size = tl.div_rn(tl.maximum(size, 1e-12), 7.0)
    low = (tl.div_rn(low, size[:, None]) + ROUND) - ROUND
    high = (tl.div_rn(high, size[:, None]) + ROUND) - ROUND
    packed = (low + 8.0).to(tl.int32) | ((high + 8.0).to(tl.int32) << 4)
    to = (group.to(tl.int64) * code_pages + tl.load(pages + n)) * PAGE
    tl.store(scales + to + key, size)
    tl.store(codes + to * (DIM // 2) + key[:, None] * (DIM // 2) + half[None, :], packed.to(tl.uint8), mask=inside)


def close_pages(
    pool: Tensor,
    slots: Tensor,
    pages: Tensor,
    codes: Tensor,
    scales: Tensor,
    groups: Tensor,
    layout: Layout | None = None,
) -> None:
    """4-bit key codes of closed pages, of the head groups that look far.

    slots int64 [layer, n] of the pool, pages int64 [n]; codes, scales and groups as in `recall.digest.Digests`.
    """
    count, code_pages, page, half = codes.shape
    _close[(count, pages.shape[0])](
        pool,
        slots,
        pages,
        codes,
        scales,
        groups,
        pages.shape[0],
        pool.shape[1],
        code_pages,
        DIM=2 * half,
        PAGE=page,
        HALF=triton.next_power_of_2(half),
        **layout_of(pool, layout),
        num_warps=4,
    )


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
