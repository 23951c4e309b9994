"""Tails: what layers with a sliding window keep of a sequence. It never pages: a window is all they ever read.

A tail lies on the device as long as its sequence is served. So that a later turn can resume, snapshots of it are kept
on the host, each at the end of a page and for as long as that page lives. Snapshots are a cache: one that is gone costs
computing again from an earlier one, never a wrong answer. Nothing resumes where there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE, EngineConfig
from engine.ops import geometry as g

SNAPSHOTS = 16
"""So many are kept, the least recently used go first: eight along a long prompt, and some conversations' ends."""
TAILS = 4
"""Sequences that memory is planned for; the server serves no more at once by default."""
SPACING = 16
"""Windows from one snapshot of a long prompt to the next, at least; an eighth of the context where that is more."""
SLACK = 1024
"""Tokens of room beyond window and chunk, so that decoding moves the window together seldom."""


@dataclass(frozen=True)
class TailShape:
    """Of the sliding layers of one model. `window` in tokens, the token's own included."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype

    @property
    def pages(self) -> int:
        """Closed pages of which the open one's first token sees something."""
        return -(-(self.window - 1) // PAGE)

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def snapshot_bytes(self) -> int:
        return self.pages * PAGE * self.token_bytes

    def room(self, chunk: int) -> int:
        """Tokens of a tail that takes steps of `chunk` tokens."""
        return (self.pages + 1) * PAGE + max(chunk, SLACK)

    def tensor(self, tokens: int, device: torch.device) -> Tensor:
        return torch.empty(self.layers, 2, self.kv_heads, tokens, self.head_dim, dtype=self.dtype, device=device)


class Tail:
    """`data` [layer, k|v, kv_head, token, head_dim]: tokens from `start`, a page's first, on. Keys are rotated.

    Which of them count is the sequence's to say: what a failed step wrote behind its length is written over.
    """

    def __init__(self, shape: TailShape, room: int, device: torch.device) -> None:
        self.shape, self.start = shape, 0
        self.data = shape.tensor(room, device)

    def reserve(self, length: int, end: int) -> None:
        """Make room for tokens [length, end): what they don't see, and no page's end needs any more, may go."""
        first = max(0, length // PAGE - self.shape.pages) * PAGE
        room = self.data.shape[3]
        if end - self.start <= room:
            return
        held = self.data[:, :, :, first - self.start : length - self.start].clone()
        if end - first > room:
            self.data = self.shape.tensor(end - first + SLACK, self.data.device)
        self.data[:, :, :, : length - first] = held
        self.start = first

    def append(self, layer: int, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Write k and v [T, kv_head, head_dim] of tokens from `first` on; keys and values [kv_head, n, head_dim] of
        all that they may see, themselves last. Views."""
        begin, end = first - self.start, first - self.start + len(k)
        keys, values = self.data[layer]
        keys[:, begin:end], values[:, begin:end] = k.transpose(0, 1), v.transpose(0, 1)
        low = max(0, begin - self.shape.window + 1)
        return keys[:, low:end], values[:, low:end]

    def words(self, first: int) -> dict[int, int]:
        """What kernels are told, by its place in `ops.geometry`, of a step that begins with token `first`."""
        address = np.array([self.data.data_ptr()], dtype=np.int64).view(np.int32)
        words = {g.TAIL_ROOM: self.data.shape[3], g.TAIL_AT: first - self.start, g.POSITION: first}
        return words | dict(enumerate(address.tolist(), g.TAIL))

    def part(self, position: int) -> Tensor:
        """What a sequence that ends at `position`, a page's end, goes on from. A view."""
        first = max(0, position - self.shape.pages * PAGE)
        return self.data[:, :, :, first - self.start : position - self.start]

    def load(self, part: Tensor, position: int) -> None:
        """Begin anew with such a part."""
        self.start = position - part.shape[3]
        self.data[:, :, :, : part.shape[3]] = part


def plan_tails(shape: TailShape, config: EngineConfig, trained_context: int) -> dict[str, int]:
    """What `plan_capacity` is told of them, in bytes."""
    if not shape.layers:
        return {"tail_bytes": 0, "snapshot_bytes": 0}
    made = Tails(shape, torch.device("cpu"), config, trained_context)
    return {"tail_bytes": made.planned_bytes, "snapshot_bytes": made.most_bytes}


class Tails:
    """Makes the tails of one engine and keeps their snapshots, by the page that they stand at the end of."""

    def __init__(self, shape: TailShape, device: torch.device, config: EngineConfig, trained_context: int) -> None:
        self.shape, self.device = shape, device
        self.most = SNAPSHOTS if config.reuse else 0
        self.room = shape.room(config.prefill_chunk)
        context = config.max_context or trained_context
        self.spacing = -(-max(SPACING * shape.window, context // 8) // PAGE) * PAGE
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    @property
    def planned_bytes(self) -> int:
        """On the device, of as many tails as memory is planned for."""
        return TAILS * self.room * self.shape.token_bytes

    @property
    def most_bytes(self) -> int:
        """On the host, of all snapshots that may be kept."""
        return self.most * self.shape.snapshot_bytes

    def open(self) -> Tail:
        return Tail(self.shape, self.room, self.device)

    def due(self, marks: Iterable[int], length: int, end: int) -> list[int]:
        """Where in (length, end] a snapshot is to be taken: at the marks, and every so often in a long prompt."""
        regular = range((length // self.spacing + 1) * self.spacing, end + 1, self.spacing)
        return sorted({mark for mark in (*marks, *regular) if length < mark <= end})

    def keep(self, page: int, tail: Tail, position: int) -> None:
        """Take a snapshot at `position`, the end of `page`."""
        if not self.most:
            return
        if page not in self._kept:
            self._kept[page] = tail.part(position).to("cpu", copy=True)
        self._kept.move_to_end(page)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def resumable(self, pages: list[int]) -> int:
        """How many of these first pages of a sequence can be resumed after."""
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self._kept), 0)

    def resume(self, page: int, position: int) -> Tail:
        """A tail as it was at the end of `page`."""
        tail = self.open()
        tail.load(self._kept[page], position)
        self._kept.move_to_end(page)
        return tail

    def hand_over(self, pages: list[int], standing: list[int]) -> None:
        """`standing` hold what `pages`, computed once more, do, and outlive them: so what is kept goes to those."""
        for page, other in zip(pages, standing, strict=True):
            if page != other and page in self._kept:
                self._kept.setdefault(other, self._kept.pop(page))

    def adopt(self, pages: list[int], theirs: Tails, others: list[int]) -> None:
        """Copy what another engine of the same model keeps at the ends of `others`, for the same `pages` here."""
        for page, other in zip(pages, others, strict=True):
            if other in theirs._kept and self.most:
                self._kept[page] = theirs._kept[other].clone()

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._kept.pop(page, None)

    def snapshots(self) -> dict[int, Tensor]:
        return dict(self._kept)

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self._kept.values())

    def close(self) -> None:
        self._kept.clear()
