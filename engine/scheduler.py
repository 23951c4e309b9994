"""In which chunks, and with which attention, a prompt is computed. Pure.

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
class Chunk:
    """Tokens [start, end) of the prompt, computed in one step."""

    start: int
    end: int
    mode: str  # exact | recall | window
    observe: bool = False  # keep this exact pass's attention mass for the selection


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


def schedule(plan: Plan, resume: int, question: int, total: int, pool_pages: int, chunk: int) -> list[Chunk]:
    """Chunks for tokens [resume, total) of a prompt whose question begins at token `question`; resume is on a page."""
    if page_count(total) <= pool_pages:
        return _cut(resume, total, "exact", chunk)
    short = total - resume < HIDING and resume > 0
    # The question's chunk begins on a page, and is never longer than what recall may read at once.
    tail = max(resume, max(question, total - HIDING + 1) // PAGE * PAGE)
    prefill = plan.prefill
    if prefill == "auto":
        prefill = "exact" if not (short or plan.compact) else "recall"
        if prefill == "recall" and plan.decode != "recall":
            prefill = plan.question
    if prefill == "exact" and not plan.mass:
        return _cut(resume, total, "exact", chunk)
    chunks = _cut(resume, tail, prefill, chunk)
    if plan.mass:
        return [*chunks, Chunk(tail, total, "exact", observe=True)]
    mode = plan.question if prefill == "window" else prefill
    return [*chunks, *_cut(tail, total, mode, QUESTION_CHUNK)]


def _cut(start: int, end: int, mode: str, size: int) -> list[Chunk]:
    size = max(PAGE, size // PAGE * PAGE)
    return [Chunk(at, min(at + size, end), mode) for at in range(start, end, size)]
