"""The runner with Triton's kernels: the device drives short steps, large chunks stream, the rest is the host's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine import kernel_cache
from engine.config import PAGE
from engine.driven import DrivenSteps
from engine.kv.host import HostStore
from engine.kv.pool import DevicePool
from engine.model.transformer import Attend
from engine.ops import geometry as g
from engine.ops import triton_moves, triton_pages
from engine.ops.triton_layers import TRITON
from engine.ops.triton_sliding import SlidingAttention
from engine.ops.upload import upload
from engine.recall.select import EMPTY
from engine.recall.window import span
from engine.runner import Runner
from engine.self_check import self_check
from engine.staged import SEGMENT, StagedChunk, Stager
from engine.step import Frame, StepInput

LEAST_CAPABILITY = (8, 0)
STORE_UNITS = 32
"""Programs that write closed pages to the host: enough for PCIe, few beside the step that runs meanwhile."""


class TritonRunner(Runner):
    """Takes over a torch runner's parts. Results agree with it to rounding, and what is seen is the same."""

    def __init__(self, base: Runner) -> None:
        super().__init__(
            base.model,
            base.pool,
            base.host,
            base.digests,
            base.digest_kind,
            base.compact,
            base.logical_pages,
            base.captures,
            base.tails,
        )
        device = self.pool.data.device
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        config, rope = self.model.config, self.model.sliding_rope
        self.sliding = None
        if config.sliding:
            self.sliding = SlidingAttention(rope, config.heads, config.kv_heads, config.window, self.logical_pages)
        self.driven = DrivenSteps(
            self.model,
            self.pool,
            self.host,
            self.digests,
            self.transfer,
            compact=self.compact,
            pages=self.logical_pages,
            multiprocessors=multiprocessors,
            graphs=self.captures,
            sliding=self.sliding,
        )
        self.stager = Stager(self.pool, self.transfer, self.model.rope, self.model.config.heads, self.logical_pages)
        self.steps = self.driven.steps
        self._store_pages = partial(_store_pages, self.pool, self.host)

    def step(self, steps: Sequence[StepInput]) -> list[Tensor | None]:
        self.collect()
        return super().step(steps)

    def collect(self) -> None:
        self.driven.collect()
        self.degraded = self.driven.graphs.failure

    @property
    def graphs(self) -> str:
        if not self.captures:
            return "off"
        return "failed" if self.driven.graphs.failure else "on"

    def _compute(self, frames: list[Frame]) -> list[Tensor | None]:
        if all(self.driven.serves(frame) for frame in frames):
            logits = []
            for frame in frames:
                self.driven.collect()
                part = self.driven.step(frame)
                # the next frame's replay overwrites it
                logits.append(part.clone() if part is not None and len(frames) > 1 else part)
            return logits
        for frame in frames:
            kept = frame.step.recall.kept
            if kept is not None:
                frame.step.recall.hold(kept.cpu().numpy())
        if len(frames) == 1 and self._streams(frames[0]):
            return [self._stream(frames[0])]
        return super()._compute(frames)

    def _streams(self, frame: Frame) -> bool:
        """Whether a chunk sees the same pages in every layer, without looking at scores."""
        step = frame.step
        many = len(step.tokens) > 1 and len(frame.own) <= SEGMENT and not step.observe and not self.compact
        return many and (frame.identity or (step.mode in ("exact", "window") and not self.host.verifies))

    def _stream(self, frame: Frame) -> Tensor | None:
        frame.begin()
        step, pool = frame.step, self.pool
        window = np.arange(frame.past)
        if step.mode == "window" and not frame.identity:
            window = span(frame.past, len(frame.own), step.budget, 0).window(EMPTY.pages)
        pool.begin_step()
        for layer in range(pool.shape.layers):
            if frame.identity or step.mode == "window":
                pool.touch(layer, frame.ids[window])
            if frame.fresh:
                slots = self.transfer.place(layer, np.asarray(frame.fresh))
                pool.data[layer].index_fill_(0, self.stager.upload(slots), 0)
        chunk = StagedChunk(self.stager, frame.past, frame.ids, window, frame.first_row, len(step.tokens))
        tokens = self.stager.upload(np.asarray(step.tokens))
        hidden = self.model.forward(tokens, self._over(chunk, frame), TRITON)
        self.steps["streamed"] += 1
        step.trace.hidden_pages = frame.past - len(window)
        step.trace.over_pool |= not frame.identity
        if step.explain:
            step.trace.seen.update(window.tolist())
        size = chunk.streamed * pool.shape.layer_page_bytes
        for stats in (self.transfer.stats, step.trace.moved):
            stats.layer_pages_streamed += chunk.streamed
            stats.bytes_fetched += size
        rows = {"none": hidden[:0], "last": hidden[-1:], "all": hidden}[step.logits]
        return self.model.logits(rows) if len(rows) else None

    def _over(self, chunk: StagedChunk, frame: Frame) -> Attend:
        """Its layers, each over what its kind sees."""
        rows, sliding = self.model.config.row, self.model.config.sliding
        words = g.vector({**frame.tail_words, g.TOKENS: len(frame.step.tokens)})
        geometry = upload(words, self.pool.data.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer in sliding:
                return self.sliding(rows[layer], q, k, v, geometry)
            return chunk.attend(rows[layer], q, k, v)

        return attend

    def _close(self, frame: Frame) -> None:
        closed = frame.own[: frame.end // PAGE - frame.past]
        if not len(closed):
            return
        slots = self.driven.tables.slots_of(closed)
        if self.digest_kind == "token" and self.digests.packed:
            codes, groups = self.digests.codes(), self.digests.groups
            layout = self.pool.shape.form.layout
            triton_pages.close_pages(self.pool.data, slots, self.stager.upload(closed), *codes, groups, layout)
            self.digests.made("token", closed)
        elif self.digest_kind is not None:
            self.digests.ensure(self.digest_kind, closed, self.pool.read)
        self.transfer.store_kernel = self._store_pages if self.driven.in_place else None  # pinning goes on meanwhile
        self.transfer.write_through(closed.tolist(), slots)

    def _undo(self, frame: Frame) -> None:
        super()._undo(frame)
        self.pool.void()


def _store_pages(pool: DevicePool, host: HostStore, slots: Tensor, pages: np.ndarray) -> None:
    """`Transfer.store_kernel`. No method of the runner's, which would hold itself through it."""
    ids = upload(np.asarray(pages, dtype=np.int64), pool.data.device)
    triton_moves.store_pages(pool.data, host.data, slots, ids, STORE_UNITS)


class TritonCandidate:
    """Triton's kernels for `choose_backend`."""

    def __init__(self, base: Runner, capability: tuple[int, int]) -> None:
        self.base = base
        self.name = f"triton-sm{capability[0]}{capability[1]}"

    def build(self) -> TritonRunner:
        return TritonRunner(self.base)

    def disagreement(self, built: TritonRunner) -> str:
        try:
            return self_check(self.base.model, built.pool.shape)
        except Exception:
            if not kernel_cache.discard():
                raise
            return self_check(self.base.model, built.pool.shape)  # with kernels that are compiled anew


def triton_candidate(base: Runner) -> TritonCandidate | None:
    """None where the device has no compute capability of 8.0 or newer, which the kernels need."""
    device = base.pool.data.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    return TritonCandidate(base, torch.cuda.get_device_capability(device))
