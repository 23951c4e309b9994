"""The plan's three times, measured: what a prediction is held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.result import Token
from engine.trials import own_clock, quick
from kvring_cli.filler import filler
from kvring_cli.planning import Plan
from kvring_cli.predict import QUESTION

_ANSWER, _TURNS = 48, 8


@dataclass(frozen=True)
class Measured:
    """As `kvring_cli.predict.Prediction`; `clock` says what was timed."""

    prefill_seconds: float
    decode_rate: float
    second_turn_seconds: float
    clock: str


def run(model: str, config: EngineConfig, plan: Plan, say: Callable[[str, float], None]) -> Measured:
    """An exact prefill, an answer, and further turns, of which the first does not count: all within the plan's context,
    so the prompt is `room` tokens shorter than the one that the plan predicts for."""
    from kvring_cli import models

    assert plan.capacity is not None
    room = _TURNS * (QUESTION + 1) + _ANSWER + 64
    tokens = plan.capacity.context - room
    if tokens < room:
        raise ConfigError(
            f"a context of {plan.capacity.context:,} tokens is too short to measure: turns and answers take {room}",
            f"--max-context {2 * room} or more",
        )
    say(f"prefill of {tokens:,} tokens", 0.0)
    engine = Engine.load(replace(config, model=str(models.resolve(model)), max_context=plan.capacity.context))
    clock = own_clock(engine.model.transformer.device)
    try:
        text = _text(engine, tokens)
        engine.complete(engine.prepare("Hello", SamplingParams(max_tokens=2)))
        exact, card = RecallParams(prefill="exact"), engine.model.transformer.device.type == "cuda"
        if card:
            _timed(engine, text, 4, exact, clock)  # kernels are compiled, and cuDNN plans each length
            engine.forget()
        prefill, steps = _timed(engine, text, _ANSWER, exact, clock)
        if card:  # again: the first answer fetches its selection while it is written
            _, steps = _timed(engine, text, _ANSWER, RecallParams(), clock)
        say("second turns", 0.8)
        turns, question = [], _text(engine, QUESTION)
        for _ in range(_TURNS):
            text = f"{text} {question}"
            turns.append(_timed(engine, text, 1, RecallParams(), clock)[0])
    finally:
        engine.close()
    own = "one thread's processor time, which a busy machine can't stretch"
    what = own if clock is time.process_time else "the wall"
    return Measured(prefill, 1 / quick(steps), quick(turns[1:]), f"measured by {what}")


def _timed(
    engine: Engine, text: str, answer: int, recall: RecallParams, clock: Callable[[], float]
) -> tuple[float, list[float]]:
    """Seconds from the request to the first token, and of each later one."""
    prepared = engine.prepare(text, SamplingParams(max_tokens=answer, ignore_eos=True), recall)
    began, times = clock(), []
    for event in engine.generate(prepared):
        if isinstance(event, Token):
            times.append(clock())
    return times[0] - began, [later - earlier for earlier, later in pairwise(times)]


def _text(engine: Engine, tokens: int) -> str:
    """Plain text of about so many tokens, never more."""
    ratio = engine.count_tokens(filler(1024)) / 1024
    return filler(int(tokens / max(1.0, ratio)))
