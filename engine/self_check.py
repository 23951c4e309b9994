"""Do the kernels compute on this card what the torch reference computes? A small scene of the model's own shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.kv.tail import Tail, TailShape
from engine.model.transformer import Transformer
from engine.ops import geometry as g
from engine.ops import triton_pages
from engine.ops.attention import PartialAttention
from engine.ops.geometry import Turns
from engine.ops.rope import rotate
from engine.ops.sliding import attend_window
from engine.ops.triton_attention import PagedAttention
from engine.ops.triton_score import PageScores
from engine.ops.triton_sliding import SlidingAttention
from engine.ops.upload import upload
from engine.recall.digest import Digests, encode_keys
from engine.recall.score import page_lse

PAGES = 5
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
MANY = 17
"""Rows of a chunk: more than the kernel of a few takes, and than a card may have room for beside the keys."""
LSE_TOLERANCE = 5e-2
"""Scores read the query in bytes."""


def self_check(model: Transformer, shape: KVShape) -> str:
    """How attention and scores differ from their references; empty where they agree. RuntimeError if they don't run."""
    device, heads, dtype = model.device, model.config.heads, shape.dtype
    random = torch.Generator().manual_seed(0)
    form = shape.form
    pool = torch.zeros(PAGES, *form.shape, dtype=shape.element, device=device)
    token = torch.arange(PAGES * PAGE, device=device)
    numbers = torch.randn(2, PAGES * PAGE, shape.kv_heads, shape.head_dim, generator=random).to(device, dtype)
    form.write(pool, token // PAGE, token % PAGE, *numbers)
    kv = shape.decode(pool)
    ids = torch.arange(PAGES, dtype=torch.int32, device=device)
    past, first = PAGES - 1, 10
    turns, distance = Turns.of(model.rope, PAGES), np.arange(past, -1, -1)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=device)
    scale = model.rope.score_scale

    failure = ""
    for rows in (MANY, 1):
        words = {g.PAST: past, g.FIRST: first, g.OWN: 1, g.FARTHEST: PAGES, g.TOKENS: rows}
        geometry = upload(g.vector(words), device)
        q = torch.randn(rows, heads, shape.head_dim, generator=random).to(device)
        attention = PagedAttention(heads, shape.kv_heads, shape.head_dim, rows, device, 4 * shape.kv_heads)
        seen = (pool, None, ids, ids, None, geometry, turns, counters, scale, False, form.layout)
        got = attention(q, *seen, dtype=dtype)
        partial = PartialAttention(model.rope, q, shape.kv_heads)
        partial.add(kv, distance, past * PAGE + first)
        failure = failure or _differ("attention", got.float(), partial.result(), TOLERANCE[dtype])

    digests = Digests(replace(shape, layers=1), PAGES, device, model.rope)
    digests.packed = True
    triton_pages.close_pages(pool[None], ids.long()[None], ids.long(), *digests.codes(), digests.groups, form.layout)
    scores = PageScores(1, heads, shape.kv_heads, PAGES, device, 2 * shape.kv_heads, shape.kv_heads)
    scores(q, *digests.codes_of(0), ids, geometry, turns, scale)
    exact, sizes = encode_keys(kv[:past, 0])
    wanted = page_lse(model.rope, q, exact.float(), distance[:past], sizes)
    got = scores.lse[:, : heads // shape.kv_heads, :past]
    failure = failure or _differ("page scores", got, wanted, LSE_TOLERANCE)
    return failure or (_check_sliding(model, shape.dtype) if model.config.sliding else "")


def _check_sliding(model: Transformer, dtype: torch.dtype) -> str:
    """One row, and a chunk's, over a tail that is longer than the window."""
    config, rope, random = model.config, model.sliding_rope, torch.Generator().manual_seed(0)
    before, end = config.window + PAGE, config.window + 2 * PAGE
    attention = SlidingAttention(rope, config.heads, config.kv_heads, config.window, -(-end // PAGE))
    q, k, v = (
        torch.randn(end, heads, config.head_dim, generator=random).to(model.device, dtype)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    turns = rope.cos_sin(torch.arange(end, device=model.device))
    turned_q, turned_k = rotate(q, *turns), rotate(k, *turns)
    failure = ""
    for tokens in (1, MANY):
        now = slice(before, before + tokens)
        tail = Tail(TailShape(1, config.kv_heads, config.head_dim, config.window, dtype), end, model.device)
        tail.append(0, turned_k[:before], v[:before], 0)
        words = upload(g.vector({**tail.words(before), g.TOKENS: tokens}), model.device)
        got = attention(0, q[now], k[now], v[now], words)
        keys, values = tail.append(0, turned_k[now], v[now], before)
        wanted = attend_window(turned_q[now], keys, values, config.window, rope.score_scale)
        failure = failure or _differ("sliding attention", got.float(), wanted.float(), TOLERANCE[dtype])
    return failure


def _differ(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return "" if error <= tolerance else f"{what} differ by {error:.2g} of the largest value ({tolerance:g} is allowed)"
