"""Engines that Triton drives, under its interpreter where there is no card, and torch's to hold beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.model.load import LoadedModel, load_model
from engine.triton_runner import TritonRunner
from tests.models import phantom_folder

CUDA = torch.cuda.is_available()
TEXT = "The keeper of the mill wrote down what the river had brought. " * 40


class Patient(TritonRunner):
    """Without a card, where there are no graphs and a large chunk that streams takes a minute."""

    streams_from = 1 << 30  # pages before a chunk

    def _streams(self, frame) -> bool:
        return frame.past >= self.streams_from and super()._streams(frame)


class Interpreted:
    """A backend candidate without a self-check: what it computes is what these tests look at."""

    name = "triton-interpreted"
    runner_type = TritonRunner if CUDA else Patient

    def __init__(self, runner) -> None:
        self.runner = runner

    def build(self) -> TritonRunner:
        self.runner.digests.packed = True
        built = self.runner_type(self.runner)
        built.driven.graphs.wanted &= CUDA
        return built

    def disagreement(self, built) -> str:
        return ""


@cache
def loaded(name: str) -> LoadedModel:
    """`phantom`, or `tiny`: two layers of random weights, a token a byte, for where what is read is all one."""
    device = torch.device("cuda" if CUDA else "cpu")
    return (
        load_model(phantom_folder(), device) if name == "phantom" else load_model("random:tiny", device, torch.float32)
    )


def pairs() -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    """make(model, **settings): an engine on torch and one on Triton, of the same settings; both audited in the end."""
    made = []

    def make(model="tiny", **settings) -> tuple[Engine, Engine]:
        config = EngineConfig(model="", max_context=2048, prefill_chunk=128, sink=64, **settings)
        made.extend(Engine.load(config, loaded(model), backends=backends) for backends in ((), (Interpreted,)))
        return tuple(made[-2:])

    yield make
    for engine in made:
        engine.audit(deep=True)
        engine.close()


def answer(engine: Engine, **recall):
    """Over a pool of 768 tokens: about 850 of the phantom's, 1,000 of the tiny model's."""
    params = RecallParams(explain=True, **recall)
    text = TEXT[:1800] + "The number of the keeper is 4711. " + TEXT[:1500] + "\nWhat is the number of the keeper?"
    if engine.model.name != "phantom":
        text = text[-1000:]
    prepared = engine.prepare(text, SamplingParams(max_tokens=3, ignore_eos=True), params)
    return engine.complete(prepared)
