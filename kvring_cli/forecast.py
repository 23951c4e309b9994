"""Predicted times for a plan: from this machine's own rates, or a measured card's, scaled by two datasheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from engine.config import PAGE, EngineConfig
from engine.device_profile import DeviceProfile, built_in, look_up
from engine.errors import ConfigError
from engine.platform import Facts
from engine.routes import Bands
from engine.weights.quant import TYPES
from kvring_cli.cards import CardFacts, cards, datasheet
from kvring_cli.planning import Place, Plan
from kvring_cli.predict import Prediction, Work, predict
from kvring_cli.shapes import Shape

_BY_FLOPS = ("layer/", "attend/", "matmul/")
_BY_LINK = ("h2d_", "d2h_", "gather", "turn_fetch/")
_BY_HOST = ("step/", "turn_start/")


@dataclass(frozen=True)
class Forecast:
    """`prediction`: for the plan's context, as a prompt. None: nothing measured to predict from, and `origin` says what
    is missing.
    """

    prediction: Prediction | None
    origin: str
    at: Callable[[int], Prediction] | None = None
    """The same for a prompt of so many tokens, where there is a prediction."""


def forecast(plan: Plan, config: EngineConfig, rates: Mapping[str, Bands], origin: str) -> Forecast:
    capacity = plan.capacity
    if capacity is None:
        return Forecast(None, "it does not fit")
    if not rates:
        return Forecast(None, origin)
    if plan.shape.sliding_layers and plan.place.device is not None:
        return Forecast(None, "layers that slide are none of what a card's rates were timed on")
    seen = capacity.pool_pages - capacity.window.free if capacity.ring else capacity.pool_pages
    measured = [kind.removeprefix("product/") for kind in rates if kind.startswith("product/")]
    work, note = work_of(plan.shape, plan.place, plan.weight_bits, config.weights, measured)
    if isinstance(config.far_heads, int):
        work = replace(work, scored=config.far_heads / 100)
    pool, window, selection = (pages * PAGE for pages in (capacity.pool_pages, seen, capacity.window.selection))
    chunk = config.prefill_chunk

    def at(prompt: int) -> Prediction:
        return predict(work, rates, context=prompt, pool=pool, window=window, selection=selection, chunk=chunk)

    try:
        found = at(capacity.context)
    except ConfigError as error:
        return Forecast(None, f"{error.message} ({error.fix})")
    plain = capacity.kv in ("bf16", "fp16", "fp32")
    codes = "" if plain else f"pages in {capacity.kv} are taken to be read as fast as those of {work.dtype}"
    return Forecast(found, "; ".join(filter(None, (origin, note, codes))), at)


def rates_here(facts: Facts, mine: Path, *, cpu: bool) -> tuple[Mapping[str, Bands], str]:
    """Rates of the hardware in `facts` and where they are from. mine: the user's file, if it is there."""
    gpu = facts.gpu if facts.torch.sees_card and not cpu else None
    name = gpu.hardware_class if gpu else facts.cpu.hardware_class
    count = (gpu.multiprocessors or 0) if gpu else facts.cpu.processors
    found = look_up(name or "unknown", count, mine)
    source, row = found.source, found.profile
    if row is None or not row.rates:  # the user's own may have routes only
        matching = (row for row in built_in() if row.rates and row.matches(name or "unknown", count))
        source, row = "built-in", next(matching, None)
    if row is None:
        alike = next((card for card in cards().values() if gpu and card.gpu.hardware_class == name), None)
        if alike is None:
            return {}, f"no rates of {name} are known: kvring calibrate measures them"
        rates, origin = rates_of_card(alike)
        return rates, f"{origin}; kvring calibrate measures it"
    return row.rates, f"{source} profile of {name} ({row.origin})"


def rates_of_card(card: CardFacts) -> tuple[Mapping[str, Bands], str]:
    """A card's own measured rates, else those of a measured card times the ratio of the datasheets."""
    measured = [row for row in built_in() if row.rates and datasheet(row.hardware_class)]
    own = next(
        (row for row in measured if row.matches(card.gpu.hardware_class or "", card.gpu.multiprocessors or 0)), None
    )
    if own is not None:
        return own.rates, f"measured on this card ({own.origin})"
    if not measured:
        return {}, "no card's measured rates come with this build, so there are no efficiencies to multiply by"
    row = measured[0]
    origin = (
        f"datasheet of {card.key} times the efficiency measured on {row.hardware_class} ({row.origin}): nobody ran "
        "kvring on this card"
    )
    return scaled(row, card), origin


def scaled(row: DeviceProfile, card: CardFacts) -> dict[str, Bands]:
    """Each rate by what bounds it: arithmetic, the link, the card's memory, or the host, which is taken to be alike."""
    theirs = datasheet(row.hardware_class)
    assert theirs is not None
    flops, memory, link = (a / b for a, b in zip((card.half_flops, card.bandwidth, card.pcie), theirs, strict=True))

    def ratio(kind: str) -> float:
        if kind.startswith(_BY_HOST):
            return 1.0
        if kind.startswith(_BY_FLOPS):
            return flops
        return link if kind.startswith(_BY_LINK) else memory

    return {kind: slower(bands, ratio(kind)) for kind, bands in row.rates.items()}


def slower(bands: Bands, ratio: float) -> Bands:
    """Rates of a card that is `ratio` times as fast: what each call costs, however little it does, stays as it is.

    That is where the line through the two smallest sizes begins.
    """
    times = [size / rate for size, rate in bands]
    points = [
        (size, min(times[n:])) for n, (size, _) in enumerate(bands)
    ]  # more work takes no less time: that was noise
    (least, before), second = points[0], points[min(1, len(points) - 1)]
    slope = max(0.0, (second[1] - before) / (second[0] - least)) if len(points) > 1 else before / least
    time = max(0.0, before - slope * least)
    time += (before - time) / ratio
    found = [(least, least / time)]
    for (_, before), (size, after) in pairwise(points):
        time += max(0.0, after - before) / ratio
        found.append((size, size / time))
    return tuple(found)


def work_of(
    shape: Shape, place: Place, weight_bits: float, weights: str = "auto", measured: Iterable[str] = ()
) -> tuple[Work, str]:
    """What a planned model asks of its place, and what of it is no more than near to what was measured.

    measured: types of packed weights that a card's rates know; the nearest of them stands for another.
    """
    if place.device is None:
        four = shape.four_bit and place.dtype is torch.bfloat16
        return Work.of(shape, place.dtype, four_bit=four), ""
    work = Work.of(shape, place.dtype, four_bit=False)
    layer, (head, head_bytes) = shape.held_types(place.dtype, weights, weight_bits)
    if set(layer) == {work.form} and head == work.form:
        return work, ""
    known = {name: TYPES[name.upper()].bits for name in measured if name.upper() in TYPES}

    def taken(kind: str) -> str:
        if not known or kind == work.form or kind in known:
            return kind
        bits = TYPES[kind.upper()].bits if kind.upper() in TYPES else float(kind.split()[0])
        return min(known, key=lambda name: abs(known[name] - bits))

    packed: dict[str, float] = {}
    for kind, size in layer.items():
        packed[taken(kind)] = packed.get(taken(kind), 0.0) + size
    head_type = "" if head == work.form else taken(head)
    bytes_a_number = head_bytes / (work.vocab * work.hidden)
    others = sorted({kind for kind in (*layer, head) if taken(kind) != kind})
    note = "; ".join(f"weights in {kind} are taken at the rate measured in {taken(kind)}" for kind in others)
    return replace(work, packed=tuple(sorted(packed.items())), packed_head=head_type, head_bytes=bytes_a_number), note
