"""`kvring smoke`: does a real server start, answer, remember and stop on this machine?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvring_cli.files import check_json, save_json
from kvring_cli.options import Model, ReportFile, ServeOptions, model_and_options


def smoke(
    model: Model = "phantom",
    options: ServeOptions = None,
    *,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds until it must be ready, and for each answer.")
    ] = 120.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Judge the values in the answers of any model, not of the phantom alone.")
    ] = False,
    report: ReportFile = None,
) -> None:
    """Start a server on a free port, ask it twice, stop it. Exit code: PASS 0, FAIL 1, refused to start 3."""
    from gates.smoke import run
    from kvring_cli.commands.gate import GateProgress, show

    check_json(report)
    model, options = model_and_options(model, options)
    with GateProgress("smoke") as progress:
        found = run(model, options=options, timeout=timeout, strict=strict, say=progress)
    show(found)
    save_json(report, found.to_json())
    raise typer.Exit(found.exit_code)
