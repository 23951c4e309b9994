"""What a step sees before any score is looked at: pure, the same for every layer, and until the next page closes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.ops import geometry as g
from engine.recall.select import EMPTY, Selection, choose
from engine.recall.window import span
from engine.step import Frame


@dataclass(frozen=True)
class Layout:
    """Pages: `window` past ones are seen; scores choose `left` of them, among the first `depth` ranks."""

    window: int
    left: int
    depth: int
    taken: Selection  # chosen by lexical recall
    fixed: np.ndarray  # int64: past pages seen whatever the scores say
    role: np.ndarray | None  # uint8 [past], of ops.geometry; None: all are seen


def lay_out(frame: Frame) -> Layout:
    """The geometry of `Runner._window` and the lexical part of `Recall.select`, for a device that scores by itself."""
    step, recall, past = frame.step, frame.step.recall, frame.past
    if frame.identity or step.mode == "exact":
        return Layout(past, 0, 0, EMPTY, np.empty(0, dtype=np.int64), None)
    own, budget, settings = len(frame.own), step.budget, recall.settings
    room = budget.pool - budget.free - budget.always - own - 1
    most = 0 if step.mode == "window" else min(settings.budget, room)
    always = span(past, own, budget, most)
    eligible = recall.eligible(always)
    lexical, quota = recall.lexical(past, most) if most else (None, 0)
    taken = choose(None, eligible, most, neighbors=settings.neighbors, lexical=lexical, lexical_quota=quota)
    depth = max(0, min(most, int(eligible.sum())))  # a chunk may leave no room to select
    left = depth - len(taken.pages) if settings.scorer != "lexical" else 0
    role = np.where(eligible, g.CANDIDATE, g.HIDDEN).astype(np.uint8)
    role[always.window(EMPTY.pages)] = g.ALWAYS
    role[taken.pages] = g.TAKEN
    fixed = np.flatnonzero(role >= g.TAKEN)
    return Layout(len(fixed) + left, left, depth, taken, fixed, role)
