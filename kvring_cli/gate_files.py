"""Reports of gates as files that one can send: how a run is repeated, and nothing of whose it was."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from engine.switches import SETTINGS
from kvring_cli.files import as_json, write
from kvring_cli.scripts import to_paste

if TYPE_CHECKING:
    from engine.switches import Resolved
    from gates.options import GateOptions
    from gates.remote import Server
    from gates.verdict import Report


def to_send(report: Report) -> Report:
    """The report without what servers and errors told of this person and machine."""
    from kvring_cli.receipt.redact import scrub

    arms = [
        replace(
            arm, note=scrub(arm.note), outcomes=[replace(outcome, said=scrub(outcome.said)) for outcome in arm.outcomes]
        )
        for arm in report.arms
    ]
    checks = [replace(check, detail=scrub(check.detail)) for check in report.checks]
    reasons, notes, not_run = (list(map(scrub, lines)) for lines in (report.reasons, report.notes, report.not_run))
    return replace(report, arms=arms, checks=checks, reasons=reasons, notes=notes, not_run=not_run)


def repeat(names: list[str], model: str, options: GateOptions, resolved: Resolved | None, server: Server | None) -> str:
    """The command that runs these gates again; files and folders by their last name only. `resolved` None: no engine
    of our own took part."""
    words = ["kvring", "gate", *names]
    if server:
        words += ["--base-url", "URL", "--served-model", PurePath(server.model).name]
    words += [*(["--model", Path(model).name] if resolved else []), *option_words(options)]
    for setting in SETTINGS if resolved else ():
        value = resolved.sources[setting.field].value
        if value != setting.default:
            shown = f"{value}B" if setting.field.endswith("_bytes") else "PATH" if setting.place else str(value)
            switch = [setting.flag] if value is True else [f"--no-{setting.flag[2:]}"]
            words += switch if setting.boolean else [setting.flag, shown]
    return to_paste(words, os.name == "nt")


def option_words(options: GateOptions) -> list[str]:
    words: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if value != field.default:
            shown = ",".join(value) if isinstance(value, tuple) else str(value)
            words += [f"--{field.name}"] if value is True else [f"--{field.name}", Path(shown).name]
    return words


def write_all(files: dict[str, str | None], names: list[str], reports: list[Report], command: str) -> None:
    """Each file that was asked for, by its flag. Gates of `names` without a report yet stand there as inconclusive."""
    from gates.html import to_html
    from gates.junit import to_junit
    from gates.verdict import Report, to_json

    reports = [*reports, *(Report(name).judge() for name in names[len(reports) :])]

    makers = {
        "--json": lambda: as_json(to_json(reports, command)),
        "--html": lambda: to_html(reports, command),
        "--junit": lambda: to_junit(reports),
    }
    for flag, path in files.items():
        if path is not None:
            write(flag, path, makers[flag]())
