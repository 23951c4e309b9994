"""`kvring calibrate`: measure this hardware, and keep what was found where every later start looks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvring_cli import console
from kvring_cli.options import AsJson

if TYPE_CHECKING:
    from engine.device_profile import DeviceProfile


def calibrate(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    routes_only: Annotated[
        bool, typer.Option("--routes-only", help="Leave out the rates that `plan` predicts from.")
    ] = False,
    path: Annotated[
        str | None,
        typer.Option("--device-profile-path", metavar="FILE", help="Where to keep it. Switch: NINFER_DEVICE_PROFILES."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Keep nothing, print it.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Rates of the smallest stand-in only.", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this hardware: copies, rates, and which of equal ways is the fastest. Loads no model."""
    from engine.device import resolve_device, set_threads
    from engine.device_profile import check_kept, save, user_file
    from engine.platform import this_platform
    from kvring_cli.calibration import calibrate as measure
    from kvring_cli.commands.gate import GateProgress

    platform, where = this_platform(), resolve_device(device)
    set_threads(None, platform)
    target = user_file(os.environ, path)
    if not dry_run:
        check_kept(target)
    began = time.monotonic()

    def keep(row: DeviceProfile) -> None:
        if not dry_run:
            save(row, target)

    with GateProgress("calibrate") as progress:
        profile = measure(where, platform, progress, rates=not routes_only, quick=quick, keep=keep, warn=console.warn)
    if as_json:
        console.write_json({**profile.as_yaml(), "stored": None if dry_run else str(target)})
        return
    _show(profile.as_yaml(), None if dry_run else target)
    console.write(f"{time.monotonic() - began:.1f} s\n")


def _show(profile: dict, target: Path | None) -> None:
    console.write(f"{profile['hardware_class']}, {profile['multiprocessors']} multiprocessors\n{profile['origin']}\n")
    for kind in ("routes", "rates"):
        for key, bands in profile[kind].items():
            shown = ", ".join(f"up to {last:,}: {_figure(value)}" for last, value in bands)
            console.write(f"{kind[:-1]} {key:<20} {shown}\n")
    console.write(f"stored in {target}\n" if target else "not stored (--dry-run)\n")


def _figure(value: object) -> str:
    return f"{value:.3g}/s" if isinstance(value, float) else str(value)
