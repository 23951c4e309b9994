"""A step's kernels, in their order, over buffers that stand: what differs from step to step lies in these.

So a captured graph of one step serves the next. Knows nothing of requests; `engine/driven.py` fills the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE
from engine.ferry import Ferry
from engine.kv.host import HostStore
from engine.kv.pool import DevicePool
from engine.kv.transfer import TransferStats
from engine.model.transformer import Transformer
from engine.ops import geometry as g
from engine.ops import triton_moves, triton_pages, triton_select, triton_slots
from engine.ops.geometry import Turns
from engine.ops.triton_attention import PagedAttention
from engine.ops.triton_layers import TRITON
from engine.ops.triton_score import MANY_UNITS, PageScores
from engine.ops.triton_sliding import SlidingAttention
from engine.ops.upload import upload
from engine.recall.digest import Digests
from engine.recall.recall import QUERY_ROWS
from engine.recall.select import HYSTERESIS, WORTH
from engine.routes import attention_key
from engine.step_graph import Beside
from engine.step_state import StepState


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


class Launches:
    """For steps of at most `tokens` tokens of sequences of at most `pages` pages.

    What the host writes before a step: `state`; `ids` int32 [page], of the whole sequence; `role` uint8 [past];
    `fixed` int32 [slot], logical pages seen whatever scores choose. What kernels leave behind: `windows` int32 [layer,
    slot] and `why` uint8 [layer, past], as in `ops.geometry`; `misses`.
    """

    def __init__(
        self,
        model: Transformer,
        pool: DevicePool,
        host: HostStore,
        digests: Digests,
        tables: triton_slots.Tables,
        *,
        tokens: int,
        pages: int,
        compact: bool,
        multiprocessors: int,
        ferried: TransferStats | None,
        between: Callable[[Callable[[], None]], None],
        sliding: SlidingAttention | None,
    ) -> None:
        """tables: of all layers that page, on the device; sliding: of those that don't. ferried: where to count what
        the host brings, if it may have to; between: given the host's work in the middle of a step."""
        self._model, self._pool, self._host, self._digests, self._tables = model, pool, host, digests, tables
        self._compact, self._between, self._sliding = compact, between, sliding
        device, shape, slots, routes = pool.data.device, pool.shape, pool.slots, pool.routes
        heads, kv_heads, dim, own = model.config.heads, shape.kv_heads, shape.head_dim, tokens // PAGE + 1

        def units(route: str) -> int:
            return multiprocessors * routes.pick(route, slots)

        def ints(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int32, device=device)

        self.state = StepState(device, tokens)
        self.ids, self.fixed = ints(pages + own), ints(slots)
        self.role = torch.zeros(pages, dtype=torch.uint8, device=device)
        self.windows, self.restless = ints(shape.layers, slots), ints(shape.layers, triton_slots.ALIGNED)
        self.why = torch.zeros(shape.layers, pages, dtype=torch.uint8, device=device)
        self.misses = triton_slots.Misses.empty(shape.layers, slots, device)
        self._choice = triton_select.Choice.empty(slots, device)
        self._bars = ints(shape.layers, kv_heads) - 1
        self._turns = Turns.of(model.rope, pages + own)
        self._offsets = model.rope.cos_sin(torch.arange(own * PAGE, device=device))
        self._turned = torch.zeros(tokens, heads, dim, device=device)
        self._attention = PagedAttention(
            heads, kv_heads, dim, tokens, device, units(attention_key(dim, heads // kv_heads))
        )
        self._scores = PageScores(
            QUERY_ROWS, heads, kv_heads, pages, device, units("page_scores"), multiprocessors * MANY_UNITS
        )
        self._gather_units = routes.pick("gather_units", slots)
        self._ferry = ferried and Ferry(pool, host, self.misses, ferried, self._gather_units)
        self._beside = Beside(device)

    def open(self, fresh: tuple[int, ...]) -> None:
        """Give new pages zeroed slots in every layer."""
        self.state.send(0)
        pages = upload(np.asarray(fresh, dtype=np.int32), self._pool.data.device)
        triton_slots.open_pages(pages, self._pool.data, self._tables, self.misses.places, self.state.geometry)

    def step(self, kind: Kind) -> Tensor | None:
        """float32 logits of the rows that were asked for."""
        tokens = self.state.send(kind.rows)
        hidden = self._model.forward(tokens, lambda layer, q, k, v: self._attend(kind, layer, q, k, v), TRITON)
        self.state.fetch()
        if kind.logits == "none":
            return None
        if kind.logits == "last" and kind.rows > 1:
            hidden = hidden.index_select(0, self.state.geometry[g.TOKENS, None] - 1)
        return self._model.logits(hidden)

    def _attend(self, kind: Kind, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self._model.config
        if layer in config.sliding:
            return self._sliding(config.row[layer], q, k, v, self.state.geometry)
        return self._attend_pages(kind, config.row[layer], q, k, v)

    def _attend_pages(self, kind: Kind, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pool, turned, rope = self._pool.data[layer], self._turned[: kind.rows], self._model.rope
        tables, host = self._tables.layer(layer), self._host.data[:, layer]
        page, state, counters = self._pool.shape.form.layout, self.state.geometry, self.state.counters
        triton_pages.append(q, k, v, turned, pool, tables.slot_of, self.ids, state, self._offsets, page)
        window = None if kind.everything else self.windows[layer]
        seen = (
            turned,
            pool,
            host if kind.cold else None,
            tables.slot_of,
            self.ids,
            window,
            state,
            self._turns,
            counters,
            rope.score_scale,
            self._compact,
            page,
        )
        if kind.everything:
            return self._attention(*seen, dtype=q.dtype)
        choice, misses, restless = self._choice, self.misses.layer(layer), self.restless[layer]

        def early() -> None:
            self._attention.attend(*seen, dtype=q.dtype, when="early", doubt=restless)

        with self._beside.running(early) if kind.ahead else nullcontext():
            if kind.scored:
                why, codes = self.why[layer], self._digests.codes_of(layer)
                self._scores(turned, *codes, self.ids, state, self._turns, rope.score_scale)
                triton_select.rank(self._scores, self._bars[layer], why, self.role, choice, state, HYSTERESIS, WORTH)
                triton_select.pick(self._scores, self.role, why, choice, state, kind.neighbors)
            triton_slots.bring(
                self.fixed, choice, restless, window, self.ids, tables, misses, state, counters, self._compact
            )
            if not kind.ferried:
                triton_moves.gather(host, pool, misses.pages, misses.places, misses.count, self._gather_units)
        if kind.ferried:
            self._ferry.fetch(layer, self._between)
        return self._attention(*seen, dtype=q.dtype, redo=choice.redo if kind.ahead else None)
