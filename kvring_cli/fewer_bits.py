"""What a `serve` line gives on this machine, and where its model doesn't fit: the most bits a weight that do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

TOO_SHORT = 32_768
"""Tokens of context below which weights are taken to be too large although something would start."""


@dataclass(frozen=True)
class Asked:
    """What a `serve` line asks of this machine, read once. `named`: it says how weights are held."""

    shape: Shape
    place: Place
    config: EngineConfig
    named: bool

    @classmethod
    def of(cls, path: str, facts: Facts, line: Sequence[str], environ: Mapping[str, str]) -> Asked:
        from engine.switches import SETTINGS, resolve
        from kvring_cli.cards import find_preset
        from kvring_cli.planning import here
        from kvring_cli.shapes import shape_of

        words = dict(pairwise(line)) | dict(
            word.split("=", 1) for word in line if word.startswith("--") and "=" in word
        )
        flags: dict[str, Any] = {setting.field: words.get(setting.flag) for setting in SETTINGS if not setting.boolean}
        preset = find_preset(words["--profile"]).settings if "--profile" in words else None
        resolved = resolve(path, flags, environ, preset, {"host_kv_bytes": "auto"})  # serve's own default
        shape = shape_of(path)
        named = resolved.sources["weights"].source != "default"
        return cls(shape, here(facts, resolved.config, shape.origin), resolved.config, named)

    def plan(self, weights: str | None = None) -> Plan:
        """As the line holds weights, or as `weights`; KVRingError where this model can't be held so."""
        from kvring_cli.planning import make_plan

        config = self.config if weights is None else replace(self.config, weights=weights)
        return make_plan(self.shape, self.place, config)


def fewer_bits(asked: Asked, plan: Plan) -> tuple[str, Plan] | None:
    """For a line whose `plan` does not fit or leaves less than TOO_SHORT: of TYPES the first that gives ENOUGH context,
    else the one that gives the most. None: `--weights` is named, or a model can't be quantised, or nothing would do."""
    enough = min(ENOUGH, asked.config.max_context or ENOUGH, asked.shape.trained_context)
    held = plan.capacity.context if plan.capacity else 0
    if asked.named or held >= min(TOO_SHORT, enough):
        return None
    found = []
    for weights in TYPES:
        try:
            smaller = asked.plan(weights)
        except KVRingError:  # a GGUF file: it is what it is
            return None
        if smaller.capacity is not None and smaller.capacity.context > held:
            found.append((weights, smaller))
            if smaller.largest >= enough:
                return found[-1]
    return max(found, key=lambda each: each[1].largest, default=None)


def too_large(plan: Plan) -> str:
    """Why its weights are not held as they are."""
    return plan.refusal or f"they leave {plan.capacity.context:,} tokens of context"
