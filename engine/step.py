"""What one step is made of: its frozen input, its geometry, and the trace that a request's steps leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.share import WindowBudget
from engine.kv.transfer import TransferStats
from engine.ops.rope import Rotary
from engine.prefix import EXACT
from engine.recall.recall import Recall
from engine.sequence import Sequence


@dataclass
class Trace:
    """What a request's steps saw, per logical page; grows with the sequence."""

    steps: int = 0
    hidden_pages: int = 0  # of the last step: past pages outside the window, the most over the layers
    over_pool: bool = False
    reasons: dict[int, Counter[str]] = field(default_factory=dict)  # logical page -> why it was selected, how often
    fetched: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    moved: TransferStats = field(default_factory=TransferStats)  # for this request alone, whoever shared its steps


@dataclass(frozen=True)
class StepInput:
    """The whole input of a step. `tokens` follow what `sequence` holds; `logits`: none, last or all rows."""

    sequence: Sequence
    tokens: tuple[int, ...]
    mode: str  # exact | recall | window
    budget: WindowBudget
    recall: Recall
    trace: Trace
    logits: str = "last"
    observe: bool = False  # keep the attention mass of this exact pass
    turn: bool = False  # as in `scheduler.Phase`
    explain: bool = False


@dataclass(frozen=True)
class Frame:
    """A step's geometry, the same for every layer. What takes the whole sequence to compute is made when asked for."""

    step: StepInput
    past: int  # pages before the chunk's first own page
    end: int  # tokens of the sequence after the step
    fresh: tuple[int, ...]  # ids of the pages that this step opens
    first_row: int  # tokens that the first own page already holds
    identity: bool  # everything fits in the pool
    rope: Rotary
    sliding_rope: Rotary

    @cached_property
    def ids(self) -> np.ndarray:
        """int64: page ids of the whole sequence, fresh ones included."""
        return np.asarray([*self.step.sequence.pages, *self.fresh], dtype=np.int64)

    @cached_property
    def own(self) -> np.ndarray:
        """int64: ids of the pages that the chunk lies in."""
        return np.asarray([*self.step.sequence.pages[self.past :], *self.fresh], dtype=np.int64)

    @cached_property
    def rows(self) -> Tensor:
        """[T] of each token from the first own page's start."""
        first = self.first_row
        return torch.arange(first, first + len(self.step.tokens), device=self.rope.inv_freq.device)

    @cached_property
    def turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows: the queries' rotation."""
        return self.rope.cos_sin(self.rows)

    @cached_property
    def offset_turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin of each token's offset in its page: the keys' rotation."""
        return self.rope.cos_sin(self.rows % PAGE)

    @cached_property
    def sliding_turns(self) -> tuple[Tensor, Tensor]:
        """cos and sin of the tokens' true positions: queries and keys of layers that slide."""
        return self.sliding_rope.cos_sin(
            torch.arange(self.step.sequence.length, self.end, device=self.rope.inv_freq.device)
        )

    @property
    def tail_words(self) -> dict[int, int]:
        """As `Tail.words`; none where no layer slides."""
        sequence = self.step.sequence
        return sequence.tail.words(sequence.length) if sequence.tail is not None else {}

    @property
    def tag(self) -> str:
        """How the pages that this step closes were computed."""
        if self.identity or self.step.mode == "exact":
            return EXACT
        return "window" if self.step.mode == "window" else self.step.recall.settings.tag

    def begin(self) -> None:
        """Make what this step's scorer reads and the pages lack."""
        self.step.trace.hidden_pages = 0
        if self.step.mode == "recall" and not self.identity:
            self.step.recall.begin_step(self.ids[: self.past])

    def publish(self) -> None:
        """The step is part of its sequence from now on."""
        sequence = self.step.sequence
        sequence.pages.extend(self.fresh)
        sequence.tokens.extend(self.step.tokens)
        if sequence.closed > len(sequence.tags):
            sequence.tags.extend([self.tag] * (sequence.closed - len(sequence.tags)))
        self.step.trace.steps += 1
