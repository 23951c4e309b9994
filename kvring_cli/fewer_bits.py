"""A model that doesn't fit a card as its folder holds it: the most bits a weight with which it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.errors import KVRingError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.platform import Facts
    from kvring_cli.planning import Plan

TYPES = ("q8_0", "q5_k", "q4_k")
"""What folders are quantised to while they are loaded, the most bits first."""
ENOUGH = 131_072
"""Tokens of context for which fewer bits are taken. A model that was trained for less, or a line that asks for less,
needs no more."""


def plan_line(path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """The plan of a `serve` line's settings for this machine."""
    from kvring_cli.planning import here, make_plan
    from kvring_cli.shapes import shape_of

    config = _settings(path, line, environ)
    shape = shape_of(path)
    return make_plan(shape, here(facts, config, shape.origin), config)


def _settings(path: str, line: Sequence[str], environ: Mapping[str, str]) -> EngineConfig:
    from engine.switches import SETTINGS, resolve
    from kvring_cli.cards import find_preset

    words = dict(pairwise(line))
    flags: dict[str, Any] = {setting.field: words.get(setting.flag) for setting in SETTINGS if not setting.boolean}
    preset = find_preset(words["--profile"]).settings if "--profile" in words else None
    return resolve(path, flags, environ, preset, {"host_kv_bytes": "auto"}).config  # serve's own default


def fewer_bits(path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Plan] | None:
    """Of TYPES the first that gives ENOUGH context, else the one that gives the most; None: the line's own plan fits,
    or it names `--weights`, or the model can't be quantised, or nothing would do."""
    if "--weights" in line or (asked := plan_line(path, facts, line, environ)).capacity is not None:
        return None
    asks = _settings(path, line, environ).max_context or ENOUGH
    found = []
    for weights in TYPES:
        try:
            plan = plan_line(path, facts, [*line, "--weights", weights], environ)
        except KVRingError:  # a GGUF file: it is what it is
            return None
        if plan.capacity is not None:
            found.append((weights, plan))
            if plan.largest >= min(ENOUGH, asks, asked.shape.trained_context):
                return found[-1]
    return max(found, key=lambda each: each[1].largest, default=None)
