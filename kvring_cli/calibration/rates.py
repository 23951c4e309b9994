"""Rates of the engine itself, over stand-ins of several sizes: what `kvring_cli.predict` is fed with."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.engine import Engine
from engine.model.load import LoadedModel
from engine.ops.linear import linear
from engine.result import Progress, Result, Token
from engine.routes import Bands
from engine.trials import median_seconds, own_clock, quick
from kvring_cli.calibration.standin import CPU_SIZES, CUDA_SIZES, stand_in, work_of
from kvring_cli.predict import QUESTION, Work

Say = Callable[[str, float], None]
_LEAST = 1e-9  # seconds: a difference of two measurements may come out at nothing
_WORDS = "the of and to in is was for on as with time work part case system"  # a token each


@dataclass(frozen=True)
class Lengths:
    """Tokens: of the two contexts over the pool, the pool, a chunk, and the answers."""

    short: int = 3072
    long: int = 6144
    pool: int = 2048
    chunk: int = 512
    answer: int = 48


LENGTHS = {"cpu": Lengths(), "cuda": Lengths(short=8192, long=24576, pool=4096, chunk=1024)}


@dataclass(frozen=True)
class Run:
    """Seconds of one request: of each whole chunk by the tokens before its middle, of each later token."""

    chunks: tuple[tuple[float, float], ...]
    token: float
    first: float
    computed: int


def measure_rates(device: torch.device, say: Say, *, smallest: bool = False) -> dict[str, Bands]:
    """By the names of `kvring_cli.predict`. `smallest`: one stand-in only, for tests."""
    points: dict[str, list[tuple[float, float]]] = {}
    cases = list(_cases(device, smallest))
    for number, (label, make, four_bit) in enumerate(cases):
        say(f"rates of {label}", number / len(cases))
        model = make()
        for kind, amount, rate in _points(model, work_of(model, four_bit=four_bit), LENGTHS[device.type]):
            points.setdefault(kind, []).append((amount, rate))
    return {kind: _bands(found) for kind, found in points.items()}


def _cases(device: torch.device, smallest: bool) -> Iterator[tuple[str, Callable[[], LoadedModel], bool]]:
    from engine.device import cpu_multiplies_bfloat16

    if device.type == "cuda":
        forms = [(torch.bfloat16, False)]
    else:
        forms = [(torch.float32, False)] + ([(torch.bfloat16, True)] if cpu_multiplies_bfloat16() else [])
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    for dtype, four_bit in forms[:1] if smallest else forms:
        for size in sizes[:1] if smallest else sizes:
            label = f"{size.layers} layers of {size.hidden}, {str(dtype).removeprefix('torch.')}"

            def make(size=size, dtype=dtype, four_bit=four_bit) -> LoadedModel:
                return stand_in(size, device, dtype, four_bit=four_bit)

            yield label, make, four_bit


def _points(model: LoadedModel, work: Work, lengths: Lengths) -> Iterator[tuple[str, float, float]]:
    """(rate's name, amount of work, amount a second) of one stand-in."""
    config = EngineConfig(
        model="",
        max_context=lengths.long + 1024,
        kv_capacity=lengths.pool,
        prefill_chunk=lengths.chunk,
        device_profile="off",
    )
    engine, dtype, layers = Engine(config, model), work.dtype, work.layers
    few, many, short, long = 128, lengths.pool - 256, lengths.short, lengths.long
    try:
        _run(engine, 300, 4)  # whatever is made on first use
        head = _head(model)
        runs, turns = {}, {}
        for tokens in (few, many, short, long):
            runs[tokens] = _run(engine, tokens, lengths.answer)
            turns[tokens] = _turn(engine, tokens)
    finally:
        engine.close()
    yield f"head/{dtype}", work.vocab * work.hidden * work.head_bytes, work.vocab * work.hidden * work.head_bytes / head

    slope, chunk = _line([*runs[long].chunks, *runs[short].chunks])
    yield f"layer/{dtype}", *_rate(work.layer_flops(lengths.chunk), chunk / layers)
    keys = long / 2
    yield f"attend/{dtype}", *_rate(work.attend_flops(lengths.chunk, keys), slope * keys / layers)

    # A dense step at two lengths: what a row costs, and what a byte of its window.
    low, high = work.window_bytes(few + lengths.answer // 2), work.window_bytes(many)
    byte = max(_LEAST, runs[many].token - runs[few].token) / layers / (high - low)
    row = (runs[few].token - head) / layers - byte * low
    yield f"row/{work.form}", *_rate(work.row_bytes, row)
    yield f"attend_row/{dtype}", *_rate(high, byte * high)

    # Over the pool: the same row and window, and scoring that grows with the context.
    window = byte * work.window_bytes(lengths.pool - 4 * 64)
    for tokens in (short, long):
        yield f"score_row/{dtype}", *_rate(work.scores(tokens), (runs[tokens].token - head) / layers - row - window)

    small = (turns[few].first - head) / layers
    yield f"layer/{dtype}", *_rate(work.layer_flops(turns[few].computed), small)
    for tokens in (short, long):
        turn = turns[tokens]
        rows = small * turn.computed / turns[few].computed
        seen = slope / lengths.chunk * turn.computed * (lengths.pool - 4 * 64)  # the window's own attention
        yield f"turn/{dtype}", *_rate(work.scores(tokens), (turn.first - head - seen) / layers - rows)


def _rate(amount: float, seconds: float) -> tuple[float, float]:
    return amount, amount / max(seconds, _LEAST)


def _text(tokens: int) -> str:
    words = _WORDS.split()
    return " ".join(words[(7 * n + n // 16) % 16] for n in range(tokens))


def _run(engine: Engine, tokens: int, answer: int) -> Run:
    """A fresh exact prefill and an answer of so many tokens."""
    engine.forget()
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    return _timed(engine, _text(tokens), sampling, RecallParams(prefill="exact"))


def _turn(engine: Engine, tokens: int, rounds: int = 5) -> Run:
    """A quick one of some second turns over the context that `_run` left behind; the first doesn't count."""
    ask = SamplingParams(max_tokens=1, ignore_eos=True)
    asked = [f"{_text(tokens)} {'why ' * (n + 1)}{_text(QUESTION - n)}" for n in range(rounds + 1)]
    runs = [_timed(engine, text, ask, RecallParams()) for text in asked][1:]
    return sorted(runs, key=lambda run: run.first)[rounds // 4]


def _timed(engine: Engine, text: str, sampling: SamplingParams, recall: RecallParams) -> Run:
    chunks, tokens, result = [], [], None
    clock = own_clock(engine.model.transformer.device)
    began = before = clock()
    done = 0
    for event in engine.generate(engine.prepare(text, sampling, recall)):
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
    steps = [later - earlier for earlier, later in pairwise(tokens)]
    step = quick(steps) if steps else 0.0
    return Run(tuple(chunks), step, tokens[0] - began, result.usage.computed)


def _head(model: LoadedModel) -> float:
    """Seconds of the output matrix over one row."""
    transformer = model.transformer
    row = torch.zeros(1, model.config.hidden, device=transformer.device, dtype=transformer.dtype)
    return median_seconds(lambda: linear(row, transformer.weights.head).float(), transformer.device, 21)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept: the median of all pairs' slopes, so that one interrupted chunk doesn't tilt it."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    slope = max(_LEAST, statistics.median(slopes))
    return slope, max(_LEAST, quick([seconds - slope * keys for keys, seconds in points]))


def _bands(points: list[tuple[float, float]]) -> Bands:
    """Sizes strictly increasing; of two equal ones the slower counts. Three figures are all that a timing has."""
    slowest: dict[int, float] = {}
    for amount, rate in points:
        size = max(1, round(amount))
        slowest[size] = min(rate, slowest.get(size, rate))
    return tuple((size, float(f"{slowest[size]:.3g}")) for size in sorted(slowest))
