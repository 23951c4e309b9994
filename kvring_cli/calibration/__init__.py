"""Measures this machine: rates that predictions are made of, and which of equal routes is the fastest here."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.device_profile import DeviceProfile
    from engine.platform import Platform
    from kvring_cli.calibration.parts import Say, Warn

ROUTES_WITHIN, RATES_WITHIN = 40, 60
"""Seconds on a card after which no further part is begun: a first start waits for the routes."""


def calibrate(
    device: torch.device,
    platform: Platform,
    say: Say,
    *,
    rates: bool = True,
    quick: bool = False,
    keep: Callable[[DeviceProfile], None] = lambda profile: None,
    warn: Warn = lambda line: None,
) -> DeviceProfile:
    """A row for this hardware. `rates` False: routes only, which is quick. Before any weights are loaded.

    keep: given the row as soon as the routes are there, and again at the end. warn: told what could not be measured;
    EngineError if that was everything, or if the card was lost over it.
    """
    import torch

    from engine.device import hardware
    from engine.device_profile import DeviceProfile
    from engine.errors import EngineError
    from kvring_cli.calibration import routes
    from kvring_cli.calibration.parts import Parts

    name, count = hardware(device, platform)
    parts, card = Parts(say, warn), device.type == "cuda"
    origin = f"kvring calibrate, {datetime.date.today()}, torch {torch.__version__}, {_what(device, count)}"

    def row(rates: dict) -> DeviceProfile:
        left_out = f"; not measured: {', '.join(parts.missing)}" if parts.missing else ""
        return DeviceProfile(name, count, origin + left_out, found, rates)

    found = {}
    for one in parts.measured(routes.cases(device, platform), ROUTES_WITHIN if card else float("inf")):
        found |= one
    profile = row({})
    if parts.done:
        keep(profile)
    if rates:
        from kvring_cli.calibration.rates import in_bands

        every = _rates(device, quick)
        points = [point for some in parts.measured(every, RATES_WITHIN if card else float("inf")) for point in some]
        profile = replace(row({}), rates=in_bands(points))
    if not parts.done:
        raise EngineError(f"nothing could be measured: {parts.missing[0]} and all else failed", "kvring doctor")
    if rates:
        keep(profile)
    if parts.broken:
        raise EngineError(
            f"{parts.broken} broke the card's context; what came after it was not measured, the rest is kept",
            "kvring calibrate again; if it stays so, kvring doctor and --device-profile off",
        )
    return profile


def _rates(device: torch.device, quick: bool) -> Iterator:
    from kvring_cli.calibration import links, products, rates

    if device.type == "cuda":
        yield from links.cases(device)
        yield from products.cases(device)
        yield from rates.cases(device)  # the longest parts
    else:
        yield from rates.cases(device, smallest=quick)


def _what(device: torch.device, count: int) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} of {count} processors"
