"""`kvring bench rates`: prefill, decode and second turn over context lengths, beside the floors of the same run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvring_cli import console
from kvring_cli.commands.bench_options import AnyModel, Contexts, Decoded, Plot, Rows, Sweep, header, known, length
from kvring_cli.files import check_json, save_json
from kvring_cli.options import Flags, Verbose, engine_options
from kvring_cli.plot import Curve, check_plot, draw
from kvring_cli.sweep import cases

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from gates.rates import Bench, Row

PARTS = ("prefill", "window", "recall", "drawn", "exact", "dense", "second")
COLUMNS = ("what", "context", "tok/s", "ms", "of the floor", "GB/s or TFLOP/s", "fetched a step", "beside weights")
DECIDED = {"max_context": "--contexts 8K,32K", "prefill": "--fill", "decode": "--parts recall,exact,dense"}
FILLS = ("exact", "window")
PEERS = ("transformers", "transformers-offloaded")


@engine_options
def rates(
    model: AnyModel = "phantom",
    contexts: Contexts = "8K,32K",
    parts: Annotated[str, typer.Option("--parts", help=f"Of {', '.join(PARTS)}.")] = "prefill,recall,second",
    tokens: Decoded = 64,
    fill: Annotated[str, typer.Option("--fill", help=f"Documents before a decode: {' or '.join(FILLS)}.")] = "window",
    peer: Annotated[str | None, typer.Option("--peer", help=" or ".join(PEERS) + ", with commas.")] = None,
    output: Rows = None,
    sweep: Sweep = None,
    plot: Plot = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Tokens a second over context lengths, with the share of the floor that was reached. Prints a Markdown table."""
    from engine.device import resolve_device, resolve_dtype
    from engine.pauses import let_go
    from gates.floors import measure_floors
    from gates.rates import Bench
    from kvring_cli.start import settle

    lengths = [length(part) for part in contexts.split(",")]
    chosen, peers = known(parts, PARTS, "--parts"), [] if peer is None else known(peer, PEERS, "--peer")
    known(fill, FILLS, "--fill")
    swept = cases(sweep, flags, DECIDED)
    check_plot(plot)
    check_json(output)
    rows: list[Row] = []
    floors = model_ = None
    for number, case in enumerate(swept):
        config = settle(model, case.flags, verbose).config
        device = resolve_device(config.device)
        if case.reload:
            model_ = None  # not beside the one that is loaded next
            let_go()
        if floors is None or case.reload:
            floors = measure_floors(device, resolve_dtype(config.dtype, device, config.model))
            console.write(floors.lines() + "\n\n")
        if number == 0:
            console.write(header(COLUMNS, bool(sweep)))
        bench = Bench(config, floors, lambda line: console.say(line, "dim"), model_)
        for row in _rows(bench, lengths, chosen, tokens, fill):
            rows.append(replace(row, setting=case.label))
            console.write(_line(rows[-1], bool(sweep)) + "\n")
        model_, bench.model = bench.model, None
    del model_, bench  # a peer wants the card to itself
    for row in _peer_rows(config, peers, lengths, tokens):
        rows.append(row)
        console.write(_line(row, bool(sweep)) + "\n")
    save_json(output, {"floors": asdict(floors), "rows": [asdict(row) for row in rows]})
    if plot is not None:
        draw(plot, f"{Path(model).name}, {floors.lines()}", _curves(rows))


def _rows(bench: Bench, lengths: list[int], parts: list[str], tokens: int, fill: str) -> Iterator[Row]:
    for part in parts:
        if part in ("prefill", "window"):
            yield from bench.prefill(lengths, "exact" if part == "prefill" else "window")
        elif part == "second":
            yield from bench.second_turn(lengths, 64, fill)
        else:
            yield from bench.decode(lengths, part, tokens, fill)


def _peer_rows(config: EngineConfig, peers: list[str], lengths: list[int], tokens: int) -> Iterator[Row]:
    import torch

    from engine.device import resolve_device, resolve_dtype
    from gates.rates import transformers_rows

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, config.model)
    for peer in peers:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        console.say(f"peer {peer}", "dim")
        yield from transformers_rows(
            config.model, lengths, peer.endswith("offloaded"), min(tokens, 16), device, dtype, config.prefill_chunk
        )


def _curves(rows: list[Row]) -> list[Curve]:
    """Tokens a second, and milliseconds to the first token of second turns, by what and setting."""
    found = {}
    for row in rows:
        second = row.what.startswith("second turn")
        name = "second turn" if second else row.what
        unit, value = ("ms", row.milliseconds) if second else ("tokens a second", row.tokens_per_second)
        found.setdefault((f"{name} {row.setting}".strip(), unit), []).append((row.context, value))
    return [Curve(name, unit, points) for (name, unit), points in found.items()]


def _line(row: Row, swept: bool) -> str:
    rate = row.bytes_per_second and f"{row.bytes_per_second / 1e9:,.0f} GB/s"
    rate = rate or (row.flops and f"{row.flops / 1e12:,.1f} TFLOP/s")
    beside = row.beside_bytes if row.beside_bytes is not None else row.peak_bytes
    cells = [
        *([row.setting] if swept else []),
        row.what,
        f"{row.context:,}",
        f"{row.tokens_per_second:,.1f}",
        f"{row.milliseconds:,.2f}",
        f"{row.floor:.0%}" if row.floor is not None else "",
        rate or "",
        f"{row.fetched:,.1f}" if row.fetched is not None else "",
        f"{beside / 2**30:.2f} GiB" if beside else "",
    ]
    return f"| {' | '.join(cells)} |" + (f" <!-- {row.steps_by} -->" if row.steps_by else "")
