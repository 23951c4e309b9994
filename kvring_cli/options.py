"""Options that several commands share, declared once: the engine's settings and how tokens are drawn.

A decorator adds them to a command's signature and hands them over as one argument, so that no command can accept a
flag that it doesn't pass on: `flags` by field of EngineConfig, `sampling` as a SamplingParams.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from engine.config import SamplingParams
from engine.errors import ConfigError, RequestError
from engine.limits import check_sampling
from engine.switches import SETTINGS, Setting
from kvring_cli import console, offers

Flags = dict[str, Any]
Command = Callable[..., Any]

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that was pulled, a folder, a .gguf file, or phantom.",
        autocompletion=offers.MODELS,
    ),
]
MeasuredModel = Annotated[
    str, typer.Option("--model", "-m", help="The model that is measured.", autocompletion=offers.MODELS)
]
CardProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="CARD",
        help="Start from the preset of a card: 8gb, 10gb, 12gb, 16gb, 24gb.",
        autocompletion=offers.PROFILES,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
ReportFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON.")]
ServeOptions = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- OPTION...]", help="After --: options for kvring serve.", show_default=False),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every effective setting with its source.")]


def model_and_options(model: str, options: list[str] | None) -> tuple[str, list[str]]:
    """MODEL and what stands after --. Where MODEL was left out the first word after -- stood in its place."""
    from kvring_cli.models import PHANTOM

    return (PHANTOM, [model, *(options or [])]) if model.startswith("-") else (model, options or [])


def engine_options(command: Command) -> Command:
    """`command(..., flags: Flags)` gets the flags that were given, by field of EngineConfig."""
    return _gather(command, "flags", [_parameter(setting) for setting in SETTINGS], lambda **flags: flags)


def sampling_options(command: Command) -> Command:
    """`command(..., sampling: SamplingParams)` gets how tokens are drawn; out of range is bad usage."""
    parameters = [
        _option(name, kind, flags, text, "Sampling", getattr(SamplingParams, name))
        for name, kind, flags, text in _SAMPLING
    ]
    stop = _option("stop", list[str] | None, ("--stop",), "End the answer before this text. Repeats.", "Sampling", None)

    def make(stop: list[str] | None, **values: Any) -> SamplingParams:
        params = SamplingParams(stop=tuple(stop or ()), **values)
        try:
            check_sampling(params)
        except RequestError as error:
            raise console.BadUsage(error.message, error.fix) from None
        return params

    return _gather(command, "sampling", [*parameters, stop], make)


_SAMPLING: tuple[tuple[str, Any, tuple[str, ...], str], ...] = (
    ("max_tokens", int | None, ("--max-tokens", "-n"), "Longest answer. Left out: what fits, at most 32,768."),
    ("temperature", float, ("--temperature", "-t"), "0 takes the likeliest token."),
    ("top_p", float, ("--top-p",), "Draw from the likeliest tokens that make up this probability."),
    ("top_k", int, ("--top-k",), "Draw from this many likeliest tokens; 0 is all."),
    ("min_p", float, ("--min-p",), "Drop tokens below this share of the likeliest one's probability."),
    ("presence_penalty", float, ("--presence-penalty",), "Against tokens that were generated before."),
    ("frequency_penalty", float, ("--frequency-penalty",), "Against tokens, by how often they were generated."),
    ("repetition_penalty", float, ("--repetition-penalty",), "Against tokens of prompt and answer; 1 is none."),
    ("seed", int | None, ("--seed",), "Draw the same tokens again."),
)


def _parameter(setting: Setting) -> inspect.Parameter:
    flags = (f"{setting.flag}/--no-{setting.flag[2:]}",) if setting.boolean else (setting.flag,)
    default = setting.show(setting.default)
    takes = "" if setting.boolean else f" Takes {setting.values}."
    switch = f" Switch: {setting.switch}." if setting.switch else ""
    text = f"{setting.help}{takes} Default: {default}.{switch}"
    kind = bool | None if setting.boolean else str | None
    shown: dict[str, Any] = {} if setting.boolean else {"metavar": "VALUE"}
    if setting.words:
        shown["autocompletion"] = offers.offer(lambda: setting.words)
    return _option(setting.field, kind, flags, text, setting.group, None, callback=_check(setting), **shown)


def _check(setting: Setting) -> Callable[[Any], Any]:
    """A value that the flag doesn't take is bad usage, before anything is loaded. The text itself is passed on."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            try:
                setting.read(value, setting.flag)
            except ConfigError:
                raise typer.BadParameter(f"'{value}' is out of its range: {setting.values}") from None
        return value

    return check


def _option(
    name: str, kind: Any, flags: Iterable[str], text: str, panel: str, default: Any, **more: Any
) -> inspect.Parameter:
    option = typer.Option(*flags, help=text, rich_help_panel=panel, show_default=default is not None, **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _gather(command: Command, into: str, parameters: list[inspect.Parameter], make: Callable[..., Any]) -> Command:
    """`command` with its parameter `into` replaced by `parameters`, whose values `make` turns into that argument."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != into]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        gathered = {parameter.name: kwargs.pop(parameter.name) for parameter in parameters}
        return command(*args, **{into: make(**gathered)}, **kwargs)

    whole = signature.replace(parameters=[*own, *parameters])
    wrapper.__signature__ = whole  # type: ignore[attr-defined]
    wrapper.__annotations__ = {name: parameter.annotation for name, parameter in whole.parameters.items()}
    del wrapper.__wrapped__  # typer reads annotations through it
    return wrapper
