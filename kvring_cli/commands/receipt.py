"""`kvring receipt`: what a helper needs to know of this machine and its last start, fit to be shown in public."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.units import format_bytes
from kvring_cli import console
from kvring_cli.files import write

if TYPE_CHECKING:
    from engine.platform import Facts


def receipt(
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to a file, not to stdout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Sum up machine, versions, hashes and the last start, without content, names or paths: look, then share it."""
    from engine.platform import gather

    report = make(gather())
    text = json.dumps(report, ensure_ascii=False, indent=1) + "\n" if as_json else render(report)
    if output is None:
        console.write(text)
    else:
        write("--output", output, text)


def make(facts: Facts) -> dict[str, Any]:
    """Everything, already scrubbed: strings, lists of strings, and one level of both."""
    from kvring_cli import version
    from kvring_cli.install import check_install
    from kvring_cli.receipt.record import last

    start = last()
    return _scrubbed(
        {
            "kvring": version.lines()[0].removeprefix("kvring "),
            "system": f"{facts.system} {facts.release}, Python {facts.python}",
            "cpu": f"{facts.cpu.name}, {facts.cpu.processors} processors",
            "memory": _memory(facts),
            "cards": [_card(gpu) for gpu in facts.gpus] or ["none that can be read"],
            "driver": facts.driver.trouble or f"{facts.driver.version}, up to CUDA {facts.driver.cuda}",
            "torch": facts.torch.trouble
            or f"{facts.torch.version}, CUDA {facts.torch.cuda or 'no: a build for the CPU'}",
            "triton": f"{facts.triton.name} {facts.triton.version}" if facts.triton else "not installed",
            "whole": [f"{one.name} {one.status}: {one.detail}" for one in check_install()],
            "last start": _start(start) if start else ["none is recorded on this machine"],
            "settings": _settings(start),
            "lines": start["lines"] if start else [],
            "requests": start["requests"] if start else [],
        }
    )


def render(report: dict[str, Any]) -> str:
    """A line a fact; lists are indented below their name."""
    lines = ["kvring receipt"]
    for name, value in report.items():
        lines += [f"{name:<11} {value}"] if isinstance(value, str) else [name, *(f"  {one}" for one in value)]
    return "\n".join(lines) + "\n"


def _memory(facts: Facts) -> str:
    memory = facts.memory
    if memory is None:
        return "unknown"
    shown = f"{format_bytes(memory.total)}, {format_bytes(memory.free)} free"
    return shown + (f", {format_bytes(memory.commit_free)} can be committed" if memory.commit_free is not None else "")


def _card(gpu: Any) -> str:
    memory = "memory unknown" if gpu.total is None else f"{format_bytes(gpu.total)}, {format_bytes(gpu.free or 0)} free"
    parts = [gpu.name, f"capability {gpu.capability or 'unknown'}", f"{gpu.multiprocessors or '?'} SMs", memory]
    return ", ".join([*parts, *([gpu.driver_model] if gpu.driver_model else [])])


def _start(start: dict[str, Any]) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start["began"]))
    argv = " ".join(start["argv"]) or "<hidden>"
    return [f"{when}: kvring {argv}", _ending(start), f"model {start.get('model', 'was not loaded')}"]


def _ending(start: dict[str, Any]) -> str:
    """How it ended; a process that left no word and is gone was killed, or took the machine down."""
    import psutil

    if "end" in start:
        return start["end"]
    try:
        alive = psutil.Process(start["pid"]).create_time() <= start["began"]
    except psutil.Error:
        alive = False
    return "still running" if alive else "ended without a word: killed, out of memory, or a crash"


def _settings(start: dict[str, Any] | None) -> list[str]:
    """Those of the last start; without one, what the environment asks for now."""
    from engine.switches import SETTINGS, resolve
    from kvring_cli.receipt.record import shown_settings

    effective = start["settings"] if start else shown_settings(resolve("", {}, os.environ))
    return [
        f"{setting.flag[2:]} {setting.show(effective[setting.field][0])} ({effective[setting.field][1]})"
        for setting in SETTINGS
        if setting.field in effective
    ]


def _scrubbed(value: Any) -> Any:
    from kvring_cli.receipt.redact import scrub

    if isinstance(value, dict):
        return {name: _scrubbed(one) for name, one in value.items()}
    return [scrub(one) for one in value] if isinstance(value, list) else scrub(value)
