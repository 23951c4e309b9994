"""The same of a processor: in rounds, because its speed wavers.

A core that others share is half as fast for seconds at a time, and then fast again. So no figure is taken in one go:
each round takes a little of every context of every stand-in, and what was quickest counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.config import PAGE
from engine.model.load import LoadedModel
from engine.trials import quick
from kvring_cli.calibration.samples import EXACT, FEW, Lengths, Run, Sample, after, head_seconds, line, opened, timed
from kvring_cli.filler import filler
from kvring_cli.predict import QUESTION

ROUNDS = 4


def samples_in_rounds(models: Sequence[LoadedModel], lengths: Lengths) -> list[Sample]:
    """As `samples.sample`, of each."""
    series = []
    try:
        for model in models:
            series.append(_Series(model, lengths))
        for number in range(ROUNDS):
            for one in series:
                one.take(number)
        return [one.sample() for one in series]
    finally:
        for one in series:
            one.close()


class _Series:
    """Of one stand-in, by two engines: one holds its contexts in the pool, the other's are longer than its pool."""

    def __init__(self, model: LoadedModel, lengths: Lengths) -> None:
        self._model, self._lengths = model, lengths
        self._whole, self._ring = (opened(model, lengths, pool) for pool in (lengths.dense + 1024, lengths.pool))
        self._chunks, self._steps, self._firsts = (defaultdict[float, list[float]](list) for _ in range(3))
        self._heads: list[float] = []
        self._computed = 0
        timed(self._ring, filler(lengths.long), 1, EXACT)

    def take(self, number: int) -> None:
        """A round: a fresh prefill, and two turns over each context, of which the first brings its pages back."""
        lengths = self._lengths
        self._whole.forget()
        for middle, seconds in timed(self._whole, filler(lengths.dense), 1, EXACT).chunks:
            self._chunks[middle].append(seconds)
        self._heads.append(head_seconds(self._model.transformer.weights.head))
        for tokens in lengths.contexts:
            before, turn = (self._turn(tokens, 2 * number + again) for again in (0, 1))
            self._steps[tokens] += (*before.steps, *turn.steps)
            self._firsts[tokens].append(turn.first)
            self._computed = turn.computed

    def _turn(self, tokens: int, number: int) -> Run:
        engine = self._whole if tokens in (FEW, self._lengths.dense) else self._ring
        return timed(engine, f"{after(tokens)} {filler(QUESTION, after=number + 1)}", self._lengths.answer)

    def sample(self) -> Sample:
        head = min(self._heads)
        slope, chunk = line([(middle, min(seconds)) for middle, seconds in self._chunks.items()])
        return Sample(
            self._model.config.layers,
            {tokens: quick(seconds, 10) - head for tokens, seconds in self._steps.items()},
            {tokens: min(seconds) - head for tokens, seconds in self._firsts.items()},
            chunk,
            slope,
            self._computed,
            dict.fromkeys(self._firsts, 0),
            self._ring.capacity.window.selection * PAGE,
            head,
        )

    def close(self) -> None:
        self._whole.close()
        self._ring.close()
