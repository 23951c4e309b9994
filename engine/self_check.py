"""Do the kernels compute on this card what the torch reference computes? A small scene of the model's own shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.model.transformer import Transformer
from engine.ops import geometry as g
from engine.ops import triton_pages
from engine.ops.attention import PartialAttention
from engine.ops.geometry import Turns
from engine.ops.triton_attention import PagedAttention
from engine.ops.triton_score import PageScores
from engine.recall.digest import Digests, encode_keys
from engine.recall.score import page_lse

PAGES = 5
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
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
    q = torch.randn(1, heads, shape.head_dim, generator=random).to(device)
    ids = torch.arange(PAGES, dtype=torch.int32, device=device)
    past, first = PAGES - 1, 10
    geometry = torch.zeros(g.GEOMETRY, dtype=torch.int32)
    geometry[[g.PAST, g.FIRST, g.OWN, g.FARTHEST, g.TOKENS]] = torch.tensor(
        [past, first, 1, PAGES, 1], dtype=torch.int32
    )
    geometry, turns = geometry.to(device), Turns.of(model.rope, PAGES)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=device)
    scale = model.rope.score_scale

    attention = PagedAttention(heads, shape.kv_heads, shape.head_dim, 1, device, 4 * shape.kv_heads)
    got = attention(q, pool, None, ids, ids, None, geometry, turns, counters, scale, False, form.layout, dtype=dtype)
    partial = PartialAttention(model.rope, q, shape.kv_heads)
    distance = np.arange(past, -1, -1)
    partial.add(kv, distance, past * PAGE + first)
    failure = _differ("attention", got.float(), partial.result(), TOLERANCE[dtype])

    digests = Digests(replace(shape, layers=1), PAGES, device, model.rope)
    digests.packed = True
    triton_pages.close_pages(pool[None], ids.long()[None], ids.long(), *digests.codes(), digests.groups, form.layout)
    scores = PageScores(1, heads, shape.kv_heads, PAGES, device, 2 * shape.kv_heads, shape.kv_heads)
    scores(q, *digests.codes_of(0), ids, geometry, turns, scale)
    exact, sizes = encode_keys(kv[:past, 0])
    wanted = page_lse(model.rope, q, exact.float(), distance[:past], sizes)
    got = scores.lse[:, : heads // shape.kv_heads, :past]
    return failure or _differ("page scores", got, wanted, LSE_TOLERANCE)


def _differ(what: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    return "" if error <= tolerance else f"{what} differ by {error:.2g} of the largest value ({tolerance:g} is allowed)"
