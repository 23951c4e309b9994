"""Rates of the engine itself, over stand-ins of several sizes: what `kvring_cli.predict` is fed with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from engine.config import PAGE
from engine.model.load import LoadedModel
from engine.recall.recall import QUERY_ROWS
from engine.routes import Bands
from kvring_cli.calibration.links import gather
from kvring_cli.calibration.rounds import samples_in_rounds
from kvring_cli.calibration.samples import FEW, LEAST, LENGTHS, Lengths, Sample, sample
from kvring_cli.calibration.standin import CPU_SIZES, CUDA_SIZES, Size, shallower, stand_in, work_of
from kvring_cli.predict import Work, new_pages

Point = tuple[str, float, float]
"""Rate's name, amount of work, amount a second."""
Points = list[Point]

SHALLOW = 2
"""Layers of the second stand-in of each size on a card."""


def cases(device: torch.device, *, smallest: bool = False) -> Iterator[tuple[str, Callable[[], Points]]]:
    """What is measured, and how; `smallest`: one stand-in only, for tests."""
    from engine.device import cpu_multiplies_bfloat16

    if device.type == "cuda":
        for size in CUDA_SIZES:
            yield f"{size.layers} layers of {size.hidden}, bfloat16", partial(_of_card, size, device)
        return
    sizes = CPU_SIZES[:1] if smallest else CPU_SIZES
    for dtype, four_bit in [(torch.float32, False)] + ([(torch.bfloat16, True)] if cpu_multiplies_bfloat16() else []):
        what = f"{', '.join(str(size.hidden) for size in sizes)} wide, {str(dtype).removeprefix('torch.')}, in rounds"
        yield what, partial(_of_processor, sizes, dtype, four_bit)


def _of_card(size: Size, device: torch.device) -> Points:
    model = stand_in(size, device, torch.bfloat16)
    work = work_of(model)
    page = int(work.window_bytes(PAGE))
    return list(card_points(model, work, LENGTHS["cuda"], page / gather(device, page)))


def _of_processor(sizes: Sequence[Size], dtype: torch.dtype, four_bit: bool) -> Points:
    models, lengths = [stand_in(size, torch.device("cpu"), dtype, four_bit=four_bit) for size in sizes], LENGTHS["cpu"]
    samples = samples_in_rounds(models, lengths)
    works = [work_of(model, four_bit=four_bit) for model in models]
    return [point for work, one in zip(works, samples, strict=True) for point in processor_points(work, lengths, one)]


def card_points(model: LoadedModel, work: Work, lengths: Lengths, page: float) -> Iterator[Point]:
    """page: seconds in which a layer's page is fetched.

    Measured beside a shallower one, because a step costs as much beside its layers as some layers do: two depths tell
    them apart.
    """
    deep, shallow = (sample(one, lengths, page) for one in (model, shallower(model, SHALLOW)))
    per = deep.less(shallow)
    for name, whole, each in (("step", shallow.token, per.token), ("turn_start", shallow.first, per.first)):
        for tokens in whole:
            yield f"{name}/{work.dtype}", *_rate(tokens, whole[tokens] - SHALLOW / per.layers * each[tokens])
    yield from _points(work, lengths, per)
    # Other kernels read a question over cold pages than within the pool: what they take is known as a whole.
    scoring = per.slope / lengths.chunk * QUERY_ROWS / 2 * (lengths.short + lengths.long) / 2 / per.layers
    turn = sum(_turns(lengths, per)) / 2 - scoring
    yield f"turn_layer/{work.dtype}", *_rate(work.layer_flops(per.computed), turn)
    cold = work.window_bytes(new_pages(deep.selection, lengths.pool, lengths.long))
    yield f"turn_fetch/{work.dtype}", *_rate(cold, page * deep.fetched[lengths.long] / deep.layers)


def processor_points(work: Work, lengths: Lengths, per: Sample) -> Iterator[Point]:
    yield f"head/{work.dtype}", *_rate(work.head_size, per.head)
    yield from _points(work, lengths, per)
    for tokens, turn in zip((lengths.short, lengths.long), _turns(lengths, per), strict=True):
        yield f"turn/{work.dtype}", *_rate(work.scores(tokens), turn - per.first[FEW] / per.layers)


def _points(work: Work, lengths: Lengths, per: Sample) -> Iterator[Point]:
    """Of what both measure."""
    dtype, layers = work.dtype, per.layers
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
    yield f"layer/{dtype}", *_rate(work.layer_flops(per.computed), per.first[FEW] / layers)


def _turns(lengths: Lengths, per: Sample) -> tuple[float, float]:
    """Seconds of a layer in second turns over the two contexts beyond the pool, without attention to the window."""
    window = per.slope / lengths.chunk * per.computed * (lengths.pool - 4 * PAGE)
    return (per.first[lengths.short] - window) / per.layers, (per.first[lengths.long] - window) / per.layers


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
