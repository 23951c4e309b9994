"""`kvring gate`: run gates, show what they found, and exit with the worst of it."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import ConfigError
from engine.units import parse_tokens
from kvring_cli import console, offers
from kvring_cli.files import check_reports
from kvring_cli.gate_files import repeat, to_send, write_all
from kvring_cli.models import PHANTOM
from kvring_cli.options import Flags, Verbose, engine_options

if TYPE_CHECKING:
    from gates.options import GateOptions
    from gates.verdict import Report

LONGEST = 1 << 24  # tokens of a document: more than any model's context, and what memory holds while it is written
WIDTH = 120  # of a table that goes to a file or a pipe


@engine_options
def gate(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Gates to run, or all; --list names them.", autocompletion=offers.GATES),
    ] = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="The model that is asked; for agreement with a server, the one it serves.",
            autocompletion=offers.MODELS,
        ),
    ] = PHANTOM,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials, for CI.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Documents a task.")] = 1,
    length: Annotated[
        str | None,
        typer.Option("--length", "--context", metavar="TOKENS", help="Of the longest prompt (260K = 266240)."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TOKENS", help="suite: of the pool. Left out: a 16th of it."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="NAMES", help="suite: some tasks, with commas between.")
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="long-problem: a map over depth and length as well.")] = False,
    haystack: Annotated[
        str | None, typer.Option("--haystack", metavar="FILE", help="Hide the facts in this text instead of prose.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", metavar="URL", help="Ask this OpenAI-compatible server instead.")
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--served-model", metavar="NAME", help="The server's name for its model.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one answer of a server.")] = 600,
    report: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the reports as JSON.")] = None,
    html: Annotated[str | None, typer.Option("--html", metavar="FILE", help="Write one page that can be sent.")] = None,
    junit: Annotated[
        str | None, typer.Option("--junit", metavar="FILE", help="Write the reports as JUnit XML.")
    ] = None,
    list_gates: Annotated[bool, typer.Option("--list", help="Name the gates and what each proves.")] = False,
    verbose: Verbose = False,
    flags: Flags,
) -> None:
    """Prove a claim on this machine with this model, beside controls that must fail. Exit code: the verdict's."""
    from gates import registry
    from gates.options import GateOptions
    from gates.verdict import EXIT, worst
    from kvring_cli.start import settle

    if list_gates:
        for gate in registry.GATES.values():
            console.write(f"{gate.name}\n  proves: {gate.proves}\n  turns red: {gate.turns_red}\n")
        return
    if not names:
        raise console.BadUsage("there is no gate to run", f"one of {', '.join(registry.GATES)}, or {registry.ALL}")
    try:
        names = registry.known(names, outside=bool(base_url))
        tokens, pool = (_tokens(flag, text) for flag, text in (("--length", length), ("--budget", budget)))
    except ConfigError as error:
        raise console.BadUsage(error.message, error.fix) from None
    some = tuple(filter(None, (tasks or "").replace(" ", "").split(",")))
    options = GateOptions(quick, seeds, grid, tokens, pool, some, haystack, timeout)
    _refuse_unread(names, options, bool(base_url), served_model)
    if base_url and registry.LOCAL not in names and (model != PHANTOM or any(v is not None for v in flags.values())):
        what = "-m and the engine's settings change nothing of a server"
        raise console.BadUsage(what, f"leave them out; --served-model names its model, {registry.LOCAL} takes -m")
    if pool and flags["kv_capacity"] is not None:
        raise console.BadUsage("--budget and --kv-capacity both say how large the pool is", "leave one out")
    files = {"--json": report, "--html": html, "--junit": junit}
    check_reports(files, {"--haystack": haystack, "--model": model})
    server = registry.server(base_url, served_model, options) if base_url else None
    inside = server is None or registry.LOCAL in names
    resolved = settle(model, flags, verbose) if inside else None
    again = repeat(names, model, options, resolved, server)
    reports: list[Report] = []
    write_all(files, names, reports, again)  # so that no report of an earlier run stands there for this one
    for name in names:
        with GateProgress(name) as progress:
            if server:
                config = resolved.config if name == registry.LOCAL else None
                found = registry.run_remote(name, server, options, progress, config)
            else:
                found = registry.run_gate(name, resolved.config, options, progress)
        if reports:
            console.write("\n")
        show(found)
        reports.append(to_send(found))
        write_all(files, names, reports, again)  # after each, so that what a later one breaks off is not lost
    raise typer.Exit(EXIT[worst(reports)])


def _tokens(flag: str, text: str | None) -> int | None:
    tokens = None if text is None else parse_tokens(text)
    if tokens is not None and not 0 < tokens <= LONGEST:
        raise ConfigError(f"{flag} {text} is no length", f"1 to {LONGEST:,} tokens, or leave {flag} out")
    return tokens


def _refuse_unread(names: list[str], options: GateOptions, served: bool, served_model: str | None) -> None:
    """BadUsage for what was given and none of these gates would read."""
    from gates.registry import readers

    if served_model is not None and not served:
        raise console.BadUsage("--served-model names a model of a server", "give its address too: --base-url URL")
    for field in fields(options):
        able = readers(field.name, served)
        if getattr(options, field.name) != field.default and not set(able).intersection(names):
            there = " with --base-url" if served else ""
            fix = f"leave it out; {', '.join(able)} would{there}" if able else f"leave it out{there}"
            raise console.BadUsage(f"--{field.name} changes nothing of {', '.join(names)}{there}", fix)


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
