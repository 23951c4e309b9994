"""The gates by name: what each proves and what turns it red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from gates.verdict import Report


@dataclass(frozen=True)
class Gate:
    name: str
    proves: str
    turns_red: str
    module: str


GATES = {
    gate.name: gate
    for gate in (
        Gate(
            "multi-needle",
            "facts all over a 42,355-token conversation are answered through a pool of 63 pages, twice in a row",
            "recall off; newest, random or wrong pages; lexical on disjoint facts; mean keys; a query tail of 256",
            "gates.multi_needle",
        ),
        Gate(
            "fits",
            "where the pool holds the context every logit is the dense engine's, bit for bit",
            "a page dropped",
            "gates.fits",
        ),
        Gate(
            "lossless",
            "every page comes back from the host byte for byte, in every dtype and kind of host memory",
            "one flipped bit in one host page",
            "gates.lossless",
        ),
    )
}


def run_gate(
    name: str,
    config: EngineConfig,
    *,
    quick: bool = False,
    seeds: int = 1,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """Load `config.model` (a path) and run one gate under the user's settings."""
    if name not in GATES:
        raise ConfigError(f"there is no gate '{name}'", f"one of {', '.join(GATES)}")
    from gates.context import load_context

    return import_module(GATES[name].module).run(load_context(config, quick=quick, seeds=seeds, say=progress))
