"""Steps that the device drives: score, select, fetch and attend as kernels over tables that live on the device.

The host says once per page what a step's geometry is and launches; it reads nothing back. A step is one CUDA graph, of
several tokens one whose last rows may count for nothing. The host's own tables go to the device for as long as it
drives (`DevicePool.lend`), and come home when anybody asks for them.
"""

from __future__ import annotations

from collections import Counter
from copy import copy

import numpy as np
from torch import Tensor

from engine.errors import EngineError
from engine.kv.host import HostStore
from engine.kv.pool import DevicePool
from engine.kv.transfer import Transfer, TransferStats
from engine.launches import Kind, Launches
from engine.layout import Layout, lay_out
from engine.lent import LentTables
from engine.model.transformer import Transformer
from engine.ops import geometry as g
from engine.ops import triton_select
from engine.ops.triton_sliding import SlidingAttention
from engine.ops.upload import upload
from engine.recall.digest import Digests
from engine.recall.recall import Recall
from engine.recall.select import REASONS
from engine.scheduler import QUESTION_CHUNK
from engine.step import Frame
from engine.step_graph import StepGraphs

SCORERS = ("fused", "token", "lexical")


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
        sliding: SlidingAttention | None,
    ) -> None:
        """pages: the most that one sequence may have; multiprocessors: of the device; graphs: whether to capture;
        sliding: of the layers that slide, if there are any."""
        self.pool, self.host, self.transfer = pool, host, transfer
        self.compact, self.graphs = compact, StepGraphs(graphs)
        self.steps: Counter[str] = Counter()
        self.tables = LentTables(pool, host.pages, self._tables_came_home)
        self.launches = Launches(
            model,
            pool,
            host,
            digests,
            self.tables.device,
            tokens=QUESTION_CHUNK,
            pages=pages,
            compact=compact,
            multiprocessors=multiprocessors,
            ferried=None if self.in_place else transfer.stats,
            between=self.graphs.between,
            sliding=sliding,
        )
        self._pages = pages
        self._most = triton_select.most_ranks(pool.shape.kv_heads, pages)
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
        return settings.scorer in SCORERS and settings.control is None and settings.budget <= self._most

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
            self.launches.open(frame.fresh)

        def launch() -> Tensor | None:
            return self.launches.step(kind)

        self._last = frame
        try:
            logits, how = self.graphs.run(kind, launch) if kind.captured else (launch(), "eager")
        except BaseException:
            self.launches.state.fetch()  # what it had moved by then is not the next step's
            raise
        finally:
            self.launches.state.launched()
        self.steps[f"{kind.name}, {how}"] += 1
        self._attended = layout
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
        fetched, streamed = self.launches.state.counted()
        if not fetched and not streamed:
            return
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
            self._bring_all(frame)
        self.tables.take()
        self._enter(recall)
        self.launches.ids[: len(frame.ids)].copy_(self._upload(frame.ids.astype(np.int32)))
        if layout.role is not None:
            self.launches.role[: frame.past].copy_(self._upload(layout.role))
            self.launches.fixed[: len(layout.fixed)].copy_(self._upload(layout.fixed.astype(np.int32)))
            if step.mode == "recall" and not layout.left:  # no score will say what is selected
                why = np.where(layout.role == g.TAKEN, g.LEXICAL, g.UNSELECTED).astype(np.uint8)
                self.launches.why[:, : frame.past].copy_(self._upload(why))
        self._laid, self._layout = laid, layout
        return layout

    def _bring_all(self, frame: Frame) -> None:
        self.pool.begin_step()  # what another sequence used in its last step may go now
        pages = frame.ids[: frame.past]
        for layer in range(self.pool.shape.layers):
            missing = self.pool.touch(layer, pages)
            self.transfer.fetch(layer, missing)
            if frame.step.explain:
                frame.step.trace.fetched.update(np.flatnonzero(np.isin(pages, missing)).tolist())

    def _enter(self, recall: Recall) -> None:
        """Go on from what this request selected before, and keep what the other did."""
        if recall is self._recall:
            return
        if self._recall is not None:
            self._recall.kept = self.launches.why.clone()
        if recall.kept is not None:
            self.launches.why.copy_(recall.kept)
        else:
            why = np.zeros(self.launches.why.shape, dtype=np.uint8)
            for layer, pages in recall.selected.items():
                why[layer, pages] = g.KEY
            self.launches.why.copy_(self._upload(why))
        self._recall, recall.kept = recall, None

    def _check_room(self, frame: Frame, layout: Layout, everything: bool) -> None:
        """The window, the own pages and what may not move must fit; where copies to the host are in the way, wait."""
        seen = 0 if everything and not frame.identity else layout.window
        need, pinned = seen + len(frame.own), self.pool.pinned
        if need + np.count_nonzero(pinned) <= self.pool.slots:
            return
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
            self._recall.hold(self.launches.why.cpu().numpy())
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
        self.launches.state.tell(frame.step.tokens, words | frame.tail_words)

    def _upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.pool.data.device)

    # --- explaining -----------------------------------------------------------------------------------------------

    def _explain(self, frame: Frame, layout: Layout, everything: bool) -> None:
        """Read back what was seen, and why: a slow step, for those who asked for it."""
        trace = frame.step.trace
        if everything:
            trace.seen.update(range(frame.past))
            return
        trace.seen.update(self.launches.windows[:, : layout.window].unique().tolist())
        because = dict(zip(layout.taken.pages.tolist(), layout.taken.reasons.tolist(), strict=True))
        logical = {int(page): index for index, page in enumerate(frame.ids)}
        missed, counts = self.launches.misses.pages.cpu().numpy(), self.launches.misses.count[:, 0].tolist()
        why = self.launches.why[:, : frame.past].cpu().numpy()
        if frame.step.mode == "window":  # which leaves what was selected before as it was
            why = np.zeros_like(why)
        for layer in range(len(why)):
            for page in np.flatnonzero(why[layer]).tolist():
                reason = because.get(page, int(why[layer, page]) - 1)
                trace.reasons.setdefault(page, Counter())[REASONS[reason]] += 1
            trace.fetched.update(logical[int(page)] for page in missed[layer, : counts[layer]])
