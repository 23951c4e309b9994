"""Steps that the device drives: score, select, fetch and attend as kernels over tables that live on the device.

The host says once per page what a step's geometry is and launches; it reads nothing back. A step is one CUDA graph, of
several tokens one whose last rows may count for nothing. The host's own tables go to the device for as long as it
drives (`DevicePool.lend`), and come home when anybody asks for them.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.errors import EngineError
from engine.ferry import Ferry
from engine.kv.host import HostStore
from engine.kv.pool import DevicePool
from engine.kv.transfer import Transfer, TransferStats
from engine.layout import Layout, lay_out
from engine.lent import LentTables
from engine.model.transformer import Transformer
from engine.ops import geometry as g
from engine.ops import triton_pages, triton_select, triton_slots
from engine.ops.geometry import Turns
from engine.ops.triton_attention import PagedAttention
from engine.ops.triton_layers import TRITON
from engine.ops.triton_score import MANY_UNITS, PageScores
from engine.ops.upload import upload
from engine.recall.digest import Digests
from engine.recall.recall import QUERY_ROWS, Recall
from engine.recall.select import HYSTERESIS, REASONS, WORTH
from engine.routes import attention_key
from engine.scheduler import QUESTION_CHUNK
from engine.step import Frame
from engine.step_graph import Beside, StepGraphs
from engine.step_state import StepState

SCORERS = ("fused", "token", "lexical")


@dataclass(frozen=True)
class Kind:
    """What makes one step's launches differ from another's."""

    rows: int  # that are launched, as many as tokens or more
    logits: str  # of which rows: none | last | all
    everything: bool  # all past pages are seen, cold ones in place
    cold: bool
    scored: bool
    neighbors: int
    ferried: bool  # the host brings what is missed

    @property
    def captured(self) -> bool:
        """Whether as a graph: logits of many rows are too large to keep room for."""
        return self.rows == 1 or self.logits != "all"

    @property
    def ahead(self) -> bool:
        """Whether the window of the step before is attended to while scores choose."""
        return self.scored and self.rows == 1

    @property
    def name(self) -> str:
        return "device-driven, misses by the host" if self.ferried else "device-driven"


class DrivenSteps:
    """The device's side of one ring. Buffers for steps of at most `QUESTION_CHUNK` tokens."""

    def __init__(
        self,
        model: Transformer,
        pool: DevicePool,
        host: HostStore,
        digests: Digests,
        transfer: Transfer,
        *,
        compact: bool,
        pages: int,
        multiprocessors: int,
        graphs: bool,
    ) -> None:
        """pages: the most that one sequence may have; multiprocessors: of the device; graphs: whether to capture."""
        self.model, self.pool, self.host, self.digests, self.transfer = model, pool, host, digests, transfer
        self.compact, self.graphs = compact, StepGraphs(graphs)
        self.steps: Counter[str] = Counter()
        device, shape = pool.data.device, pool.shape
        heads, layers, slots = model.config.heads, shape.layers, pool.slots
        own = QUESTION_CHUNK // PAGE + 1
        self._pages = pages
        routes = pool.routes
        self._gather_units = routes.pick("gather_units", slots)
        units = multiprocessors * routes.pick(attention_key(shape.head_dim, heads // shape.kv_heads), slots)
        self._attention = PagedAttention(heads, shape.kv_heads, shape.head_dim, QUESTION_CHUNK, device, units)
        self._scores = PageScores(
            QUERY_ROWS,
            heads,
            shape.kv_heads,
            self._pages,
            device,
            multiprocessors * routes.pick("page_scores", slots),
            multiprocessors * MANY_UNITS,
        )
        self._turns = Turns.of(model.rope, pages + own)
        self._offsets = model.rope.cos_sin(torch.arange(own * PAGE, device=device))
        self._turned = torch.zeros(QUESTION_CHUNK, heads, shape.head_dim, device=device)

        def ints(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        self.tables = LentTables(pool, host.pages, self._tables_came_home)
        self._misses = triton_slots.Misses.empty(layers, slots, device)
        self._ferry = None if self.in_place else Ferry(pool, host, self._misses, transfer.stats, self._gather_units)
        self._fixed, self._windows = ints(slots), ints(layers, slots)
        self._choice = triton_select.Choice.empty(slots, device)
        self._restless = ints(layers, triton_slots.ALIGNED)
        self._beside = Beside(device)
        self._ids = ints(pages + own)
        self._role = torch.zeros(self._pages, dtype=torch.uint8, device=device)
        self._why = torch.zeros(layers, self._pages, dtype=torch.uint8, device=device)
        self._bars = ints(layers, shape.kv_heads) - 1
        self._state = StepState(device, QUESTION_CHUNK)
        self._last: Frame | None = None
        self._recall: Recall | None = None
        self._laid: tuple | None = None
        self._layout: Layout | None = None
        self._attended: Layout | None = None  # of the step before, if it came to its end

    @property
    def in_place(self) -> bool:
        """Whether kernels may read every page of the host store where it lies."""
        return not self.pool.data.is_cuda or self.host.pinned_bytes == self.host.bytes

    def serves(self, frame: Frame) -> bool:
        """Whether this step can be driven by the device; the others are the host's."""
        step = frame.step
        if step.observe or len(step.tokens) > QUESTION_CHUNK:
            return False
        if frame.identity:
            return len(step.tokens) == 1 or (step.turn and self.graphs.work)  # one by one, what streams is as fast
        if self.host.verifies:
            return False
        if step.mode == "exact":
            return len(step.tokens) == 1 and self.in_place
        settings = step.recall.settings
        if step.mode == "window":
            return len(step.tokens) == 1
        most = triton_select.most_ranks(self.pool.shape.kv_heads, self._pages)
        return settings.scorer in SCORERS and settings.control is None and settings.budget <= most

    def step(self, frame: Frame) -> Tensor | None:
        """Compute the frame's tokens; float32 logits of the rows that were asked for. Nothing is waited for."""
        step, before = frame.step, copy(self.transfer.stats)
        layout = self._lay_out(frame)
        everything = frame.identity or step.mode == "exact"
        scored = not everything and layout.left > 0
        tokens = len(step.tokens)
        kind = Kind(
            tokens if step.logits == "all" else self.graphs.rows(tokens),
            step.logits,
            everything,
            everything and not frame.identity,
            scored,
            step.recall.settings.neighbors if scored else 0,
            not everything and not self.in_place,
        )
        self._check_room(frame, layout, everything)
        self.tables.take()
        self._set_state(frame, layout)
        self._attended = None
        if frame.fresh:
            self._open(frame)
        logits = self._run(kind)
        self._last, self._attended = frame, layout
        step.trace.moved.add(self.transfer.stats, before)  # by the host; what the device moved is collected later
        step.trace.hidden_pages = frame.past - layout.window
        step.trace.over_pool |= not frame.identity
        if not everything and step.mode == "recall":
            step.recall.selections += self.pool.shape.layers
            step.recall.pages_selected += self.pool.shape.layers * (layout.left + len(layout.taken.pages))
        if step.explain:
            self._explain(frame, layout, everything)
        return logits

    def collect(self) -> None:
        """Add what the last step moved to the totals and to its request's own."""
        if self._last is None:
            return
        frame, self._last = self._last, None
        fetched, streamed = self._state.counted()
        size = (fetched + streamed) * self.pool.shape.layer_page_bytes
        moved = TransferStats(layer_pages_fetched=fetched, layer_pages_streamed=streamed, bytes_fetched=size)
        for stats in (self.transfer.stats, frame.step.trace.moved):
            stats.add(moved, TransferStats())

    # --- what the host says once per page -------------------------------------------------------------------------

    def _lay_out(self, frame: Frame) -> Layout:
        step, recall = frame.step, frame.step.recall
        laid = (
            id(recall),
            frame.past,
            frame.own.tobytes(),
            frame.identity,
            step.mode,
            step.budget,
            recall.lexical_matches,
        )
        if laid == self._laid and self.pool.lent:
            return self._layout
        frame.begin()
        layout = lay_out(frame)
        if frame.identity:
            self._bring_all(frame.ids[: frame.past])
        self.tables.take()
        self._enter(recall)
        self._ids[: len(frame.ids)].copy_(self._upload(frame.ids.astype(np.int32)))
        if layout.role is not None:
            self._role[: frame.past].copy_(self._upload(layout.role))
            self._fixed[: len(layout.fixed)].copy_(self._upload(layout.fixed.astype(np.int32)))
            if step.mode == "recall" and not layout.left:  # no score will say what is selected
                why = np.where(layout.role == g.TAKEN, g.LEXICAL, g.UNSELECTED).astype(np.uint8)
                self._why[:, : frame.past].copy_(self._upload(why))
        self._laid, self._layout = laid, layout
        return layout

    def _bring_all(self, pages: np.ndarray) -> None:
        self.pool.begin_step()  # what another sequence used in its last step may go now
        for layer in range(self.pool.shape.layers):
            self.transfer.fetch(layer, self.pool.touch(layer, pages))

    def _enter(self, recall: Recall) -> None:
        """Go on from what this request selected before, and keep what the other did."""
        if recall is self._recall:
            return
        if self._recall is not None:
            self._recall.kept = self._why.clone()
        if recall.kept is not None:
            self._why.copy_(recall.kept)
        else:
            why = np.zeros(self._why.shape, dtype=np.uint8)
            for layer, pages in recall.selected.items():
                why[layer, pages] = g.KEY
            self._why.copy_(self._upload(why))
        self._recall, recall.kept = recall, None

    def _check_room(self, frame: Frame, layout: Layout, everything: bool) -> None:
        """The window, the own pages and what may not move must fit; where copies to the host are in the way, wait."""
        seen = 0 if everything and not frame.identity else layout.window
        need, pinned = seen + len(frame.own), self.pool.pinned
        certain = frame.ids if frame.identity else np.concatenate([frame.own, frame.ids[layout.fixed]])
        for wait in (True, False):
            others = int(pinned.sum()) - int(pinned[certain].sum())
            if need + others <= self.pool.slots:
                return
            if wait:
                self.transfer.settle(wait=True)
        raise EngineError(
            f"{need} pages of this step and {others} that may not move exceed the pool's {self.pool.slots} slots",
            "raise --kv-capacity",
        )

    # --- tables and state -----------------------------------------------------------------------------------------

    def _tables_came_home(self) -> None:
        """What the request in hand holds selected goes with them."""
        if self._recall is not None:
            self._recall.hold(self._why.cpu().numpy())
        self._recall = self._laid = None

    def _set_state(self, frame: Frame, layout: Layout) -> None:
        """What differs from token to token."""
        self.pool.begin_step()
        words = {
            g.PAST: frame.past,
            g.FIRST: frame.first_row,
            g.OWN: len(frame.own),
            g.WINDOW: layout.window,
            g.LEFT: layout.left,
            g.DEPTH: layout.depth,
            g.FARTHEST: frame.step.budget.pool - len(frame.own) if self.compact else self._pages,
            g.TICK: self.pool.tick,
            g.STEADY: layout is self._attended,
            g.TOKENS: len(frame.step.tokens),
        }
        self._state.tell(frame.step.tokens, words)

    def _open(self, frame: Frame) -> None:
        self._state.send(0)
        fresh = self._upload(np.asarray(frame.fresh, dtype=np.int32))
        triton_slots.open_pages(fresh, self.pool.data, self.tables.device, self._misses.places, self._state.geometry)

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.pool.data.device)

    # --- the launches ---------------------------------------------------------------------------------------------

    def _run(self, kind: Kind) -> Tensor | None:
        def launch() -> Tensor | None:
            return self._launch(kind)

        logits, how = self.graphs.run(kind, launch) if kind.captured else (launch(), "eager")
        self.steps[f"{kind.name}, {how}"] += 1
        self._state.launched()
        return logits

    def _launch(self, kind: Kind) -> Tensor | None:
        tokens = self._state.send(kind.rows)
        hidden = self.model.forward(tokens, lambda layer, q, k, v: self._attend(kind, layer, q, k, v), TRITON)
        self._state.fetch()
        if kind.logits == "none":
            return None
        if kind.logits == "last" and kind.rows > 1:
            hidden = hidden.index_select(0, self._state.geometry[g.TOKENS, None] - 1)
        return self.model.logits(hidden)

    def _attend(self, kind: Kind, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool, turned, rope = self.pool.data[layer], self._turned[: kind.rows], self.model.rope
        tables, host = self.tables.device.layer(layer), self.host.data[:, layer]
        page, state, counters = self.pool.shape.form.layout, self._state.geometry, self._state.counters
        triton_pages.append(q, k, v, turned, pool, tables.slot_of, self._ids, state, self._offsets, page)
        window = None if kind.everything else self._windows[layer]
        seen = (
            turned,
            pool,
            host if kind.cold else None,
            tables.slot_of,
            self._ids,
            window,
            state,
            self._turns,
            counters,
            rope.score_scale,
            self.compact,
            page,
        )
        if kind.everything:
            return self._attention(*seen, dtype=q.dtype)
        choice, misses, restless = self._choice, self._misses.layer(layer), self._restless[layer]

        def early() -> None:
            self._attention.attend(*seen, dtype=q.dtype, when="early", doubt=restless)

        with self._beside.running(early) if kind.ahead else nullcontext():
            if kind.scored:
                why, codes = self._why[layer], self.digests.codes_of(layer)
                self._scores(turned, *codes, self._ids, state, self._turns, rope.score_scale)
                triton_select.rank(self._scores, self._bars[layer], why, self._role, choice, state, HYSTERESIS, WORTH)
                triton_select.pick(self._scores, self._role, why, choice, state, kind.neighbors)
            triton_slots.bring(
                self._fixed, choice, restless, window, self._ids, tables, misses, state, counters, self.compact
            )
            if not kind.ferried:
                triton_pages.gather(host, pool, misses.pages, misses.places, misses.count, self._gather_units)
        if kind.ferried:
            self._ferry.fetch(layer, self.graphs.between)
        return self._attention(*seen, dtype=q.dtype, redo=choice.redo if kind.ahead else None)

    # --- explaining -----------------------------------------------------------------------------------------------

    def _explain(self, frame: Frame, layout: Layout, everything: bool) -> None:
        """Read back what was seen, and why: a slow step, for those who asked for it."""
        trace = frame.step.trace
        if everything:
            trace.seen.update(range(frame.past))
            return
        trace.seen.update(self._windows[:, : layout.window].unique().tolist())
        because = dict(zip(layout.taken.pages.tolist(), layout.taken.reasons.tolist(), strict=True))
        logical = {int(page): index for index, page in enumerate(frame.ids)}
        missed, counts = self._misses.pages.cpu().numpy(), self._misses.count[:, 0].tolist()
        why = self._why[:, : frame.past].cpu().numpy()
        if frame.step.mode == "window":  # which leaves what was selected before as it was
            why = np.zeros_like(why)
        for layer in range(len(why)):
            for page in np.flatnonzero(why[layer]).tolist():
                reason = because.get(page, int(why[layer, page]) - 1)
                trace.reasons.setdefault(page, Counter())[REASONS[reason]] += 1
            trace.fetched.update(logical[int(page)] for page in missed[layer, : counts[layer]])
