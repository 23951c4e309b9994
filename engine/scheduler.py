"""In which phases, and with which attention, a prompt is computed. Pure.

`auto` is exact for bulk and recall for a suffix too short to hide the stream of cold pages behind its compute. A
`window` prefill still reads the question with the decode's attention: what the chunk before it stored can be recalled.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import PAGE
from engine.kv.page import page_count

HIDING = 1024
"""Tokens from which a chunk hides the stream of cold pages: FLOPS / (PCIe bytes per s x query heads per KV head)."""

QUESTION_CHUNK = 256
"""Tokens of a suffix that share one selection."""


@dataclass(frozen=True)
class Phase:
    """Tokens [start, end) of the prompt under one kind of attention, computed in steps of at most `size` tokens."""

    start: int
    end: int
    mode: str  # exact | recall | window
    size: int
    observe: bool = False  # keep this exact pass's attention mass for the selection
    turn: bool = False  # a further turn: few tokens, in a step of the kind that its answer is written in

    def step(self, position: int, room: int) -> int:
        """Where the step that begins at `position` ends, if the pool has room for `room` tokens of it."""
        size = max(PAGE, min(self.size, room) // PAGE * PAGE)
        return min(self.end, position + size)


@dataclass(frozen=True)
class Plan:
    """How a request attends: `prefill` as asked (auto included), `decode` resolved."""

    prefill: str
    decode: str
    compact: bool
    mass: bool  # the scorer needs an exact pass over the question

    @property
    def question(self) -> str:
        """How the question is read after a bulk that was only windowed or recalled."""
        return "exact" if self.mass else self.decode


def schedule(
    plan: Plan, resume: int, question: int, total: int, pool_pages: int, chunk: int, hiding: int = HIDING
) -> list[Phase]:
    """Phases for tokens [resume, total) of a prompt whose question begins at token `question`; resume is on a page."""
    if page_count(total) <= pool_pages:
        return [Phase(resume, total, "exact", chunk, turn=resume > 0 and total - resume <= QUESTION_CHUNK)]
    short = total - resume < hiding and resume > 0
    # The question's phase begins on a page, and is never longer than what recall may read at once.
    tail = max(resume, min(max(question, total - HIDING + 1), total - 1) // PAGE * PAGE)
    prefill = plan.prefill
    if prefill == "auto":
        prefill = "exact" if not (short or plan.compact) else "recall"
        if prefill == "recall" and plan.decode != "recall":
            prefill = plan.question
    bulk = [Phase(resume, tail, prefill, chunk)] if tail > resume else []
    if plan.mass:
        return [*bulk, Phase(tail, total, "exact", HIDING, observe=True)]
    if prefill == "exact":
        return [Phase(resume, total, "exact", chunk)]
    mode = plan.question if prefill == "window" else prefill
    return [*bulk, Phase(tail, total, mode, QUESTION_CHUNK)]
