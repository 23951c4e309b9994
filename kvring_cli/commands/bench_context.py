"""`kvring bench context`: first token, tokens a second, device memory and RAM, climbing from context to context."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.units import GIB
from kvring_cli import console
from kvring_cli.commands.bench_options import AnyModel, Contexts, Decoded, Plot, Rows, Sweep, header, length
from kvring_cli.files import check_json, save_json
from kvring_cli.options import Flags, Verbose, engine_options
from kvring_cli.plot import Curve, check_plot, draw
from kvring_cli.sweep import cases

if TYPE_CHECKING:
    from gates.climb import Rung

COLUMNS = ("context", "first token", "tok/s", "device memory", "process RAM", "fetched a token")


@engine_options
def context(
    model: AnyModel = "phantom",
    contexts: Contexts = "8K,32K,128K,256K",
    tokens: Decoded = 32,
    fill: Annotated[
        str, typer.Option("--fill", help="How documents are read: exact, window, or auto: exact on a card.")
    ] = "auto",
    output: Rows = None,
    sweep: Sweep = None,
    plot: Plot = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """What a longer context costs here, step by step, up to what memory holds. Prints a Markdown table."""
    lengths = [length(part) for part in contexts.split(",")]
    if fill not in ("auto", "exact", "window"):
        raise typer.BadParameter(f"'{fill}' is not one of auto, exact, window", param_hint="--fill")
    swept = cases(sweep, flags, {"max_context": "--contexts 8K,32K", "prefill": "--fill"})
    check_plot(plot)
    check_json(output)
    from gates.climb import Rung, climb
    from kvring_cli.start import settle

    found: list[tuple[str, Rung]] = []
    ends = {}
    for number, case in enumerate(swept):
        last = None
        config = settle(model, case.flags, verbose).config
        if number == 0:
            console.write(header(COLUMNS, bool(sweep)))
        for step in climb(config, lengths, tokens, fill, lambda line: console.say(line, "dim")):
            if not isinstance(step, Rung):
                ends[case.label] = step
                console.say(f"{case.label or 'the climb'} ends before {step.context:,} tokens: {step.reason}")
                continue
            console.write(_line(step, last, [case.label] if sweep else []))
            found.append((case.label, step))
            last = step
    rows = [{"setting": label, **asdict(rung)} for label, rung in found]
    stopped = [{"setting": label, **asdict(end)} for label, end in ends.items()]
    save_json(output, {"rows": rows, "stopped": stopped})
    if plot is not None:
        draw(plot, f"{Path(model).name}, {found[0][1].backend}", _curves(found))


def _line(rung: Rung, last: Rung | None, first: list[str]) -> str:
    cells = [
        *first,
        f"{rung.context:,}",
        f"{rung.first_token:,.2f} s{_times(rung.first_token, last and last.first_token)}",
        f"{rung.tokens_per_second:,.1f}{_times(rung.tokens_per_second, last and last.tokens_per_second)}",
        _memory(rung.device, last and last.device),
        _memory(rung.ram, last and last.ram),
        f"{rung.fetched:,.1f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _times(now: float, before: float | None) -> str:
    return f" (x {now / before:.2f})" if before else ""


def _memory(now: int | None, before: int | None) -> str:
    if now is None:
        return "-"
    return f"{now / GIB:.2f} GiB" + (f" ({(now - before) / GIB:+.2f})" if before is not None else "")


def _curves(found: list[tuple[str, Rung]]) -> list[Curve]:
    def curves(unit: str, value) -> list[Curve]:
        labels = dict.fromkeys(label for label, _ in found)
        points = {name: [(rung.context, value(rung)) for label, rung in found if label == name] for name in labels}
        return [Curve(name or unit, unit, some) for name, some in points.items()]

    memory = curves("process RAM, GiB", lambda rung: rung.ram / GIB)
    if found[0][1].device is not None:
        memory += curves("device memory, GiB", lambda rung: rung.device / GIB)
    first = curves("first token, s", lambda rung: rung.first_token)
    return [*curves("tokens a second", lambda rung: rung.tokens_per_second), *first, *memory]
