"""The same of a processor: in rounds, because its speed wavers.

A core that others share is half as fast for seconds at a time, and then fast again. So no figure is taken in one go:
each round takes a little of every context, and the end of the quicker quarter of all rounds counts.
"""

from __future__ import annotations

from collections import defaultdict

from engine.config import PAGE
from engine.engine import Engine
from engine.model.load import LoadedModel
from engine.trials import quick
from kvring_cli.calibration.samples import EXACT, FEW, Lengths, Run, Sample, after, head_seconds, line, opened, timed
from kvring_cli.filler import filler
from kvring_cli.predict import QUESTION

ROUNDS = 3


def sample_in_rounds(model: LoadedModel, lengths: Lengths) -> Sample:
    """As `samples.sample`, by two engines: one holds its contexts in the pool, the other's are longer than its pool."""
    whole, ring = (opened(model, lengths, pool) for pool in (lengths.dense + 1024, lengths.pool))
    contexts = {FEW: whole, lengths.dense: whole, lengths.short: ring, lengths.long: ring}
    chunks, steps, firsts, heads = defaultdict(list), defaultdict(list), defaultdict(list), []
    try:
        timed(ring, filler(lengths.long), 1, EXACT)
        for number in range(ROUNDS):
            whole.forget()
            for middle, seconds in timed(whole, filler(lengths.dense), 1, EXACT).chunks:
                chunks[middle].append(seconds)
            heads.append(head_seconds(model.transformer.weights.head))
            for tokens, engine in contexts.items():
                _turn(engine, tokens, 2 * number, lengths.answer)  # brings back the pages of this context
                turn = _turn(engine, tokens, 2 * number + 1, lengths.answer)
                steps[tokens] += turn.steps
                firsts[tokens].append(turn.first)
        selection = ring.capacity.window.selection * PAGE
    finally:
        whole.close()
        ring.close()
    head = quick(heads)
    slope, chunk = line([(middle, quick(seconds)) for middle, seconds in chunks.items()])
    return Sample(
        model.config.layers,
        {tokens: quick(seconds) - head for tokens, seconds in steps.items()},
        {tokens: quick(seconds) - head for tokens, seconds in firsts.items()},
        chunk,
        slope,
        turn.computed,
        dict.fromkeys(contexts, 0),
        selection,
    )


def _turn(engine: Engine, tokens: int, number: int, answer: int) -> Run:
    return timed(engine, f"{after(tokens)} {filler(QUESTION, after=number + 1)}", answer)
