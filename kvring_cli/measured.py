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
from kvring_cli.predict import QUESTION, Prediction

_ANSWER, _TURNS = 48, 5
_ROUNDS, _ENOUGH = 8, 30.0
"""No further round is begun after so many seconds."""
_EXACT = RecallParams(prefill="exact")


@dataclass(frozen=True)
class Measured:
    """As `kvring_cli.predict.Prediction`, over the tokens that there really were: of the `prompt`, and of the
    `conversation` that the second turn came after. `clock` says what was timed.
    """

    prompt: int
    conversation: int
    prefill_seconds: float
    decode_rate: float
    second_turn_seconds: float
    clock: str

    def predicted(self, at: Callable[[int], Prediction]) -> Prediction:
        """What `at` predicts for these lengths."""
        return replace(at(self.prompt), second_turn_seconds=at(self.conversation).second_turn_seconds)


def run(model: str, config: EngineConfig, plan: Plan, say: Callable[[str, float], None]) -> Measured:
    """An exact prefill, an answer, and further turns, of which the first does not count; several times where that is
    quick, and of each the end of the quicker quarter. All of it stays within the plan's context, so the prompt is
    `room` tokens shorter.
    """
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
    prefills, steps, turns = [], [], {}
    try:
        text, question = _text(engine, tokens), _text(engine, QUESTION)
        engine.complete(engine.prepare("Hello", SamplingParams(max_tokens=2)))
        card = engine.model.transformer.device.type == "cuda"
        if card:
            _timed(engine, text, 4, _EXACT, clock)  # kernels are compiled, and cuDNN plans each length
        began = time.monotonic()
        while not prefills or (len(prefills) < _ROUNDS and time.monotonic() - began < _ENOUGH):
            engine.forget()
            prefill, answer = _timed(engine, text, _ANSWER, _EXACT, clock)
            if card:  # again: the first answer fetches its selection while it is written
                _, answer = _timed(engine, text, _ANSWER, RecallParams(), clock)
            prefills.append(prefill)
            steps += answer
            say("second turns", len(prefills) / (_ROUNDS + 1))
            said = text
            for number in range(_TURNS):
                before, said = engine.count_tokens(said), f"{said} {question}"
                turn, _ = _timed(engine, said, 1, RecallParams(), clock)
                if number:
                    turns[turn] = before
        prompt = engine.count_tokens(text)
    finally:
        engine.close()
    own = "one thread's processor time, which a busy machine can't stretch"
    turn = quick(list(turns))
    how = own if clock is time.process_time else "the wall"
    return Measured(prompt, turns[turn], quick(prefills), 1 / quick(steps), turn, how)


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
