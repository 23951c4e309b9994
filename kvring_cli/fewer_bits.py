"""A model that doesn't fit a card as its folder holds it: the most bits a weight with which it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.errors import KVRingError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.platform import Facts
    from kvring_cli.planning import Place, Plan
    from kvring_cli.shapes import Shape

TYPES = ("q8_0", "q5_k", "q4_k")
"""What folders are quantised to while they are loaded, the most bits first."""
ENOUGH = 131_072
"""Tokens of context for which fewer bits are taken. A model that was trained for less, or a line that asks for less,
needs no more."""


def plan_line(path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]) -> Plan:
    """The plan of a `serve` line's settings for this machine."""
    from kvring_cli.planning import make_plan

    return make_plan(*_asked(path, facts, line, environ))


def _asked(
    path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]
) -> tuple[Shape, Place, EngineConfig]:
    from engine.switches import SETTINGS, resolve
    from kvring_cli.cards import find_preset
    from kvring_cli.planning import here
    from kvring_cli.shapes import shape_of

    words = dict(pairwise(line))
    flags: dict[str, Any] = {setting.field: words.get(setting.flag) for setting in SETTINGS if not setting.boolean}
    preset = find_preset(words["--profile"]).settings if "--profile" in words else None
    config = resolve(path, flags, environ, preset, {"host_kv_bytes": "auto"}).config  # serve's own default
    shape = shape_of(path)
    return shape, here(facts, config, shape.origin), config


def fewer_bits(path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]) -> tuple[str, Plan] | None:
    """Of TYPES the first that gives ENOUGH context, else the one that gives the most; None: the line's own plan fits,
    or it names `--weights`, or the model can't be quantised, or nothing would do."""
    from kvring_cli.planning import make_plan

    shape, place, config = _asked(path, facts, line, environ)
    if "--weights" in line or make_plan(shape, place, config).capacity is not None:
        return None
    enough = min(ENOUGH, config.max_context or ENOUGH, shape.trained_context)
    found = []
    for weights in TYPES:
        try:
            plan = make_plan(shape, place, replace(config, weights=weights))
        except KVRingError:  # a GGUF file: it is what it is
            return None
        if plan.capacity is not None:
            found.append((weights, plan))
            if plan.largest >= enough:
                return found[-1]
    return max(found, key=lambda each: each[1].largest, default=None)
