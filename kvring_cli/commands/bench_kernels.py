"""`kvring bench kernels`: a step's kernels one by one beside the floors; `kvring bench page`: pages of other sizes."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Annotated

import typer

from engine.units import KIB, MIB
from kvring_cli import console, offers
from kvring_cli.commands.bench_options import Rows, header, known
from kvring_cli.commands.gate import GateProgress
from kvring_cli.files import check_json, save_json
from kvring_cli.options import Flags, Verbose, engine_options

PARTS = ("gather", "attention", "scores", "chunk")
TASKS = ("keyed", "disjoint", "lines")


@engine_options
def kernels(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model, or random:qwen3-8b: its shape.", autocompletion=offers.MODELS)
    ] = "phantom",
    parts: Annotated[str, typer.Option("--parts", help=f"Of {', '.join(PARTS)}.")] = ",".join(PARTS),
    pages: Annotated[int, typer.Option("--pages", min=2, max=4096, help="Pages that a token looks at.")] = 280,
    rows: Annotated[int, typer.Option("--rows", min=1, max=16384, help="Tokens of the chunk.")] = 1024,
    reference: Annotated[bool, typer.Option("--reference", help="The torch code instead of kernels.")] = False,
    output: Rows = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """What gather, attention and scoring reach here beside this machine's floors. Loads no weights. Prints a table."""
    chosen = known(parts, PARTS, "--parts")
    check_json(output)
    from engine import kernel_cache
    from engine.device import resolve_device, resolve_dtype, set_threads
    from engine.model.load import open_model
    from engine.model.random import PREFIX, random_config
    from gates.floors import measure_floors
    from gates.kernels import Scene, measure
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    set_threads(config.threads)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device, config.model)
    if device.type == "cuda":
        import torch

        kernel_cache.point(torch.cuda.get_device_capability(device), console.say)
    is_random = config.model.startswith(PREFIX)
    shape = random_config(config.model) if is_random else open_model(config.model).config
    floors = measure_floors(device, dtype)
    console.write(floors.lines() + "\n\n" + header(("what", "by", "ms", "GB/s or TFLOP/s", "of the floor"), False))
    found = []
    for rate in measure(Scene.of(shape, device, dtype, pages, reference), floors, tuple(chosen), rows):
        found.append(rate)
        reached = (
            f"{rate.bytes_per_second / 1e9:,.1f} GB/s" if rate.bytes_per_second else f"{rate.flops / 1e12:,.3f} TFLOP/s"
        )
        console.write(f"| {rate.what} | {rate.by} | {1e3 * rate.seconds:.3f} | {reached} | {rate.floor:.0%} |\n")
    save_json(output, {"floors": asdict(floors), "rows": [asdict(rate) for rate in found]})


@engine_options
def page(
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model that is asked.", autocompletion=offers.MODELS)
    ] = "phantom",
    sizes: Annotated[str, typer.Option("--sizes", help="Tokens a page, with commas.")] = "16,32,64,128",
    tokens: Annotated[int, typer.Option("--tokens", min=2048, help="Length of the documents.")] = 24_576,
    budget: Annotated[int, typer.Option("--budget", min=128, help="Tokens that recall may select.")] = 512,
    tasks: Annotated[str, typer.Option("--tasks", help=f"Of {', '.join(TASKS)}.")] = "keyed,disjoint",
    questions: Annotated[int, typer.Option("--questions", min=1, help="A task.")] = 8,
    output: Rows = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Pages of other sizes under one budget in tokens: gather rate, table bytes, hits. Prints a Markdown table."""
    lengths = [int(size) for size in known(sizes, ("16", "32", "64", "128"), "--sizes")]
    chosen = known(tasks, TASKS, "--tasks")
    check_json(output)
    from gates.multi_needle import POOL
    from gates.page_size import CONTEXT, measure
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    settings = {field.name: getattr(config, field.name) for field in fields(config)}
    settings["kv_capacity"] = config.kv_capacity or POOL
    settings |= {"tokens": tokens, "budget": budget, "tasks": chosen, "questions": questions}
    columns = ("tokens a page", "layer page", "gather", f"tables at {CONTEXT:,}", "hits", "fetched a question")
    console.write(header(columns, False))
    found = []
    with GateProgress("page") as progress:
        for row in measure(settings, lengths, progress):
            found.append(row)
            hits = ", ".join(
                f"{task} {row.hits[task]} of {row.trials} (dense {row.dense_hits[task]})" for task in chosen
            )
            console.write(
                f"| {row.page} | {row.layer_page_bytes / KIB:,.0f} KiB | {row.gather / 1e9:,.1f} GB/s "
                f"({row.gather_floor:.0%} of the copy) | {row.table_bytes / MIB:,.2f} MiB | {hits} | "
                f"{row.fetched / MIB:,.1f} MiB |\n"
            )
    console.write("\nTable bytes are computed; all else was measured with an engine built with that page size.\n")
    save_json(output, [asdict(row) for row in found])
