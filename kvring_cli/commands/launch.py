"""`kvring launch`: look, choose, plan, try, serve. Each decision is printed; the first thing that is wrong ends it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import ConfigError, KVRingError
from kvring_cli import console, offers
from kvring_cli.options import Flags, engine_options, model_and_options

if TYPE_CHECKING:
    from engine.platform import Facts
    from kvring_cli.engines import Choice

SMOKE_SECONDS = 900.0
"""Until it must be ready, and for each answer: the first start of a large model on a slow disk takes minutes."""

_SIZES = ("--profile", "--vram-limit", "--kv-window", "--prefill-chunk")


@engine_options
def launch(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="A name that was pulled, a folder, a .gguf file, or phantom.",
            autocompletion=offers.MODELS,
        ),
    ] = "phantom",
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTION...]", help="After --: more options for kvring serve.", show_default=False),
    ] = None,
    *,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            help="Settings for a size of card. Left out: what suits this one.",
            autocompletion=offers.PROFILES,
        ),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke/--no-smoke", help="Try a whole start and two questions first.")
    ] = True,
    write: Annotated[
        str | None,
        typer.Option("--write", metavar="FILE", help="Don't serve: write a start.bat, .cmd, .ps1 or .sh that does."),
    ] = None,
    flags: Flags,
) -> None:
    """Check this machine, choose the engine, plan, try, then serve. Or write a script to double-click."""
    from engine.platform import gather
    from kvring_cli import models, scripts
    from kvring_cli.app import check_line
    from kvring_cli.cards import find_preset
    from kvring_cli.engines import without_cards

    model, options = model_and_options(model, options)
    check_line(["serve", model, *options])
    if any(word.partition("=")[0] == "--port" for word in options):
        raise console.BadUsage(
            "--port stands after --, and launch has one of its own", "kvring launch MODEL --port 9000"
        )
    if write is not None:
        scripts.check(Path(write))
    if profile is not None:
        find_preset(profile)
    path = str(models.resolve(model))
    if Path(model).exists():
        model = os.path.abspath(os.path.expanduser(model))
    if model == models.PHANTOM:
        console.say("note: phantom only looks things up, to prove the engine; give MODEL for one that converses")
    facts = gather()
    if flags.get("device") == "cpu":
        facts = without_cards(facts)
    _examine(facts, flags, port)
    choice = _pick(facts)
    line = serve_line(choice, model, profile, flags, os.environ)
    line += _plan(path, facts, [*line, *options])
    line += ["--port", str(port), *options]
    if smoke:
        _try(model, line[2:], options)
    if write is not None:
        _write(Path(write), line)
        return
    console.say(f"serve  | kvring {scripts.to_paste(line, os.name == 'nt')}", "bold")
    from kvring_cli.app import call

    raise typer.Exit(call(line))


def serve_line(choice: Choice, model: str, profile: str | None, flags: Flags, environ: Mapping[str, str]) -> list[str]:
    """`serve`'s words: what was given as flag or switch, and what the engine's choice says of everything else.

    Switches become flags, so that the line means the same in another window.
    """
    from engine.switches import SETTINGS, resolve

    resolved = resolve(model, flags, environ)
    given = {setting.field: setting for setting in SETTINGS if resolved.sources[setting.field].source != "default"}
    picked = dict(choice.settings)
    if profile is not None:
        picked = {name: value for name, value in picked.items() if name not in _SIZES} | {"--profile": profile}
    if "kv_capacity" in given:
        picked.pop("--kv-window", None)
    line = ["serve", model]
    for name, value in picked.items():
        if name not in {setting.flag for setting in given.values()}:
            line += [name, value]
    for field, setting in given.items():
        value = resolved.sources[field].value
        if setting.boolean:
            line.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        elif field.endswith("_path"):
            line += [setting.flag, os.path.abspath(os.path.expanduser(value))]
        else:
            line += [setting.flag, flags[field] if isinstance(flags.get(field), str) else str(value)]
    return line


def _examine(facts: Facts, flags: Flags, port: int) -> None:
    """Doctor's checks. One that failed ends it; so does a port that is taken, which doctor only warns of."""
    from kvring_cli.commands.doctor import try_card
    from kvring_cli.doctor import examine

    findings = examine(facts, environ=os.environ, flags=flags, port=port or 1, trials=lambda: try_card(facts))
    for finding in findings:
        if finding.status == "fail" or (finding.name == "port" and port and finding.status == "warn"):
            raise KVRingError(f"doctor: {finding.name}: {finding.detail}", finding.fix)
    counts = {status: sum(one.status == status for one in findings) for status in ("ok", "warn", "unknown")}
    console.say(f"doctor | {', '.join(f'{count} {status}' for status, count in counts.items() if count)}")
    for finding in findings:
        if finding.status == "warn":
            console.warn(f"{finding.name}: {finding.detail}")


def _pick(facts: Facts) -> Choice:
    from kvring_cli.engines import pick_engine, pretends

    environ = dict(os.environ)
    if pretends(environ) and (facts.gpu is None or facts.gpu.capability is not None):
        console.warn("NINFER_AGENT_CC is not read: what is launched runs on what is here")
        del environ["NINFER_AGENT_CC"]
    choice = pick_engine(facts, environ)
    if choice.exit_code:
        console.report(KVRingError(f"pick-engine: {choice.reason}", choice.fix))
        raise typer.Exit(choice.exit_code)
    console.say(f"engine | {choice.engine} on {choice.card}: {choice.reason}")
    return choice


def _plan(path: str, facts: Facts, line: Sequence[str]) -> list[str]:
    """Words to add so that the model fits, if it doesn't as it is; ConfigError with what would."""
    from kvring_cli.fewer_bits import Asked, fewer_bits, too_large

    asked = Asked.of(path, facts, line, os.environ)
    plan, more = asked.plan(), []
    if fitting := fewer_bits(asked, plan):
        console.say(f"weights| {fitting[0]}, quantised while they are loaded: as they are, {too_large(plan)}")
        more, plan = ["--weights", fitting[0]], fitting[1]
    if plan.capacity is None:
        raise ConfigError(f"plan: {plan.refusal}", plan.fix)
    console.say(f"plan   | {plan.summary()}")
    return more


def _try(model: str, settings: Sequence[str], options: Sequence[str]) -> None:
    """A whole start on a free port, two questions, a whole stop."""
    from gates.smoke import run

    port = settings.index("--port")
    began = time.monotonic()
    with console.err().status("smoke: starting a server to try it"):
        report = run(model, options=[*settings[:port], *options], timeout=SMOKE_SECONDS)
    if report.exit_code:
        for reason in report.reasons:
            console.say(f"  {reason}")
        wrong = next((f"{check.name}: {check.detail}" for check in report.checks if not check.ok), report.verdict)
        raise KVRingError(f"smoke: {wrong}", "the server's own lines above say why; --no-smoke serves all the same")
    console.say(f"smoke  | PASS in {time.monotonic() - began:.0f} s")


def _write(path: Path, line: Sequence[str]) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from kvring_cli import scripts

    scripts.write(path, [sys.executable, "-m", "kvring_cli.app", *line])
    console.say(f"write  | {path} runs kvring {scripts.to_paste(line, os.name == 'nt')}", "bold")
    if (path.suffix.lower() == ".sh") == (os.name == "nt"):
        console.warn(f"{path.name} is for another system than this one, and its paths are of this one")
    if any(word.partition("=")[0] == "--api-key" for word in line):
        console.warn(f"the key stands in {path} as it is: who can read the file has it")
    try:
        version("kvring")
    except PackageNotFoundError:
        console.warn("kvring is not installed in this Python: the script finds it from this folder only")
