"""From a model's name and the flags to an engine that is ready, with every setting accounted for on stderr."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engine.switches import SETTINGS, Resolved, resolve
from engine.units import format_bytes
from kvring_cli import console
from kvring_cli.options import Flags

if TYPE_CHECKING:
    from engine.engine import Engine


def settle(model: str, flags: Flags, verbose: bool, **defaults: Any) -> Resolved:
    """The effective settings, shown with their sources: all when `verbose`, else those that are not the default.

    `defaults`: the command's own, by field of EngineConfig.
    """
    from kvring_cli import models

    resolved = resolve(str(models.resolve(model)), flags, os.environ, defaults=defaults)
    for warning in resolved.warnings:
        console.warn(warning)
    if verbose:
        for setting in SETTINGS:
            effective = resolved.sources[setting.field]
            console.say(f"  {setting.flag[2:]:<16} {setting.show(effective.value):<12} {effective.source}", "dim")
    else:
        changed = [_short(resolved, setting.field) for setting in SETTINGS]
        if any(changed):
            console.say(f"settings | {' | '.join(filter(None, changed))}", "dim")
    return resolved


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
        f"{setting.switch}={value}" if effective.source == setting.switch else f"{setting.flag[2:]} {value} (profile)"
    )


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

        try:
            engine = Engine.load(resolved.config, say=_log if verbose else lambda line: None)
        except BaseException as error:
            record.end(error)
            raise
    record.ready(engine, capacity_lines(engine))
    if engine.backend.degraded:
        console.warn(f"{engine.backend.degraded}; {engine.backend.name} serves instead")
    for note in filter(None, (*engine.capacity.notes, engine.unpinned())):
        console.say(f"note: {note}")
    if verbose or (resolved.config.dtype == "auto" and "GGUF" in engine.compute):
        console.say(f"compute | {engine.compute}", "dim")
    if verbose:
        for line in capacity_lines(engine):
            console.say(line, "dim")
    return engine


def _log(line: str) -> None:
    console.say(f"start | {line}", "dim")


def capacity_lines(engine: Engine) -> list[str]:
    """What the tiers hold, and how the window is shared out where the ring is on."""
    capacity, window = engine.capacity, engine.capacity.window
    lines = [
        f"capacity | context {capacity.context:,} tokens | KV {capacity.pool_pages * 64:,} tokens | "
        f"pages {capacity.pool_pages:,}/{capacity.logical_pages:,} | pool {format_bytes(capacity.pool_bytes)} | "
        f"host {format_bytes(capacity.host_bytes)} | weights {format_bytes(capacity.weight_bytes)}"
    ]
    if capacity.ring:
        lines.append(
            f"[ring] budgets: sink={window.sink}, selection={window.selection}, recent={window.recent}, "
            f"free={window.free} (pool {window.pool})"
        )
    return lines
