"""One request's recall: score, select, and remember what was selected, layer by layer and step by step.

`token` and the digest scorers look again at every step, in every layer, from the query of the tokens being computed.
`lexical` looks once per question; `mass` once, from the exact pass over the question. `fused` is token plus lexical,
each with its own share of the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.page import KVShape
from engine.ops.rope import Rotary
from engine.recall.digest import KIND_OF, Digests
from engine.recall.lexical import lexical_scores
from engine.recall.score import digest_scores, mass, page_lse, token_scores
from engine.recall.select import EMPTY, Selection, choose, control
from engine.recall.window import Span

QUERY_ROWS = 32
"""A chunk's selection is scored from its last rows: all rows cost 8 x as much and answer the same (measured)."""

LEXICAL_SHARE = 4
"""One page in so many of a fused selection is the lexical quota; by the scorer table in the README."""


@dataclass(frozen=True)
class RecallSettings:
    """What one request's recall does, every value resolved. `tag` names it: pages computed under it carry that name."""

    scorer: str
    budget: int  # pages, neighbours included
    neighbors: int
    query_tail: int
    control: str | None = None
    excluded: tuple[tuple[int, int], ...] = ()  # token ranges
    seed: int = 0
    compact: bool = False

    @property
    def tag(self) -> str:
        parts = ["recall", self.scorer, str(self.budget), str(self.neighbors), str(self.query_tail)]
        if self.control:
            parts += [self.control, str(self.seed)]
        if self.excluded:
            parts.append(repr(self.excluded))
        return ":".join(parts + (["compact"] if self.compact else []))


@dataclass(frozen=True)
class Look:
    """What one layer saw in one step: past pages (logical, ascending), and of every past page its score by KV head."""

    layer: int
    window: np.ndarray
    scores: np.ndarray | None  # float [kv_head, past]; None: nothing was scored


@dataclass
class Recall:
    """State of one request. `digests` and `load` belong to the engine; the rest is this request's own."""

    settings: RecallSettings
    shape: KVShape
    digests: Digests
    rope: Rotary
    load: Callable[[int, np.ndarray], Tensor]
    selections: int = 0  # layers x steps in which pages were chosen
    pages_selected: int = 0
    lexical_matches: int = 0  # pages that share a token run with the question
    kept: Tensor | None = None  # a backend's own record of the last selection: bool-like [layer, page], on its device
    looks: list[Look] | None = None  # kept for who wants to know what became of them
    _scored: np.ndarray | None = None
    _lexical: np.ndarray | None = None
    _held: dict[int, np.ndarray] = field(default_factory=dict)
    _spans: dict[int, Span] = field(default_factory=dict)
    _mass: dict[int, list[Tensor]] = field(default_factory=dict)
    _fixed: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.settings.seed)

    @property
    def held(self) -> list[int]:
        """Logical pages that the last step selected in any layer."""
        if self.kept is not None:
            return self.kept.any(0).nonzero().flatten().tolist()
        return sorted({int(page) for pages in self._held.values() for page in pages})

    def hold(self, why: np.ndarray) -> None:
        """Take over such a record, on the host: hysteresis goes on from it."""
        self.kept = None
        self._held = {layer: np.flatnonzero(row) for layer, row in enumerate(why)}

    @property
    def selected(self) -> dict[int, np.ndarray]:
        """Logical pages that the last step selected, by layer."""
        return self._held

    def ask(self, tokens: np.ndarray, query: np.ndarray) -> None:
        """A question: `query` are its token ids, `tokens` all that stands before the step that reads it (int [n])."""
        if self.settings.scorer in ("lexical", "fused"):
            self._lexical = lexical_scores(tokens, query)
            self.lexical_matches = int((self._lexical > 0).sum())

    def begin_step(self, closed: np.ndarray) -> None:
        """Make the digests that this scorer needs and `closed` pages lack: other scorers may have closed them."""
        kind = KIND_OF.get(self.settings.scorer)
        if kind is not None and self.settings.control is None and len(closed):
            self.digests.ensure(kind, closed, self.load)

    def observe(self, layer: int, turned: Tensor, segment: Tensor, distance: np.ndarray) -> None:
        """During an exact pass: keep what each page of `segment` would get from the question's last rows (`mass`)."""
        self._mass.setdefault(layer, []).append(page_lse(self.rope, turned[-QUERY_ROWS:], segment[:, 0], distance))

    def fix(self, layer: int) -> None:
        """The exact pass has seen every page of this layer: its attention mass is the selection's score from now on."""
        if layer in self._mass:
            self._fixed[layer] = mass(torch.cat(self._mass.pop(layer), -1)).cpu().numpy()

    def select(
        self,
        layer: int,
        plain: Tensor,
        turned: Tensor,
        pages: np.ndarray,
        span: Span,
        budget: int,
        farthest: int | None,
    ) -> Selection:
        """The selection of one layer in one step.

        plain, turned: the query [T, heads, head_dim] un-rotated and rotated to its offset from the chunk's first page;
        pages: ids of the past pages; farthest: the largest page distance to score with (compact positions), or None.
        """
        eligible = self.eligible(span)
        if self.settings.control:
            chosen = control(self.settings.control, eligible, budget, self._rng)
        else:
            chosen = self._choose(layer, plain, turned, pages, eligible, budget, farthest)
        self._held[layer], self._spans[layer] = chosen.pages, span
        self.selections += 1
        self.pages_selected += len(chosen.pages)
        if self.looks is not None:
            self.looks.append(Look(layer, span.window(chosen.pages), self._scored))
        return chosen

    def eligible(self, span: Span) -> np.ndarray:
        """bool [past]: the pages that may be selected."""
        mask = span.eligible()
        for start, end in self.settings.excluded:
            mask[start // PAGE : (end - 1) // PAGE + 1] = False
        return mask

    def _choose(self, layer, plain, turned, pages, eligible, budget, farthest) -> Selection:
        scorer = self.settings.scorer
        scores = None
        if scorer == "mass":
            scores = self._padded(self._fixed.get(layer), len(pages))
        elif scorer in KIND_OF:
            scores = self._score_keys(layer, plain, turned, pages, farthest)
        self._scored = scores
        lexical, quota = self.lexical(len(pages), budget)
        if scores is None and lexical is None:
            return EMPTY
        held = self._held.get(layer)
        return choose(
            scores,
            eligible,
            budget,
            neighbors=self.settings.neighbors,
            lexical=lexical,
            lexical_quota=quota,
            held=held[held < len(pages)] if held is not None else None,
        )

    def lexical(self, pages: int, budget: int) -> tuple[np.ndarray | None, int]:
        """What lexical recall says of `pages` past pages (float [pages], None: nothing), and its part of the budget."""
        if self._lexical is None:
            return None, 0
        quota = budget if self.settings.scorer == "lexical" else budget // LEXICAL_SHARE
        return self._padded(self._lexical[None], pages)[0], quota

    def _score_keys(self, layer, plain, turned, pages, farthest) -> np.ndarray:
        kind = KIND_OF[self.settings.scorer]
        if kind == "token":
            distance = np.arange(len(pages), 0, -1)
            if farthest is not None:
                distance = np.minimum(distance, farthest)
            scores = token_scores(self.digests, self.rope, layer, pages, turned[-QUERY_ROWS:], distance)
        else:
            scores = digest_scores(self.digests, self.rope, kind, layer, pages, plain[-QUERY_ROWS:])
        return scores.float().cpu().numpy()

    @staticmethod
    def _padded(scores: np.ndarray | None, pages: int) -> np.ndarray | None:
        """One-shot scores, with 0 for pages that closed after the question was asked."""
        if scores is None or scores.shape[1] >= pages:
            return None if scores is None else scores[:, :pages]
        return np.pad(scores, ((0, 0), (0, pages - scores.shape[1])))

    def covered(self, exact: Recall) -> list[float]:
        """By layer: the share of the attention that `exact` observed which the last step's window would have got.

        Attention to closed pages, the mean over KV heads. Layers without a window of their own are left out.
        """
        shares = []
        for layer in sorted(self._spans.keys() & exact._fixed.keys()):
            span, mass = self._spans[layer], exact._fixed[layer]
            window = span.window(self._held[layer])
            shares.append(float((mass[:, window].sum(1) / mass.sum(1)).mean()))
        return shares
