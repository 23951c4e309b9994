"""`kvring doctor`: one line a check, ok / warn / fail / unknown, each with what would mend it. Exit 1 if any failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvring_cli import console, offers
from kvring_cli.options import AsJson, Flags, Verbose, engine_options

if TYPE_CHECKING:
    from engine.platform import Facts
    from engine.switches import Resolved
    from kvring_cli.install import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "unknown": "dim"}


@engine_options
def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Check this model too: whole, hash, tensors, what fits.", autocompletion=offers.MODELS
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port you mean to serve on.")] = 8000,
    install: Annotated[
        bool, typer.Option("--install", help="Hold every installed file against the wheel's record, too.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Check this machine: Python, torch, driver, card, memory, console, settings, profile. Works without a GPU."""
    from engine.platform import gather
    from kvring_cli.doctor import examine, exit_code
    from kvring_cli.start import effective, every_setting

    facts = gather()
    findings = examine(
        facts, environ=os.environ, flags=flags, model_name=model, port=port, trials=lambda: try_card(facts)
    )
    if install:
        from kvring_cli.install import check_install

        findings += [finding for finding in check_install() if finding.name == "install"]
    code = exit_code(findings)
    if as_json:
        from dataclasses import asdict

        body = {"ok": code == 0, "checks": [asdict(finding) for finding in findings], "facts": asdict(facts)}
        console.write_json({**body, "settings": _settings(flags, effective)})
    else:
        show(findings)
        if verbose:
            for line in _settings(flags, every_setting) or ():
                console.write(line + "\n")
    raise typer.Exit(code)


def _settings(flags: Flags, say: Callable[[Resolved], Any]) -> Any:
    """What is in force; None where a value is out of its range, which is a finding."""
    from engine.errors import ConfigError
    from engine.switches import resolve

    with contextlib.suppress(ConfigError):
        return say(resolve("", flags, os.environ))


def show(findings: Iterable[Finding]) -> None:
    """A line each on stdout, and its fix below it."""
    from rich.console import Console
    from rich.text import Text

    out = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        line = Text(f"{finding.status:<8}", _STYLES[finding.status])
        line.append(f"{finding.name:<16} {finding.detail}", "default")
        out.print(line)
        if finding.fix:
            out.print(Text(f"{'':8}fix: {finding.fix}"))


def try_card(facts: Facts) -> Any:
    """The card's trials; `launch` goes on to try a server on it, which needs it whole."""
    from engine.trials import PIN_LIMIT, try_apart

    budget = facts.gpu.pin_budget(facts.memory) if facts.gpu and facts.memory else None
    return try_apart(PIN_LIMIT if budget is None else budget)
