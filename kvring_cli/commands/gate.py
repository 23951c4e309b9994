"""`kvring gate`: run gates, show what they found, and exit with the worst of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import ConfigError, KVRingError
from engine.units import parse_tokens
from kvring_cli import console
from kvring_cli.options import Flags, Verbose, engine_options

if TYPE_CHECKING:
    from gates.verdict import Report

WORST_FIRST = (1, 3, 4, 5)
"""FAIL, BLIND, WEAK MODEL, INCONCLUSIVE: the exit codes by how much they should worry."""

WIDTH = 120  # of a table that goes to a file or a pipe


@engine_options
def gate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Gates to run, or all; --list names them.")
    ] = None,
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The model that is asked.")] = "phantom",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials, for CI.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Documents a task.")] = 1,
    length: Annotated[
        str | None, typer.Option("--length", metavar="TOKENS", help="Tokens of the longest prompt (260K = 266240).")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="long-problem: a map over depth and length as well.")] = False,
    haystack: Annotated[
        str | None, typer.Option("--haystack", metavar="FILE", help="Hide the facts in this text instead of prose.")
    ] = None,
    report: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the reports as JSON.")] = None,
    list_gates: Annotated[bool, typer.Option("--list", help="Name the gates and what each proves.")] = False,
    verbose: Verbose = False,
    flags: Flags,
) -> None:
    """Prove a claim on this machine with this model, beside controls that must fail. Exit code: the verdict's."""
    from gates import registry
    from gates.options import GateOptions
    from kvring_cli.start import settle

    if list_gates:
        for gate in registry.GATES.values():
            console.write(f"{gate.name}\n  proves: {gate.proves}\n  turns red: {gate.turns_red}\n")
        return
    if not names:
        raise console.BadUsage("there is no gate to run", f"one of {', '.join(registry.GATES)}, or {registry.ALL}")
    try:
        names = registry.known(names)
        tokens = parse_tokens(length) if length else None
    except (ConfigError, ValueError) as error:
        message, fix = getattr(error, "message", f"--length is '{length}'"), getattr(error, "fix", "a number of tokens")
        raise console.BadUsage(message, fix) from None
    if report is not None:
        _writable(report)
    options = GateOptions(quick=quick, seeds=seeds, grid=grid, length=tokens, haystack=haystack)
    config = settle(model, flags, verbose).config
    reports: list[Report] = []
    for name in names:
        with GateProgress(name) as progress:
            found = registry.run_gate(name, config, options, progress)
        if reports:
            console.write("\n")
        reports.append(found)
        show(found)
    if report is not None:
        _write(report, reports)
    raise typer.Exit(worst(found.exit_code for found in reports))


def worst(codes: Any) -> int:
    """Of several verdicts' exit codes."""
    codes = set(codes)
    return next((code for code in WORST_FIRST if code in codes), max(codes, default=0))


def show(report: Report) -> None:
    """The table of arms, the checks, the reasons, and the verdict last; to stdout."""
    from rich.console import Console

    out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if report.arms:
        out.print(_table(report))
    for check in report.checks:
        mark = "ok " if check.ok else "NO "
        out.print(f"{mark} {check.name}" + (f": {check.detail}" if check.detail else ""), markup=False, soft_wrap=True)
    for line in [*(f"not run: {what}" for what in report.not_run), *(f"note: {note}" for note in report.notes)]:
        out.print(line, markup=False, soft_wrap=True)
    for reason in report.reasons:
        out.print(f"    {reason}", markup=False, soft_wrap=True)
    style = "bold green" if report.exit_code == 0 else "bold red"
    out.print(f"{report.gate}: {report.verdict}  ({report.seconds:.0f} s)", style=style, markup=False)


def _table(report: Report) -> Any:
    from rich import box
    from rich.table import Table

    from engine.units import MIB

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm")
    table.add_column("task")
    for heading in ("hits", "95 %", "silent wrong", "hidden", "selected", "MiB fetched", "seconds"):
        table.add_column(heading, justify="right")
    table.add_column("kind")
    style = {"control": "yellow", "dense": "cyan"}
    for arm in report.arms:
        table.add_row(
            arm.name,
            arm.task,
            f"{arm.hits}/{arm.trials}",
            "{:.0f}-{:.0f}".format(*(100 * bound for bound in arm.interval)),
            str(arm.silent_wrong),
            f"{arm.hidden_pages:,}",
            f"{arm.pages_selected:,}",
            f"{arm.bytes_fetched / MIB:,.1f}",
            f"{arm.seconds:,.1f}",
            arm.kind + (f" (twin: {arm.twin})" if arm.twin else "") + (f"; {arm.note}" if arm.note else ""),
            style=style.get(arm.kind),
        )
    return table


class GateProgress:
    """`progress(what, share)` of a gate as a bar on stderr; on anything but a terminal, a line for each new step."""

    def __init__(self, gate: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
        self._last = ""
        self._bar = Progress(*columns, console=console.err(), transient=True)
        self._task = self._bar.add_task(gate, total=1.0)

    def __enter__(self) -> GateProgress:
        if console.err().is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, share: float) -> None:
        self._bar.update(self._task, description=what, completed=share)
        if what != self._last and not console.err().is_terminal:
            console.say(what, "dim")
        self._last = what


def _writable(path: str) -> None:
    """Before minutes of work, not after."""
    folder = Path(path).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise KVRingError(f"{path} can't be written", "another path for --json")


def _write(path: str, reports: list[Report]) -> None:
    """One report is the object itself, several are a list."""
    values = [report.to_json() for report in reports]
    try:
        text = json.dumps(values[0] if len(values) == 1 else values, indent=2, ensure_ascii=False)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise KVRingError(f"{path} can't be written: {error.strerror}", "another path for --json") from None
