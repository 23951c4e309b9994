"""The gates by name: what each proves and what turns it red."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from engine.errors import ConfigError, EngineError
from gates.options import GateOptions

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from gates.verdict import Report


@dataclass(frozen=True)
class Gate:
    """`module` has `run(context) -> Report`."""

    name: str
    proves: str
    turns_red: str
    module: str


ALL = "all"
GATES = {
    gate.name: gate
    for gate in (
        Gate(
            "multi-needle",
            "facts all over a 42,355-token conversation are answered through a pool of 63 pages, twice in a row",
            "recall off; newest, random or wrong pages; lexical on disjoint facts; mean keys; a query tail of 256; "
            "no neighbours where a value lies across a page boundary",
            "gates.multi_needle",
        ),
        Gate(
            "long-problem",
            "facts at 45 % of a 94,698-token conversation are answered through a pool of 63 pages, twice in a row",
            "recall off; newest, random or wrong pages; page tables shuffled",
            "gates.long_problem",
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


def known(names: list[str]) -> list[str]:
    """The gates that were asked for, each once; `all` is every one. ConfigError for a name that is none."""
    for name in names:
        if name not in GATES and name != ALL:
            raise ConfigError(f"there is no gate '{name}'", f"one of {', '.join(GATES)}, or {ALL}")
    return list(dict.fromkeys(gate for name in names for gate in (GATES if name == ALL else [name])))


def run_gate(
    name: str,
    config: EngineConfig,
    options: GateOptions | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """Load `config.model` (a path) and run one gate under the user's settings.

    An error of the engine in the middle of a gate is a finding: FAIL with what it said. What can't be run at all
    (ConfigError, RequestError) is raised.
    """
    (name,) = known([name])
    from engine.result import AuditError
    from gates.context import load_context
    from gates.verdict import Check, Report

    began = time.perf_counter()
    context = load_context(config, options or GateOptions(), progress)
    try:
        report = import_module(GATES[name].module).run(context)
    except (EngineError, AuditError) as error:
        failed = Check("the engine went through it", False, error.message)
        report = Report(name, checks=[failed], environment=context.environment()).judge()
    report.seconds = time.perf_counter() - began
    return report
