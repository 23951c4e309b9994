"""`--sweep name=a,b,c`: one setting of the engine under several values, the rest as the other flags say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import typer

from engine.errors import ConfigError
from engine.switches import SETTINGS
from kvring_cli import console
from kvring_cli.options import Flags


@dataclass(frozen=True)
class Case:
    """`label` is empty where nothing is swept. `reload`: the value decides how weights are held."""

    label: str
    flags: Flags
    reload: bool = False


def cases(sweep: str | None, flags: Flags, decided: Mapping[str, str]) -> list[Case]:
    """One case a value, in the order given; each value is held against the setting's range before anything runs.

    decided: settings that the command decides itself, by field, with the option that asks it for another: given as a
    flag or swept they would do nothing, so both are bad usage.
    """
    for field in decided:
        if flags.get(field) is not None:
            raise console.BadUsage(f"{_flag(field)} is decided by this command itself", decided[field])
    if sweep is None:
        return [Case("", flags)]
    name, sign, values = sweep.partition("=")
    name = name.strip().removeprefix("--").replace("_", "-")
    setting = next((setting for setting in SETTINGS if setting.flag == f"--{name}"), None)
    if not sign or setting is None:
        known = ", ".join(setting.flag[2:] for setting in SETTINGS)
        raise typer.BadParameter(f"'{sweep}' is not name=a,b,c with a name of {known}", param_hint="--sweep")
    if setting.field in decided:
        raise typer.BadParameter(
            f"{setting.flag} is decided by this command itself: {decided[setting.field]}", param_hint="--sweep"
        )
    if flags.get(setting.field) is not None:
        raise typer.BadParameter(f"{setting.flag} is given too", param_hint="--sweep")
    found = []
    for text in filter(None, (value.strip() for value in values.split(","))):
        words = {"on": "1", "off": "0"} if setting.boolean else {}
        try:
            value = setting.read(words.get(text, text), setting.flag)
        except ConfigError as error:
            raise typer.BadParameter(error.message, param_hint="--sweep") from None
        label = f"{setting.flag[2:]} {setting.show(value)}"
        found.append(Case(label, {**flags, setting.field: value}, setting.group == "Compute"))
    if not found:
        raise typer.BadParameter(f"'{sweep}' names no value", param_hint="--sweep")
    return found


def _flag(field: str) -> str:
    return next(setting.flag for setting in SETTINGS if setting.field == field)
