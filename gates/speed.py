"""How fast this machine prefills, decodes and resumes with a model; a peer runs in turn with us, in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.weights.gguf import is_gguf
from gates.context import Say, load_context
from gates.haystack import build
from gates.options import GateOptions

ROUNDS = 5
DECODE = 128  # tokens
PROMPT = "The history of computing begins with"


@dataclass(frozen=True)
class Rate:
    """`value` in `unit`, the median of `rounds`, with the extremes."""

    what: str
    value: float
    unit: str
    rounds: tuple[float, ...]
    peer: float | None = None  # the peer's median, same unit, rounds taken in turn

    @property
    def ratio(self) -> float | None:
        return self.value / self.peer if self.peer else None


def measure(config: EngineConfig, say: Say, *, tokens: int, peer: str | None) -> list[Rate]:
    """Prefill as the context's length asks, short-context decode (with `peer` beside it), and a second turn."""
    context = load_context(config, GateOptions(), say)
    engine = context.engine(max_context=tokens + 1024)
    rates = [_decode(engine, config, say, peer)]
    document = build("keyed", tokens, context.counter, 1, asked=4)
    settings = RecallParams(prefill=context.prefill)
    prefill, cold, second = [], [], []
    for number in range(3):
        say(f"prefill of {document.tokens:,} tokens, {context.prefill}", 0.5 + number / 6)
        engine.forget()
        for fact, into in ((document.asked[0], cold), (document.asked[1], second)):
            result = engine.complete(engine.prepare(document.messages(fact), SamplingParams(max_tokens=8), settings))
            into.append(result.timings.first_token * 1e3)
            if into is cold:
                prefill.append(result.timings.rates(result.usage)[0])
    engine.close()
    return [
        *rates,
        Rate(
            f"prefill, {document.tokens:,} tokens, {context.prefill}",
            statistics.median(prefill),
            "tok/s",
            tuple(prefill),
        ),
        Rate("cold, first token", statistics.median(cold), "ms", tuple(cold)),
        Rate("second turn, first token", statistics.median(second), "ms", tuple(second)),
    ]


def _decode(engine: Engine, config: EngineConfig, say: Say, peer: str | None) -> Rate:
    other = _peer(peer, config) if peer else None
    ours, theirs = [], []
    for number in range(ROUNDS):
        say(f"decode, {DECODE} tokens" + (f", in turn with {peer}" if peer else ""), number / ROUNDS / 2)
        result = engine.complete(engine.prepare(PROMPT, SamplingParams(max_tokens=DECODE, ignore_eos=True)))
        ours.append(result.timings.rates(result.usage)[1])
        if other:
            theirs.append(other())
    middle = statistics.median(theirs) if theirs else None
    return Rate(f"decode, {DECODE} tokens, short context", statistics.median(ours), "tok/s", tuple(ours), middle)


def _peer(name: str, config: EngineConfig) -> Callable[[], float]:
    """Decode tokens a second of llama-cpp-python on the same file and threads."""
    if name != "llama.cpp":
        raise ConfigError(f"'{name}' is not a peer that can be measured", "--peer llama.cpp")
    try:
        from llama_cpp import Llama
    except ImportError:
        raise ConfigError("llama-cpp-python is not installed here", "pip install llama-cpp-python") from None
    if not is_gguf(config.model):
        raise ConfigError("llama.cpp reads GGUF files only", "give a .gguf model")
    import torch

    threads = torch.get_num_threads()
    model = Llama(config.model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run() -> float:
        model.reset()
        model.eval(model.tokenize(PROMPT.encode()))
        model.eval([model.sample(temp=0.0)])
        began = time.perf_counter()
        for _ in range(DECODE - 1):
            model.eval([model.sample(temp=0.0)])
        return (DECODE - 1) / (time.perf_counter() - began)

    return run
