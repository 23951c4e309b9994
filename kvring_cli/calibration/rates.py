"""Rates of the engine itself, over stand-ins of several sizes: what `kvring_cli.predict` is fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.config import PAGE
from engine.model.load import LoadedModel
from engine.recall.recall import QUERY_ROWS
from engine.routes import Bands
from kvring_cli.calibration.links import gather
from kvring_cli.calibration.rounds import sample_in_rounds
from kvring_cli.calibration.samples import FEW, LEAST, LENGTHS, Lengths, head_seconds, sample
from kvring_cli.calibration.standin import CPU_SIZES, CUDA_SIZES, shallower, stand_in, work_of
from kvring_cli.predict import Work, new_pages

Points = list[tuple[str, float, float]]
"""Rate's name, amount of work, amount a second."""


SHALLOW = 2
"""Layers of the second stand-in of each size on a card."""


def cases(device: torch.device, *, smallest: bool = False) -> Iterator[tuple[str, Callable[[], Points]]]:
    """What is measured, and how; `smallest`: one stand-in only, for tests."""
    from engine.device import cpu_multiplies_bfloat16

    if device.type == "cuda":
        forms = [(torch.bfloat16, False)]
    else:
        forms = [(torch.float32, False)] + ([(torch.bfloat16, True)] if cpu_multiplies_bfloat16() else [])
    sizes = CPU_SIZES if device.type == "cpu" else CUDA_SIZES
    for dtype, four_bit in forms[:1] if smallest else forms:
        for size in sizes[:1] if smallest else sizes:

            def measure(size=size, dtype=dtype, four_bit=four_bit) -> Points:
                model = stand_in(size, device, dtype, four_bit=four_bit)
                work = work_of(model, four_bit=four_bit)
                size = int(work.window_bytes(PAGE))
                page = size / gather(device, size) if device.type == "cuda" else None
                return list(points(model, work, LENGTHS[device.type], page))

            yield f"{size.layers} layers of {size.hidden}, {str(dtype).removeprefix('torch.')}", measure


def points(
    model: LoadedModel, work: Work, lengths: Lengths, page: float | None = None
) -> Iterator[tuple[str, float, float]]:
    """(rate's name, amount of work, amount a second) of one size.

    page: seconds in which a layer's page is fetched, on a card. There the size is measured beside a shallower one,
    because a step costs as much beside its layers as some layers do: two depths tell them apart.
    """
    deep, dtype = sample_in_rounds(model, lengths) if page is None else sample(model, lengths, page), work.dtype
    per, layers = deep, deep.layers
    if page is not None:
        shallow = sample(shallower(model, SHALLOW), lengths, page)
        per = deep.less(shallow)
        layers = per.layers
        for name, whole, each in (("step", shallow.token, per.token), ("turn_start", shallow.first, per.first)):
            for tokens in whole:
                yield f"{name}/{dtype}", *_rate(tokens, whole[tokens] - SHALLOW / layers * each[tokens])
    else:
        yield head_rate(model.transformer.weights.head, dtype)

    yield f"layer/{dtype}", *_rate(work.layer_flops(lengths.chunk), per.chunk / layers)
    keys = lengths.long / 2
    yield f"attend/{dtype}", *_rate(work.attend_flops(lengths.chunk, keys), per.slope * keys / layers)

    # A dense step at two lengths: what a row costs, and what a byte of its window.
    low, high = work.window_bytes(FEW + lengths.answer // 2), work.window_bytes(lengths.dense)
    byte = max(LEAST, per.token[lengths.dense] - per.token[FEW]) / layers / (high - low)
    row = per.token[FEW] / layers - byte * low
    yield f"row/{work.form}", *_rate(work.row_bytes, row)
    yield f"attend_row/{dtype}", *_rate(high, byte * high)

    # Over the pool: the same row and window, and scoring that grows with the context.
    window = byte * work.window_bytes(lengths.pool - 4 * PAGE)
    for tokens in (lengths.short, lengths.long):
        yield f"score_row/{dtype}", *_rate(work.scores(tokens), per.token[tokens] / layers - row - window)

    small = per.first[FEW] / layers
    yield f"layer/{dtype}", *_rate(work.layer_flops(per.computed), small)
    pair = per.slope / lengths.chunk  # seconds of one row's attention to one key
    window = pair * per.computed * (lengths.pool - 4 * PAGE)
    short, long = ((per.first[tokens] - window) / layers for tokens in (lengths.short, lengths.long))
    if page is None:
        yield f"turn/{dtype}", *_rate(work.scores(lengths.short), short - small)
        yield f"turn/{dtype}", *_rate(work.scores(lengths.long), long - small)
        return
    # Other kernels read a question over cold pages than within the pool: what they take is known as a whole.
    scoring = pair * QUERY_ROWS / 2 * (lengths.short + lengths.long) / 2 / layers
    yield f"turn_layer/{dtype}", *_rate(work.layer_flops(per.computed), (short + long) / 2 - scoring)
    cold = work.window_bytes(new_pages(deep.selection, lengths.pool, lengths.long))
    yield f"turn_fetch/{dtype}", *_rate(cold, page * deep.fetched[lengths.long] / deep.layers)


def head_rate(head: Tensor, dtype: str) -> tuple[str, float, float]:
    """The rate of an output matrix [vocab, hidden] over one row."""
    return f"head/{dtype}", *_rate(head.nbytes, head_seconds(head))


def _rate(amount: float, seconds: float) -> tuple[float, float]:
    return amount, amount / max(seconds, LEAST)


def in_bands(points: Points) -> dict[str, Bands]:
    """By rate, as a profile keeps them."""
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, amount, rate in points:
        found.setdefault(kind, []).append((amount, rate))
    return {kind: _bands(pairs) for kind, pairs in found.items()}


def _bands(points: list[tuple[float, float]]) -> Bands:
    """Sizes strictly increasing; of two equal ones the slower counts. Three figures are all that a timing has."""
    slowest: dict[int, float] = {}
    for amount, rate in points:
        size = max(1, round(amount))
        slowest[size] = min(rate, slowest.get(size, rate))
    return tuple((size, float(f"{slowest[size]:.3g}")) for size in sorted(slowest))
