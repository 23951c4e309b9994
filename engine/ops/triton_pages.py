"""What happens to pages in the pool: tokens are appended, a full page closes. Triton.

References: `Runner._store`, and `recall.digest.encode_keys` with `pack_codes`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops.follow import await_results, follow
from engine.ops.triton_codes import GROUP, ROUND, Layout, layout_of, load_keys, store_halves

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
    await_results(FOLLOW)
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
