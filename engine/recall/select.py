"""Which pages to bring back: pure choices over scores, within a budget that neighbours share.

Every KV head ranks the pages for itself and the heads take turns, so that one head's many fair pages never crowd out
another's only good one; all heads then see the union. Lexical matches have a quota of their own: ranks of different
kinds never vote against each other (fusing them lost 8 of 12 facts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HYSTERESIS = 2.0
WORTH = 0.02
"""A page stays selected until another scores so many times better and gets so much of the attention besides; the
neighbours that came with it stay with it.

Where attention is diffuse (random weights, 131,072 tokens, 136 of 2,048 pages a layer) 1.25 times alone let 92 pages a
layer change with every token, and 3 times four: pages that get a thousandth each, and none is better than the one that
it displaces. Three times lost 2 of 36 facts where one page and its neighbours are all that is selected; once a page
holds a third of the attention nothing can displace it.
"""

REASONS = ("key", "lexical", "neighbor", "control")


@dataclass(frozen=True)
class Selection:
    """Logical page numbers, ascending, and for each the index in REASONS of why it was chosen."""

    pages: np.ndarray
    reasons: np.ndarray


EMPTY = Selection(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int8))


def choose(
    scores: np.ndarray | None,
    eligible: np.ndarray,
    budget: int,
    *,
    neighbors: int = 0,
    lexical: np.ndarray | None = None,
    lexical_quota: int = 0,
    held: np.ndarray | None = None,
) -> Selection:
    """At most `budget` eligible pages.

    scores float [kv_head, pages] or None; eligible bool [pages]; lexical float [pages], 0 = no match;
    held: pages selected in the step before.
    """
    budget = min(budget, int(eligible.sum()))
    if budget <= 0:
        return EMPTY
    reasons = np.full(len(eligible), -1, dtype=np.int8)
    if lexical is not None and lexical_quota > 0:
        rank = _rank(lexical[None], eligible & (lexical > 0), lexical_quota)
        _take(reasons, rank, eligible, min(lexical_quota, budget), neighbors, REASONS.index("lexical"))
    left = budget - int((reasons >= 0).sum())
    if scores is not None and left > 0:
        stays = np.zeros(len(eligible), dtype=bool)
        if held is not None and len(held):
            stays[held] = True
            scores = np.where(stays, scores * HYSTERESIS + WORTH, scores)
        rank = _rank(scores, eligible, budget)
        _take(reasons, rank, eligible, left, neighbors, REASONS.index("key"), stays)
    pages = np.flatnonzero(reasons >= 0)
    return Selection(pages, reasons[pages])


def control(kind: str, eligible: np.ndarray, budget: int, rng: np.random.Generator) -> Selection:
    """The gates' controls: the same budget filled with the newest or with random eligible pages."""
    pages = np.flatnonzero(eligible)
    budget = min(budget, len(pages))
    if budget <= 0:
        return EMPTY
    pages = pages[-budget:] if kind == "newest" else np.sort(rng.choice(pages, budget, replace=False))
    return Selection(pages, np.full(len(pages), REASONS.index("control"), dtype=np.int8))


def _rank(scores: np.ndarray, eligible: np.ndarray, depth: int) -> np.ndarray:
    """float [pages]: the best rank any head gives each page, its turn among the heads as a fraction; inf = unranked."""
    heads, pages = scores.shape
    depth = min(depth, int(eligible.sum()))
    rank = np.full(pages, np.inf)
    if depth == 0:
        return rank
    masked = np.where(eligible, scores, -np.inf)
    best = np.argpartition(-masked, depth - 1, axis=1)[:, :depth]
    for head in range(heads):
        order = best[head][np.argsort(-masked[head, best[head]], kind="stable")]
        rank[order] = np.minimum(rank[order], np.arange(depth) + 0.4 * head / heads)
    return rank


def _take(
    reasons: np.ndarray,
    rank: np.ndarray,
    eligible: np.ndarray,
    count: int,
    neighbors: int,
    reason: int,
    stays: np.ndarray | None = None,
) -> None:
    """Mark the `count` best ranked pages that are not yet taken; a neighbour comes half a rank after its page.

    stays: pages of the selection before. A page brings neighbours when it comes in, and those stay beside it; it does
    not bring others later, which would go and come with every token.
    """
    with_neighbors = rank.copy()
    stays = np.zeros(len(rank), dtype=bool) if stays is None else stays
    for step in range(1, neighbors + 1):
        after = np.where(~stays[:-step] | stays[step:], rank[:-step] + 0.5, np.inf)
        before = np.where(~stays[step:] | stays[:-step], rank[step:] + 0.5, np.inf)
        with_neighbors[step:] = np.minimum(with_neighbors[step:], after)
        with_neighbors[:-step] = np.minimum(with_neighbors[:-step], before)
    with_neighbors[~eligible | (reasons >= 0)] = np.inf
    order = np.argsort(with_neighbors, kind="stable")[:count]
    order = order[np.isfinite(with_neighbors[order])]
    beside = rank[order] > with_neighbors[order]
    reasons[order] = np.where(beside, REASONS.index("neighbor"), reason)
