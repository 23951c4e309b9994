"""From a model's name and the flags to an engine that is ready, with every setting accounted for on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import KV_EXPERIMENTAL, KV_MARK
from engine.errors import EngineError, KVRingError
from engine.switches import SETTINGS, Effective, Resolved, resolve
from engine.units import format_bytes
from kvring_cli import console
from kvring_cli.options import Flags

if TYPE_CHECKING:
    import torch

    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.kv.budget import Capacity
    from engine.platform import Platform

CALIBRATE_WITHIN = 120
"""Seconds after which a first start goes on without its card's routes."""


def settle(model: str, flags: Flags, verbose: bool, card: str | None = None, **defaults: Any) -> Resolved:
    """The effective settings, shown with their sources: all when `verbose`, else those that are not the default.

    `card`: a preset of profiles/cards. What was measured on this hardware gives defaults too, below that.
    `defaults`: the command's own, by field of EngineConfig.
    """
    from kvring_cli import models

    path = str(models.resolve(model))
    plain = resolve(path, flags, os.environ, defaults=defaults)
    profiles = {**_measured(plain), **_preset(card)}
    resolved = resolve(path, flags, os.environ, profiles, defaults) if profiles else plain
    for warning in resolved.warnings:
        console.warn(warning)
    if verbose:
        for line in every_setting(resolved):
            console.say(line, "dim")
    else:
        changed = [_short(resolved, setting.field) for setting in SETTINGS]
        if any(changed):
            console.say(f"settings | {' | '.join(filter(None, changed))}", "dim")
    return resolved


def _preset(card: str | None) -> dict[str, Effective]:
    if card is None:
        return {}
    from kvring_cli.cards import find_preset

    preset = find_preset(card)
    return {field: Effective(value, f"profile {preset.name}") for field, value in preset.settings.items()}


def _measured(resolved: Resolved) -> dict[str, Effective]:
    """What the device profile says of settings. `--device-profile calibrate` measures the routes first; so does `auto`
    on a card that nobody measured, once: what it finds is kept for every later start."""
    config = resolved.config
    if config.device_profile == "off":
        return {}
    from engine.device import find_profile, measured_settings, resolve_device
    from engine.platform import this_platform

    platform, device = this_platform(), resolve_device(config.device)
    if config.device_profile == "calibrate":
        _calibrate(config, device, platform)
    found = find_profile(config, device, platform)
    if found.profile is None and config.device_profile == "auto" and device.type == "cuda":
        console.say("no profile of this card: its routes are measured once (--device-profile off starts without)")
        try:
            _calibrate(config, device, platform)
            found = find_profile(config, device, platform)
        except Exception as error:  # whatever it was (Triton's own are no RuntimeError), the compiled-in routes serve
            reason = error.message if isinstance(error, KVRingError) else f"{type(error).__name__}: {error}"
            console.warn(f"this card's routes were not measured, the compiled-in ones serve: {reason[:200]}")
    for trouble in found.troubles:
        console.warn(f"device profile passed over: {trouble}")
    settings = measured_settings(found)
    if "OMP_NUM_THREADS" in os.environ:
        settings.pop("threads", None)
    if config.kv_capacity is not None:  # a pool of a given size may have no room for another chunk
        settings.pop("prefill_chunk", None)
    return {field: Effective(value, f"device profile, {found.source}") for field, value in settings.items()}


def _calibrate(config: EngineConfig, device: torch.device, platform: Platform) -> None:
    """The short form: routes, no rates. Nothing is measured where it could not be kept.

    On a card in a process of its own: a kernel that fails there leaves this one's context whole.
    """
    from engine.device_profile import check_kept, save, user_file
    from kvring_cli.calibration import calibrate
    from kvring_cli.commands.gate import GateProgress

    target = user_file(path=config.device_profile_path)
    check_kept(target)
    if device.type == "cuda":
        _calibrate_apart(device, target)
        return
    with GateProgress("calibrate") as progress:
        row = calibrate(device, platform, progress, rates=False, warn=console.warn)
    save(row, target)


def _calibrate_apart(device: torch.device, target: Path) -> None:
    where = ["--device", str(device), "--device-profile-path", str(target)]
    command = [sys.executable, "-m", "kvring_cli", "calibrate", "--routes-only", *where]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=CALIBRATE_WITHIN)
    except subprocess.TimeoutExpired:
        raise EngineError(f"kvring calibrate did not end within {CALIBRATE_WITHIN} s", "--device-profile off") from None
    if ended.returncode:
        raise EngineError(f"kvring calibrate ended with code {ended.returncode}", "--device-profile off")


def _short(resolved: Resolved, field: str) -> str:
    """`--sink 128`, `NINFER_KV_SINK=128` or `sink 128 (profile)`; empty where the default stands."""
    setting = next(setting for setting in SETTINGS if setting.field == field)
    effective = resolved.sources[field]
    if effective.source == "default" or effective.value == setting.default:
        return ""
    value = setting.show(effective.value)
    if effective.source == setting.flag:
        return f"{setting.flag} {value}"
    return (
        f"{setting.switch}={value}"
        if effective.source == setting.switch
        else f"{setting.flag[2:]} {value} ({effective.source})"
    )


def every_setting(resolved: Resolved) -> list[str]:
    """A line for each setting: its value and its source."""
    found = ((setting, resolved.sources[setting.field]) for setting in SETTINGS)
    return [f"  {setting.flag[2:]:<20} {setting.show(one.value):<12} {one.source}" for setting, one in found]


def effective(resolved: Resolved) -> dict[str, dict[str, object]]:
    """Every setting's value and source, for JSON."""
    return {
        field: {"value": setting.value, "source": setting.source} for field, setting in sorted(resolved.sources.items())
    }


def start(resolved: Resolved, verbose: bool) -> Engine:
    """Load the model and reserve the tiers."""
    from kvring_cli.receipt.record import Record

    record = Record(resolved)
    with console.err().status(f"loading {resolved.config.model}"):
        from engine.engine import Engine
        from engine.pauses import exempt_loaded

        try:
            engine = Engine.load(resolved.config, say=_log if verbose else lambda line: None)
        except BaseException as error:
            record.end(error)
            raise
    exempt_loaded()
    record.ready(engine, capacity_lines(engine))
    if engine.backend.degraded:
        console.warn(f"{engine.backend.degraded}; {engine.backend.name} serves instead")
    for note in filter(None, (*engine.model.notes, *engine.capacity.notes, engine.unpinned(), engine.chunk_note)):
        console.say(f"note: {note}")
    if engine.graphs == "off":
        console.say("note: decode steps are no CUDA graphs, as asked: the same work, launched kernel by kernel")
    if engine.capacity.kv in KV_EXPERIMENTAL and not verbose:
        console.say(f"note: {kv_line(engine.capacity)}")
    if verbose or (resolved.config.dtype == "auto" and "GGUF" in engine.compute):
        console.say(f"compute | {engine.compute}", "dim")
    if verbose:
        for line in capacity_lines(engine):
            console.say(line, "dim")
    return engine


def _log(line: str) -> None:
    console.say(f"start | {line}", "dim")


def kv_line(capacity: Capacity) -> str:
    """What pages hold, and why."""
    mark = KV_MARK if capacity.kv in KV_EXPERIMENTAL else ""
    return f"kv {capacity.kv} ({capacity.kv_reason}{mark})"


def capacity_lines(engine: Engine) -> list[str]:
    """What the tiers hold, and how the window is shared out where the ring is on."""
    capacity, window = engine.capacity, engine.capacity.window
    lines = [
        f"capacity | context {capacity.context:,} tokens | KV {capacity.pool_pages * 64:,} tokens | "
        f"pages {capacity.pool_pages:,}/{capacity.logical_pages:,} | pool {format_bytes(capacity.pool_bytes)} | "
        f"host {format_bytes(capacity.host_bytes)} | weights {format_bytes(capacity.weight_bytes)} | "
        f"{kv_line(capacity)}"
    ]
    if capacity.ring:
        lines.append(
            f"[ring] budgets: sink={window.sink}, selection={window.selection}, recent={window.recent}, "
            f"free={window.free} (pool {window.pool})"
        )
    return lines
