"""Predicted times for a plan: from this machine's own rates, or a measured card's, scaled by two datasheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from engine.config import PAGE, EngineConfig
from engine.device_profile import DeviceProfile, built_in, look_up, user_file
from engine.errors import ConfigError
from engine.platform import Facts
from engine.routes import Bands
from kvring_cli.cards import CardFacts, datasheet
from kvring_cli.planning import Place, Plan
from kvring_cli.predict import Prediction, Work, predict
from kvring_cli.shapes import Shape

_BY_FLOPS = ("layer/", "attend/", "matmul/")
_BY_LINK = ("h2d_", "d2h_")


@dataclass(frozen=True)
class Forecast:
    """`prediction` None: nothing measured to predict from, and `origin` says what is missing."""

    prediction: Prediction | None
    origin: str


def forecast(plan: Plan, config: EngineConfig, rates: Mapping[str, Bands], origin: str) -> Forecast:
    """For the plan's context, as a prompt."""
    capacity = plan.capacity
    if capacity is None or not rates:
        return Forecast(None, origin)
    seen = capacity.pool_pages - capacity.window.free if capacity.ring else capacity.pool_pages
    try:
        found = predict(
            work_of(plan.shape, plan.place, plan.weight_bits),
            rates,
            context=capacity.context,
            pool=capacity.pool_pages * PAGE,
            window=seen * PAGE,
            chunk=config.prefill_chunk,
        )
    except ConfigError as error:
        return Forecast(None, f"{error.message} ({error.fix})")
    return Forecast(found, origin)


def rates_here(facts: Facts, environ: Mapping[str, str], *, cpu: bool) -> tuple[Mapping[str, Bands], str]:
    """Rates of the hardware in `facts` and where they are from."""
    gpu = facts.gpu if facts.torch.sees_card and not cpu else None
    name = gpu.hardware_class if gpu else facts.cpu.hardware_class
    count = (gpu.multiprocessors or 0) if gpu else facts.cpu.processors
    found = look_up(name or "unknown", count, user_file(environ))
    if found.profile is None or not found.profile.rates:
        return {}, f"no rates of {name} are known: kvring calibrate measures them"
    return found.profile.rates, f"{found.source} profile of {name} ({found.profile.origin})"


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
    """Each rate by what bounds it: arithmetic, the link, or the card's memory."""
    theirs = datasheet(row.hardware_class)
    assert theirs is not None
    flops, memory, link = (a / b for a, b in zip((card.half_flops, card.bandwidth, card.pcie), theirs, strict=True))

    def ratio(kind: str) -> float:
        if kind.startswith(_BY_FLOPS):
            return flops
        return link if kind.startswith(_BY_LINK) else memory

    return {kind: tuple((size, rate * ratio(kind)) for size, rate in bands) for kind, bands in row.rates.items()}


def work_of(shape: Shape, place: Place, weight_bits: float) -> Work:
    """What a planned model asks of its place. A card is taken to read packed weights at the rate of plain ones."""
    four = place.device is None and shape.four_bit and place.dtype is torch.bfloat16
    work = Work.of(shape, place.dtype, four_bit=four)
    packed = place.device is not None and weight_bits < 8 * place.dtype.itemsize
    return replace(work, weight_bytes=weight_bits / 8, head_bytes=weight_bits / 8) if packed else work
