"""How long prefill, decode and a second turn would take, from rates that were measured on stand-ins. Pure arithmetic.

A rate is measured at a few sizes of one layer's work and kept as bands [[work, work a second], ...]; between two sizes
the *time* is interpolated, so that a call's fixed cost counts where the work is small.

    layer/DTYPE         FLOP of one layer's matrices over a chunk of many rows
    attend/DTYPE        FLOP of attention, 4 x heads x head dim x rows x keys, of an exact pass over the pages
    row/FORM            bytes of one layer's weights read for one row (FORM: a dtype, or int4)
    head/DTYPE          bytes of the output matrix, for one row
    attend_row/DTYPE    bytes of K and V in the window that one row reads
    score_row/DTYPE     keys x heads x head dim that one row is scored against
    h2d_pinned          bytes to the card
    turn/DTYPE          the same for a short chunk that resumes a long context: scoring and fetching

On a card further ones, where weights may be packed and a step costs something beside its layers:

    step/DTYPE          by tokens of the context: steps a second of a model without layers, and of no more beyond them
    turn_start/DTYPE    the same for a second turn
    turn_layer/DTYPE    FLOP of one layer's matrices in a second turn over cold pages, with all it does there but fetch
    turn_fetch/DTYPE    bytes of `new_pages` of one layer, in the time that fetching those took that really were new;
                        where it is known, scoring goes at the rate of attention and there is no turn/DTYPE
    product/TYPE        bytes of weights of that type (a dtype, or a GGUF type) in one row's products
    unpack/TYPE         bytes of weights of that type that many rows make plain ones of first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from engine.config import PAGE
from engine.errors import ConfigError
from engine.model.packing import FOUR_BIT
from engine.model.sizes import Weighed
from engine.recall.recall import QUERY_ROWS
from engine.routes import Bands

QUESTION = 64
"""Tokens of the second turn that is predicted."""


@dataclass(frozen=True)
class Work(Weighed):
    """What a model asks of a machine. `form`: how one row reads the weights; `kv_bytes`: of one element of K or V."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    form: str
    weight_bytes: float  # of one weight as one row reads it
    head_bytes: float  # of one number of the output matrix
    kv_bytes: int
    scored: float = 1.0  # share of the KV heads that recall looks at
    sliding_layers: int = 0  # that that see `window` tokens only
    window: int = 0
    packed: tuple[tuple[str, float], ...] = ()  # types of a layer's weights on a card and their bytes; () = plain
    packed_head: str = ""  # the output matrix's type

    @classmethod
    def of(cls, sizes: Any, dtype: torch.dtype, *, four_bit: bool) -> Work:
        """`sizes` has the fields of the same names; `four_bit`: one row reads 4-bit codes with their scales."""
        name, width = str(dtype).removeprefix("torch."), dtype.itemsize
        return cls(
            layers=sizes.layers,
            hidden=sizes.hidden,
            ffn=sizes.ffn,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab=sizes.vocab,
            dtype=name,
            form="int4" if four_bit else name,
            weight_bytes=FOUR_BIT / 8 if four_bit else width,
            head_bytes=width,
            kv_bytes=width,
            sliding_layers=sizes.sliding_layers,
            window=sizes.window,
        )

    def layer_flops(self, rows: int) -> float:
        return 2.0 * rows * self.layer_weights

    def attend_flops(self, rows: int, keys: float) -> float:
        return 4.0 * self.heads * self.head_dim * rows * keys

    @property
    def head_size(self) -> float:
        """Bytes of the output matrix."""
        return self.head_weights * self.head_bytes

    @property
    def row_bytes(self) -> float:
        return self.layer_weights * self.weight_bytes

    def window_bytes(self, tokens: float) -> float:
        return 2.0 * tokens * self.kv_heads * self.head_dim * self.kv_bytes

    def code_bytes(self, tokens: float) -> float:
        """Of the 4-bit key codes that a row reads in one layer, and their scales."""
        return self.scored * tokens * self.kv_heads * (self.head_dim / 2 + 4)

    def scores(self, tokens: int) -> float:
        return self.scored * tokens * self.heads * self.head_dim


@dataclass(frozen=True)
class Prediction:
    """Seconds of the whole prompt and of a second turn's first token; tokens a second of decode."""

    prefill_seconds: float
    prefill_rate: float
    decode_rate: float
    second_turn_seconds: float


def new_pages(selection: int, pool: int, context: int) -> float:
    """Tokens that the selection of a second turn lacks in the pool, if it chose anywhere in `context`.

    The pool holds the selection of the turn before; what both turns chose is there. All are tokens, whole pages.
    """
    return selection * (context - pool) / (context - selection) if context > pool else 0.0


def predict(
    work: Work, rates: Mapping[str, Bands], *, context: int, pool: int, window: int, selection: int, chunk: int
) -> Prediction:
    """`context`: prompt tokens; `pool`, `window`, `selection`: tokens that the device holds, that a step sees of them,
    and that recall may choose of those (0: it is off).

    ConfigError where the rates lack what this model needs.
    """
    dtype, layers, sliding = work.dtype, work.layers, work.sliding_layers
    paged = layers - sliding

    def time(kind: str, amount: float) -> float:
        bands = rates.get(kind)
        if not bands:
            raise ConfigError(f"the profile has no rate '{kind}'", "kvring calibrate measures it on this machine")
        return seconds(bands, amount)

    def products(rows: int, kind: str = "layer") -> float:
        """Of one layer's matrices over a chunk."""
        unpacked = sum(time(f"unpack/{kind}", size) for kind, size in work.packed if kind != dtype)
        return time(f"{kind}/{dtype}", work.layer_flops(rows)) + unpacked

    def where_measured(kind: str, amount: float) -> float:
        return time(f"{kind}/{dtype}", amount) if f"{kind}/{dtype}" in rates else 0.0

    def scoring() -> float:
        """Of one row; on a card beyond the longest context that was measured by the bytes that it reads."""
        amount, bands = work.scores(context), rates.get(f"score_row/{dtype}")
        if not bands or amount <= bands[-1][0] or not on_card:
            return time(f"score_row/{dtype}", amount)
        beyond = work.code_bytes(context) * (1 - bands[-1][0] / amount)
        return time(f"score_row/{dtype}", bands[-1][0]) + time(f"attend_row/{dtype}", beyond)

    on_card = f"step/{dtype}" in rates
    beside = time(f"step/{dtype}", min(context, rates[f"step/{dtype}"][-1][0])) if on_card else 0.0
    prefill = 0.0
    for start in range(0, context, chunk):
        rows = min(chunk, context - start)
        prefill += layers * products(rows)
        attend = time(f"attend/{dtype}", work.attend_flops(rows, start + rows / 2))
        if start > pool and "h2d_pinned" in rates:  # cold pages stream by, at best as fast as the link
            attend = max(attend, time("h2d_pinned", work.window_bytes(start)))
        near = work.attend_flops(rows, min(work.window, start + rows / 2))
        prefill += paged * attend + (sliding * time(f"attend/{dtype}", near) if sliding else 0.0)
    over = context > pool
    head = time(f"product/{work.packed_head}" if work.packed_head else f"head/{dtype}", work.head_size)
    row = time(f"row/{work.form}", work.row_bytes)
    if work.packed:  # what a plain layer takes beside its products, and these
        row -= min(row, time(f"product/{work.form}", work.row_bytes))
        row += sum(time(f"product/{kind}", size) for kind, size in work.packed)
    seen = time(f"attend_row/{dtype}", work.window_bytes(window if over else context))
    recalls = over and selection > 0
    if recalls:
        seen += scoring()
    near = time(f"attend_row/{dtype}", work.window_bytes(min(work.window, context))) if sliding else 0.0
    step = layers * row + paged * seen + sliding * near + head + beside
    rows = QUESTION + PAGE // 2  # a prefix resumes in whole pages
    whole = recalls and f"turn_layer/{dtype}" in rates
    turn = layers * products(rows, "turn_layer" if whole else "layer") + head + where_measured("turn_start", context)
    turn += paged * time(f"attend/{dtype}", work.attend_flops(rows, window if over else context))
    if sliding:
        turn += sliding * time(f"attend/{dtype}", work.attend_flops(rows, min(work.window, context)))
    if recalls:
        if f"turn_fetch/{dtype}" in rates:
            turn += paged * time(f"turn_fetch/{dtype}", work.window_bytes(new_pages(selection, pool, context)))
            turn += paged * time(f"attend/{dtype}", work.attend_flops(QUERY_ROWS, context) / 2)
        else:
            turn += paged * time(f"turn/{dtype}", work.scores(context))
    return Prediction(prefill, context / prefill, 1 / step, turn)


def seconds(bands: Bands, amount: float) -> float:
    """Time for `amount` of work: between the measured sizes by a straight line, outside along the nearest one.

    Below the smallest size it is at least the smallest's rate, and more where the line says that calls cost something
    however little they do.
    """
    points = [(float(work), work / rate) for work, rate in bands]
    first, last = points[0], points[-1]
    if amount <= first[0] or len(points) == 1:
        alone = first[1] * amount / first[0]
        if len(points) == 1:
            return alone
        slope = max(0.0, (points[1][1] - first[1]) / (points[1][0] - first[0]))
        return max(alone, first[1] - slope * (first[0] - amount))
    for (left, before), (right, after) in pairwise(points):
        if amount <= right:
            return before + (after - before) * (amount - left) / (right - left)
    left, before = points[-2]
    slope = (last[1] - before) / (last[0] - left)
    return last[1] + max(slope, 0.0) * (amount - last[0])
