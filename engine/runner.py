"""The only place where model, kv and recall meet: one step of one sequence, or of several together.

A step reserves pages, runs the model, and publishes: tokens count, pages close and are copied to the host only when
everything has worked. Whatever stops it half-way, the sequence and the tables are as they were before (invariant 7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.kv.host import HostStore
from engine.kv.page import page_count
from engine.kv.pool import DevicePool
from engine.kv.tail import Tails
from engine.kv.transfer import Transfer
from engine.model.transformer import Transformer
from engine.ops.attention import SEGMENT, PartialAttention, takes_few
from engine.ops.rope import rotate
from engine.ops.sliding import attend_window
from engine.recall.digest import Digests
from engine.recall.select import EMPTY, REASONS
from engine.recall.window import fits, span
from engine.step import Frame, StepInput


class Runner:
    """Joins one model to one pool and one host store."""

    def __init__(
        self,
        model: Transformer,
        pool: DevicePool,
        host: HostStore,
        digests: Digests,
        digest_kind: str | None,
        compact: bool,
        logical_pages: int,
        graphs: bool = True,
        tails: Tails | None = None,
    ) -> None:
        """`logical_pages`: the most that one sequence may have; graphs: whether one that captures steps should;
        tails: of the layers that slide, if there are any."""
        self.model, self.pool, self.host, self.digests = model, pool, host, digests
        self.transfer = Transfer(pool, host)
        self.digest_kind = digest_kind  # made when a page closes; None = only when a scorer asks
        self.compact = compact
        self.logical_pages = logical_pages
        self.captures = graphs
        self.tails = tails
        self.steps: Counter[str] = Counter()  # by who drove them
        self.degraded = ""  # why steps take a slower way than was meant

    @torch.inference_mode()
    def step(self, steps: Sequence[StepInput]) -> list[Tensor | None]:
        """Compute each step's tokens in one forward pass and append them; float32 logits [rows, vocab] of each.

        All or nothing: whatever is raised, no sequence has changed.
        """
        self.transfer.settle()
        frames: list[Frame] = []
        try:
            for step in steps:
                frames.append(self._frame(step))
            logits = self._compute(frames)
            for frame in frames:
                self._close(frame)
        except BaseException:
            for frame in frames:
                self._undo(frame)
            raise
        for frame in frames:
            frame.publish()
            if self.tails is not None:
                self._keep_tail(frame.step.sequence, frame.end - len(frame.step.tokens))
        return logits

    def _keep_tail(self, sequence: Sequence, length: int) -> None:
        """Take the snapshots that are due since the sequence had `length` tokens."""
        for position in self.tails.due(sequence.marks, length, sequence.length):
            self.tails.keep(sequence.pages[position // PAGE - 1], sequence.tail, position)

    def keep_end(self, sequence: Sequence) -> None:
        """Let a later turn resume where this sequence's closed pages end."""
        if self.tails is not None and sequence.closed:
            self.tails.keep(sequence.pages[sequence.closed - 1], sequence.tail, sequence.closed * PAGE)

    def resume_tail(self, sequence: Sequence) -> None:
        """Begin where the sequence's pages end."""
        if self.tails is not None:
            sequence.tail = self.tails.resume(sequence.pages[-1], sequence.length) if sequence.pages else None

    def resumable(self, pages: list[int]) -> int:
        """How many of these first pages of a sequence it can begin after: all of them, but for layers that slide."""
        return len(pages) if self.tails is None else self.tails.resumable(pages)

    def _compute(self, frames: list[Frame]) -> list[Tensor | None]:
        """The forward pass of all frames together; their logits."""
        for frame in frames:
            frame.begin()
        self.steps["host-driven"] += len(frames)
        tokens = torch.tensor([token for frame in frames for token in frame.step.tokens], device=self.model.device)
        hidden = self.model.forward(tokens, lambda layer, q, k, v: self._attend_each(frames, layer, q, k, v))
        return self._logits(frames, hidden)

    def collect(self) -> None:
        """Bring the counters up to date with what the device has done; the host's own always are."""

    @property
    def graphs(self) -> str:
        """Whether steps of one token are CUDA graphs: on | off | failed; none where the host drives every step."""
        return "none"

    def _frame(self, step: StepInput) -> Frame:
        """Reserve the step's pages and lay out its geometry."""
        sequence = step.sequence
        past, end = sequence.closed, sequence.length + len(step.tokens)
        if self.tails is not None:
            sequence.tail = sequence.tail or self.tails.open()
            sequence.tail.reserve(sequence.length, end)
        fresh = self.host.allocate(page_count(end) - len(sequence.pages))
        self.pool.pinned[fresh] = True
        return Frame(
            step=step,
            past=past,
            end=end,
            fresh=tuple(fresh),
            first_row=sequence.length - past * PAGE,
            identity=fits(past, len(sequence.pages) + len(fresh) - past, step.budget.pool),
            rope=self.model.rope,
            sliding_rope=self.model.sliding_rope,
        )

    def _logits(self, frames: list[Frame], hidden: Tensor) -> list[Tensor | None]:
        """hidden [all tokens, hidden]; the rows that were asked for go through the head together."""
        rows = []
        for frame, part in zip(frames, hidden.split([len(frame.step.tokens) for frame in frames]), strict=True):
            rows.append({"none": part[:0], "last": part[-1:], "all": part}[frame.step.logits])
        if not any(map(len, rows)):
            return [None] * len(frames)
        split = self.model.logits(torch.cat(rows)).split([len(part) for part in rows])
        return [part if len(part) else None for part in split]

    def _attend_each(self, frames: list[Frame], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(frames) == 1:
            return self._counted(frames[0], layer, q, k, v)
        sizes = [len(frame.step.tokens) for frame in frames]
        parts = zip(frames, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self._counted(frame, layer, *qkv) for frame, *qkv in parts])

    def _counted(self, frame: Frame, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row = self.model.config.row[layer]
        if layer in self.model.config.sliding:
            return self._slide(frame, row, q, k, v)
        before = copy(self.transfer.stats)
        hidden = self._attend(frame, row, q, k, v)
        frame.step.trace.moved.add(self.transfer.stats, before)
        return hidden

    def _close(self, frame: Frame) -> None:
        """Digest the pages that this step filled and start their copy to the host."""
        closed = frame.own[: frame.end // PAGE - frame.past]
        if len(closed):
            if self.digest_kind is not None:
                self.digests.ensure(self.digest_kind, closed, self.pool.read)
            self.transfer.write_through(closed.tolist())

    def _undo(self, frame: Frame) -> None:
        """The step did not happen: its pages are free again and the open page is open, pinned and without a replica."""
        self.transfer.settle(wait=True)
        opened = frame.step.sequence.pages[frame.past :]
        self.digests.forget(opened)
        self.host.replica[opened] = False
        self.pool.pinned[opened] = True
        self.release(list(frame.fresh))

    def release(self, pages: list[int]) -> None:
        """Let go of one reference to each page; pages that nobody holds leave every table."""
        if self.transfer.in_flight:
            self.transfer.settle(wait=True)
        freed = self.host.release(pages)
        self.pool.drop(freed)
        self.digests.forget(freed)
        if self.tails is not None:
            self.tails.forget(freed)

    def _attend(self, frame: Frame, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the chunk's keys and values, bring the window in, and attend. Shapes as in `Attend`."""
        self.pool.begin_step()  # what another sequence used in this layer may go now
        self._store(frame, layer, k, v)
        rope, decode = self.model.rope, self.host.shape.decode
        turned = rotate(q, *frame.turns)
        partial = PartialAttention(rope, turned, self.host.shape.kv_heads)
        if frame.step.mode == "exact" and not frame.identity:
            window = np.arange(frame.past)
            stored = self.transfer.stage
        else:
            window = self._window(frame, layer, q, turned)
            missing = self.pool.touch(layer, frame.ids[window])
            self.transfer.fetch(layer, missing)
            stored = self.pool.read
            if frame.step.explain:
                self._explain(frame, window, missing)
        # A page's base, counted back from the chunk's first page: its true distance, or its place in the packed window.
        distance = np.arange(len(window), 0, -1) if self.compact else frame.past - window
        own = np.arange(frame.past, len(frame.ids))
        # A few rows take the last segment and the own pages in one go; many rows need the own ones apart, for the mask.
        split = (len(window) - 1) // SEGMENT * SEGMENT if takes_few(turned) and len(window) else len(window)
        for start in range(0, split, SEGMENT):
            part = slice(start, min(start + SEGMENT, split))
            segment = decode(stored(layer, frame.ids[window[part]]))
            partial.add(segment, distance[part])
            if frame.step.observe:
                frame.step.recall.observe(layer, turned, segment, distance[part])
        rest = len(window) - split
        segment = decode(stored(layer, frame.ids[np.concatenate([window[split:], own])]))
        partial.add(segment, np.concatenate([distance[split:], frame.past - own]), rest * PAGE + frame.first_row)
        if frame.step.observe:
            if rest:
                frame.step.recall.observe(layer, turned, segment[:rest], distance[split:])
            frame.step.recall.fix(layer)
        hidden = frame.past - len(window)
        frame.step.trace.hidden_pages = max(frame.step.trace.hidden_pages, hidden)
        frame.step.trace.over_pool |= not frame.identity
        return partial.result()

    def _slide(self, frame: Frame, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A layer that sees its window only, whatever the mode and the pool. Shapes as in `Attend`."""
        sequence, turns = frame.step.sequence, frame.sliding_turns
        keys, values = sequence.tail.append(row, rotate(k, *turns), v, sequence.length)
        window, scale = self.model.config.window, self.model.sliding_rope.score_scale
        return attend_window(rotate(q, *turns), keys, values, window, scale)

    def _store(self, frame: Frame, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the chunk's keys, rotated by their offset in the page, and values into the own pages' slots."""
        data = self.pool.data[layer]
        if len(frame.fresh):
            slots = self.transfer.place(layer, np.asarray(frame.fresh))
            data[torch.from_numpy(slots).to(data.device)] = 0  # 0 x a stale NaN would be NaN
        keys = rotate(k, *frame.offset_turns)
        form = self.host.shape.form
        if len(k) == 1:  # a decode step: plain copies, where an indexed write costs ten times as much
            form.write(data, int(self.pool.slot_of[layer, frame.own[0]]), frame.first_row, keys, v)
            return
        where = torch.from_numpy(self.pool.slot_of[layer][frame.own]).to(data.device)[frame.rows // PAGE]
        form.write(data, where, frame.rows % PAGE, keys, v)

    def _window(self, frame: Frame, layer: int, q: Tensor, turned: Tensor) -> np.ndarray:
        """Logical past pages that this layer sees, ascending."""
        if frame.identity:
            return np.arange(frame.past)
        step, own = frame.step, len(frame.own)
        if step.mode == "window":
            return span(frame.past, own, step.budget, 0).window(EMPTY.pages)
        budget = min(step.recall.settings.budget, step.budget.pool - step.budget.free - step.budget.always - own - 1)
        always = span(frame.past, own, step.budget, budget)
        farthest = step.budget.pool - own if self.compact else None
        chosen = step.recall.select(layer, q, turned, frame.ids[: frame.past], always, budget, farthest)
        if step.explain:
            for page, reason in zip(chosen.pages.tolist(), chosen.reasons.tolist(), strict=True):
                step.trace.reasons.setdefault(page, Counter())[REASONS[reason]] += 1
        return always.window(chosen.pages)

    @staticmethod
    def _explain(frame: Frame, window: np.ndarray, missing: np.ndarray) -> None:
        frame.step.trace.seen.update(window.tolist())
        gone = set(missing.tolist())
        frame.step.trace.fetched.update(page for page in window.tolist() if int(frame.ids[page]) in gone)
