"""Measures this machine: rates that predictions are made of, and which of equal routes is the fastest here."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from engine.device_profile import DeviceProfile
    from engine.platform import Platform

Say = Callable[[str, float], None]


def calibrate(
    device: torch.device, platform: Platform, say: Say, *, rates: bool = True, quick: bool = False
) -> DeviceProfile:
    """A row for this hardware. `rates` False: routes only, which is quick. Before any weights are loaded."""
    import torch

    from engine.device import hardware
    from engine.device_profile import DeviceProfile
    from kvring_cli.calibration.links import measure_links
    from kvring_cli.calibration.rates import measure_rates
    from kvring_cli.calibration.routes import measure_routes

    name, count = hardware(device, platform)
    routes = measure_routes(device, platform, say)
    measured = {}
    if rates:
        if device.type == "cuda":
            measured |= measure_links(device, say)
        measured |= measure_rates(device, say, smallest=quick)
    origin = f"kvring calibrate, {datetime.date.today()}, torch {torch.__version__}, {_what(device, count)}"
    return DeviceProfile(name, count, origin, routes, measured)


def _what(device: torch.device, count: int) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} of {count} processors"
