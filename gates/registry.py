"""The gates by name: what each proves and what turns it red."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

from engine.errors import ConfigError, EngineError
from gates.options import GateOptions

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from gates.context import Context
    from gates.remote import Server
    from gates.verdict import Report


@dataclass(frozen=True)
class Gate:
    """`module` has `run(context) -> Report`. `reads`: fields of GateOptions that change it beside
    `quick`; `outside`: those that do with a server, None where it can't be asked from outside.
    """

    name: str
    proves: str
    turns_red: str
    module: str
    reads: tuple[str, ...] = ()
    outside: tuple[str, ...] | None = None


ALL = "all"
SUITE = "suite"
GATES = {
    gate.name: gate
    for gate in (
        Gate(
            "multi-needle",
            "facts all over a 42,355-token conversation are answered through a pool of 63 pages, twice in a row",
            "recall off; newest, random or wrong pages; lexical on disjoint facts; mean keys; a query tail of 256; "
            "no neighbours where a value lies across a page boundary",
            "gates.multi_needle",
            reads=("seeds", "length", "haystack"),
            outside=("seeds", "length", "haystack"),
        ),
        Gate(
            "long-problem",
            "facts at 45 % of a 94,698-token conversation are answered through a pool of 63 pages, twice in a row",
            "recall off; newest, random or wrong pages; page tables shuffled",
            "gates.long_problem",
            reads=("seeds", "length", "haystack", "grid"),
            outside=("seeds", "length", "haystack"),
        ),
        Gate(
            "fits",
            "where the pool holds the context every logit is the dense engine's, bit for bit, and the plain formula's",
            "a page dropped; keys one position late; a window one page short",
            "gates.fits",
        ),
        Gate(
            "lossless",
            "every page comes back from the host byte for byte, in every dtype and kind of host memory",
            "one flipped bit in one host page",
            "gates.lossless",
        ),
        Gate(
            "perplexity",
            "on 100,000 tokens the ring's logits are the dense engine's, bit for bit, and its NLL where pages stream",
            "recall off; every second page hidden",
            "gates.perplexity",
            reads=("length", "haystack"),
        ),
        Gate(
            "reuse",
            "a follow-up turn pays for its new tokens only, 20 times sooner, and answers as a cold run does",
            "reuse off; another first word",
            "gates.reuse",
            reads=("length",),
            outside=("length",),
        ),
        Gate(
            "resend",
            "the same request again, after a cancel, or after a copy that failed at any page, is answered alike",
            "a failed copy that is answered; a flipped bit in a resident page",
            "gates.resend",
            outside=("length",),
        ),
        Gate(
            "agreement",
            "recall says word for word what exact attention says, for every kind of fact",
            "recall off",
            "gates.agreement",
            reads=("seeds", "length", "haystack"),
            outside=("seeds", "length", "haystack"),
        ),
        Gate(
            "arch",
            "a real server warns when it answers over its pool with recall off, and only then",
            "a pool larger than the prompt, or recall on, that warns all the same",
            "gates.arch",
            reads=("timeout",),
        ),
        Gate(
            SUITE,
            "recall keeps what the model can do itself, on eleven tasks; those it can't do are marked and not counted",
            "recall clearly worse than dense on a task where the control without recall is",
            "gates.suite",
            reads=("seeds", "length", "haystack", "tasks", "budget"),
            outside=("seeds", "length", "haystack", "tasks"),
        ),
    )
}


OUTSIDE = tuple(gate.name for gate in GATES.values() if gate.outside is not None)
"""Those with arms that any server can be asked for."""
LOCAL = "agreement"
"""Compares a server with this engine, on the same model."""


def known(names: list[str], outside: bool = False) -> list[str]:
    """The gates that were asked for, each once; `all`: every one but the suite, `outside` of those for a server.

    ConfigError for a name that is none.
    """
    for name in names:
        if name not in GATES and name != ALL:
            raise ConfigError(f"there is no gate '{name}'", f"one of {', '.join(GATES)}, or {ALL}")
        if outside and name not in OUTSIDE and name != ALL:
            raise ConfigError(f"gate '{name}' needs the inside of the engine", f"with --base-url: {', '.join(OUTSIDE)}")
    every = [name for name in (OUTSIDE if outside else GATES) if name != SUITE]
    return list(dict.fromkeys(gate for name in names for gate in (every if name == ALL else [name])))


def readers(option: str, outside: bool = False) -> list[str]:
    """The gates that a field of GateOptions changes; with a server each minds its time limit."""
    if option == "quick" or (outside and option == "timeout"):
        return [*GATES]
    return [gate.name for gate in GATES.values() if option in ((gate.outside if outside else gate.reads) or ())]


def run_gate(
    name: str,
    config: EngineConfig,
    options: GateOptions | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Report:
    """Load `config.model` (a path) and run one gate under the user's settings."""
    (name,) = known([name])
    from gates.context import load_context

    return run_in(name, load_context(config, options or GateOptions(), progress))


def run_in(name: str, context: Context, **sizes: int) -> Report:
    """Run one gate with a loaded model; `sizes` other than the gate's own, for tests.

    An error of the engine in the middle of a gate is a finding: FAIL with what it said. What can't be run at all
    (ConfigError, RequestError) is raised.
    """
    from engine.result import AuditError
    from gates.verdict import Check, Report

    began = time.perf_counter()
    try:
        report = import_module(GATES[name].module).run(context, **sizes)
    except (EngineError, AuditError) as error:
        failed = Check("the engine went through it", False, error.message)
        report = Report(name, checks=[failed], environment=context.environment()).judge()
    for option in {"seeds", "haystack"}.difference(GATES[name].reads):  # of these it has its own
        report.environment.pop(option, None)
    return _finished(report, began, context.options)


def _finished(report: Report, began: float, options: GateOptions) -> Report:
    """With the user's own text no answer stands in the report: it may quote it. Checks quote of prose only."""
    report.seconds = time.perf_counter() - began
    if options.haystack:
        for arm in report.arms:
            arm.outcomes = [replace(outcome, said="left out: the text is yours") for outcome in arm.outcomes]
    return report


def server(base: str, model: str | None, options: GateOptions) -> Server:
    """The server behind an address; ConfigError where none answers."""
    from gates.remote import Server

    return Server(base, model, options.timeout, quoting=options.haystack is None)


def run_remote(
    name: str,
    server: Server,
    options: GateOptions,
    progress: Callable[[str, float], None],
    config: EngineConfig | None = None,
) -> Report:
    """The black-box arms of one gate against a server; `config`: of the model that it serves, where one is loaded."""
    from gates.black_box import run
    from gates.filler import read_filler

    began = time.perf_counter()
    context = None
    if config is not None:
        from gates.context import load_context

        context = load_context(config, options, progress)
    return _finished(run(name, server, options, progress, read_filler(options.haystack), context), began, options)
