"""One answer on its way to a person: a bar while a long prompt is computed, tokens to stdout, a summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.units import format_bytes
from kvring_cli import console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from engine.engine import Engine
    from engine.prepare import Prepared
    from engine.result import Result

LONG_PREFILL = 2048
"""Prompt tokens from which a bar is worth drawing."""


class Stopped(Exception):
    """Ctrl-C ended the answer. `text` is what was written of it."""

    def __init__(self, text: str) -> None:
        super().__init__("stopped")
        self.text = text


def answer(engine: Engine, prepared: Prepared, write: Callable[[str], None] | None = console.write) -> Result:
    """Generate to the end; `write` takes each piece of text (None: nobody reads along).

    Raises Stopped after Ctrl-C, with the request cancelled and the engine ready for the next one.
    """
    from engine.result import Progress, Result, Token

    written: list[str] = []
    events = engine.generate(prepared)
    with _Bar() as bar, console.Interrupts(_notice) as interrupts:
        try:
            for event in events:
                if isinstance(event, Progress):
                    bar.update(event)
                elif isinstance(event, Token):
                    bar.close()
                    if event.text:
                        written.append(event.text)
                        if write is not None:
                            write(event.text)
                elif isinstance(event, Result):
                    return event
                if interrupts.asked:
                    raise Stopped("".join(written))
        finally:
            events.close()
            bar.close()
            if write is not None and written and not written[-1].endswith("\n"):
                write("\n")
    raise AssertionError("the engine ended without a result")


def _notice() -> None:
    if sys.stderr.isatty():
        console.say("stopping after this step (Ctrl-C again stops now)")


class _Bar:
    """The progress of a prefill on stderr. Drawn on a terminal only, and only where it lasts."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: Any = None
        self._closed = False

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, event: Any) -> None:
        if self._bar is None:
            if self._closed or event.total - event.done < LONG_PREFILL or not console.err().is_terminal:
                self._closed = True
                return
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("prefill {task.fields[mode]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=console.err(), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("prefill", total=event.total, mode=event.mode)
        self._bar.update(self._task, completed=event.done, mode=event.mode)

    def close(self) -> None:
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def summary(result: Result) -> str:
    """What it cost, in one line."""
    usage, recall, timings = result.usage, result.recall, result.timings
    prefill, decode = timings.rates(usage)
    share = 100 * usage.cached / usage.prompt if usage.prompt else 0.0
    fields = [
        f"done | {result.finish}",
        f"prompt {usage.prompt:,}",
        f"cache {usage.cached:,} ({share:.1f}%)",
        f"output {usage.generated:,}",
        f"first token {1000 * timings.first_token:,.0f} ms",
        f"prefill {prefill:,.0f} tok/s",
        f"decode {decode:,.1f} tok/s",
    ]
    if recall.over_pool:
        fields += [
            f"select {recall.pages_selected:,} pages",
            f"fetched {recall.layer_pages_fetched:,} layer pages, {format_bytes(recall.bytes_fetched)}",
            f"prefill {'+'.join(recall.prefill_modes)}, decode {recall.decode_mode}",
        ]
    else:
        fields.append("everything fits the pool: dense")
    return " | ".join(fields)


def report(result: Result) -> None:
    """Warnings and the summary, to stderr."""
    for warning in result.warnings:
        console.warn(warning)
    console.say(summary(result), "dim")


def as_json(result: Result) -> dict[str, Any]:
    """A result's numbers by their names in engine/result.py, with the two rates."""
    prefill, decode = result.timings.rates(result.usage)
    return {
        "answer": result.text,
        "finish": result.finish,
        "usage": dict(vars(result.usage)),
        "recall": dict(vars(result.recall)),
        "timings": {
            **vars(result.timings),
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
        },
        "warnings": list(result.warnings),
    }
