"""An engine over a stand-in, timed: chunks, steps and further turns by the length of the context. Of a card here; a
processor's are taken in `rounds`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import torch
from torch import Tensor

from engine.config import PAGE, EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.model.load import LoadedModel
from engine.ops.linear import linear
from engine.result import Progress, Result, Token
from engine.trials import median_seconds, own_clock, quick
from kvring_cli.filler import filler
from kvring_cli.predict import QUESTION

LEAST = 1e-9  # seconds: a difference of two measurements may come out at nothing


@dataclass(frozen=True)
class Lengths:
    """Tokens: of the longest context within a pool, of the two over the pool, the pool, a chunk, and the answers."""

    dense: int = 4608
    short: int = 3072
    long: int = 9216
    pool: int = 2048
    chunk: int = 512
    answer: int = 12

    @property
    def contexts(self) -> tuple[int, int, int, int]:
        return FEW, self.dense, self.short, self.long


LENGTHS = {
    "cpu": Lengths(),
    "cuda": Lengths(dense=17_408, short=20_480, long=40_960, pool=17_920, chunk=4096, answer=48),
}
"""On a card few chunk lengths, because cuDNN plans each anew, and the pool that is its default. A context of 131,072
tokens would take half a minute more on an H200: predictions go there by bytes.
"""
FEW = 128
"""Tokens of the shortest context."""
EXACT = RecallParams(prefill="exact")


@dataclass(frozen=True)
class Run:
    """Seconds of one request: of each whole chunk by the tokens before its middle, of each later token."""

    chunks: tuple[tuple[float, float], ...]
    steps: tuple[float, ...]
    first: float
    computed: int
    fetched: int  # layer pages

    @property
    def token(self) -> float:
        return quick(self.steps) if self.steps else 0.0

    def quicker(self, again: Run) -> Run:
        """With the tokens of the quicker of two: they lie apart, so a burst of others' work disturbs one."""
        return replace(self, steps=min(self, again, key=lambda run: run.token).steps)


@dataclass(frozen=True)
class Sample:
    """Seconds of a stand-in by context length: a later token and a second turn's first one, without output matrix and,
    on a card, fetching; of a chunk, and what it takes more for each token before it. All grow with the layers.
    """

    layers: int
    token: Mapping[int, float]
    first: Mapping[int, float]
    chunk: float
    slope: float
    computed: int  # tokens of a second turn
    fetched: Mapping[int, int]  # layer pages of a second turn
    selection: int  # tokens that recall may choose
    head: float  # seconds of the output matrix, once a step

    def less(self, other: Sample) -> Sample:
        """What it takes for the layers that it has more."""

        def without(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
            return {tokens: ours[tokens] - theirs[tokens] for tokens in ours}

        return Sample(
            self.layers - other.layers,
            without(self.token, other.token),
            without(self.first, other.first),
            self.chunk - other.chunk,
            self.slope - other.slope,
            self.computed,
            {tokens: self.fetched[tokens] - other.fetched[tokens] for tokens in self.fetched},
            self.selection,
            self.head,
        )


def sample(model: LoadedModel, lengths: Lengths, page: float = 0.0) -> Sample:
    """page: seconds in which a layer's page is fetched."""
    engine = opened(model, lengths, lengths.pool)
    runs, turns = {}, {}
    try:
        engine.unpinned(wait=True)
        _run(engine, 300, 4)  # whatever is made on first use
        head = head_seconds(model.transformer.weights.head)
        for tokens in lengths.contexts:
            runs[tokens] = _run(engine, tokens, lengths.answer)
            turns[tokens] = _turn(engine, tokens)
            runs[tokens] = runs[tokens].quicker(_again(engine, tokens, lengths.answer))
    finally:
        engine.close()
    slope, chunk = line([*runs[lengths.long].chunks, *runs[lengths.short].chunks])
    return Sample(
        model.config.layers,
        {tokens: run.token - head for tokens, run in runs.items()},
        {tokens: turn.first - head - page * turn.fetched for tokens, turn in turns.items()},
        chunk,
        slope,
        turns[FEW].computed,
        {tokens: turn.fetched for tokens, turn in turns.items()},
        engine.capacity.window.selection * PAGE,
        head,
    )


def opened(model: LoadedModel, lengths: Lengths, pool: int) -> Engine:
    """An engine over the model with a pool of so many tokens."""
    context, chunk = max(lengths.contexts) + 1024, lengths.chunk
    return Engine(
        EngineConfig(
            model="", max_context=context, kv_capacity=min(pool, context), prefill_chunk=chunk, device_profile="off"
        ),
        model,
    )


def _run(engine: Engine, tokens: int, answer: int) -> Run:
    """A fresh exact prefill and an answer of so many tokens, which is asked for again: the first one fetches its
    selection while it is written, and captures graphs.
    """
    engine.forget()
    return replace(timed(engine, filler(tokens), answer, EXACT), steps=_again(engine, tokens, answer).steps)


def _again(engine: Engine, tokens: int, answer: int) -> Run:
    return timed(engine, filler(tokens), answer)


def _turn(engine: Engine, tokens: int, rounds: int = 5) -> Run:
    """The median of some further turns over the context that `_run` left behind.

    Over the pool each goes on from the one before, and fetches what a conversation does; within it all are of one
    length, which cuDNN plans once.
    """
    text, asked, spare = after(tokens), [], 2
    for n in range(rounds + spare):
        asked.append(f"{text} {filler(QUESTION, after=n + 1)}")
        text = asked[-1] if tokens > engine.capacity.pool_pages * PAGE else text
    return sorted([timed(engine, text, 1) for text in asked][spare:], key=lambda run: run.first)[rounds // 2]


def after(tokens: int) -> str:
    """What a further turn goes on from: half a page of it is computed anew, as in turns that begin anywhere."""
    return filler(tokens + PAGE // 2)


def timed(engine: Engine, text: str, answer: int, recall: RecallParams | None = None) -> Run:
    """A request for so many tokens."""
    chunks, tokens, result = [], [], None
    clock, done = own_clock(engine.model.transformer.device), 0
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    prepared = engine.prepare(text, sampling, recall or RecallParams())
    began = before = clock()
    for event in engine.generate(prepared):
        now = clock()
        if isinstance(event, Progress):
            rows = event.done - done
            if rows == engine.config.prefill_chunk and not tokens:
                chunks.append(((event.done + done) / 2, now - before))
            done, before = event.done, now
        elif isinstance(event, Token):
            tokens.append(now)
        elif isinstance(event, Result):
            result = event
    assert result is not None
    steps = tuple(later - earlier for earlier, later in pairwise(tokens))
    return Run(tuple(chunks), steps, tokens[0] - began, result.usage.computed, result.recall.layer_pages_fetched)


def head_seconds(head: Tensor) -> float:
    """Seconds of an output matrix [vocab, hidden] over one row."""
    row = torch.zeros(1, head.shape[1], device=head.device, dtype=head.dtype)
    return median_seconds(lambda: linear(row, head).float(), head.device, 21)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept: the median of all pairs' slopes, so that one interrupted chunk doesn't tilt it."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    slope = max(LEAST, statistics.median(slopes))
    return slope, max(LEAST, quick([seconds - slope * keys for keys, seconds in points]))
