"""`kvring bench rates`: prefill, decode and second turn over context lengths, beside the floors of the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvring_cli import console
from kvring_cli.options import Flags, Verbose, engine_options

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from gates.floors import Floors
    from gates.rates import Row

PARTS = ("prefill", "window", "recall", "exact", "dense", "second")
COLUMNS = ("what", "context", "tok/s", "ms", "of the floor", "GB/s or TFLOP/s", "fetched a step", "beside weights")
PEERS = ("transformers", "transformers-offloaded")


@engine_options
def rates(
    model: Annotated[str, typer.Option("--model", "-m", help="A model, or random:qwen3-8b and the like.")] = "phantom",
    contexts: Annotated[str, typer.Option("--contexts", help="Lengths in tokens, with commas.")] = "8192,32768",
    parts: Annotated[str, typer.Option("--parts", help=f"Of {', '.join(PARTS)}.")] = "prefill,recall,second",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens decoded.")] = 64,
    fill: Annotated[str, typer.Option("--fill", help="How documents are computed before a decode.")] = "window",
    peer: Annotated[str | None, typer.Option("--peer", help=" or ".join(PEERS) + ", with commas.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Tokens a second over context lengths, with the share of the floor that was reached. Prints a Markdown table."""
    from engine.device import resolve_device, resolve_dtype
    from gates.floors import measure_floors
    from kvring_cli.start import settle

    lengths = [_length(part) for part in contexts.split(",")]
    chosen, peers = _known(parts, PARTS, "--parts"), _known(peer or "", PEERS, "--peer")
    config = settle(model, flags, verbose).config
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, config.model)
    floors = measure_floors(device, dtype)
    console.write(floors.lines() + "\n\n")
    console.write(
        "| what | context | tok/s | ms | of the floor | GB/s or TFLOP/s | fetched a step | beside weights |\n"
    )
    console.write("| --- | --- | --- | --- | --- | --- | --- | --- |\n")
    rows = []
    for row in _rows(config, floors, lengths, chosen, peers, tokens, fill):
        rows.append(row)
        console.write(_line(row) + "\n")
    if output is not None:
        output.write_text(
            json.dumps({"floors": asdict(floors), "rows": [asdict(row) for row in rows]}, indent=1), encoding="utf-8"
        )


def _rows(
    config: EngineConfig, floors: Floors, lengths: list[int], parts: list[str], peers: list[str], tokens: int, fill: str
) -> Iterator[Row]:
    import torch

    from engine.device import resolve_device, resolve_dtype
    from gates.rates import Bench, transformers_rows

    def say(line: str) -> None:
        console.say(line, "dim")

    bench = Bench(config, floors, say)
    for part in parts:
        if part in ("prefill", "window"):
            yield from bench.prefill(lengths, "exact" if part == "prefill" else "window")
        elif part == "second":
            yield from bench.second_turn(lengths, 64, fill)
        else:
            yield from bench.decode(lengths, part, tokens, fill)
    bench.model = None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, config.model)
    for peer in peers:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say(f"peer {peer}")
        yield from transformers_rows(
            config.model, lengths, peer.endswith("offloaded"), min(tokens, 16), device, dtype, config.prefill_chunk
        )


def _line(row: Row) -> str:
    rate = row.bytes_per_second and f"{row.bytes_per_second / 1e9:,.0f} GB/s"
    rate = rate or (row.flops and f"{row.flops / 1e12:,.1f} TFLOP/s")
    beside = row.beside_bytes if row.beside_bytes is not None else row.peak_bytes
    cells = [
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


def _length(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 256:
        raise typer.BadParameter(f"'{text}' is not a length of 256 tokens or more", param_hint="--contexts")
    return int(text)


def _known(text: str, known: tuple[str, ...], flag: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise typer.BadParameter(f"'{part}' is not one of {', '.join(known)}", param_hint=flag)
    return parts
