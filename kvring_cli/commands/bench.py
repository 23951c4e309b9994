"""`kvring bench`: measure on this machine.

`scorers`: hits by scorer, task and budget; `eviction`: fetches by who leaves the pool; `speed`: rates; `rates`: the
same over context lengths, beside this machine's floors; `context`: what a longer context costs; `sharing`: what
clients that begin alike hold; `load`: a crowd of clients against a real server; `beyond`: one far beyond the pool.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvring_cli import console
from kvring_cli.commands.bench_context import context
from kvring_cli.commands.bench_kernels import kernels, page
from kvring_cli.commands.bench_rates import rates
from kvring_cli.commands.gate import GateProgress
from kvring_cli.files import check_json, save_json
from kvring_cli.options import Flags, MeasuredModel, ReportFile, ServeOptions, Verbose, engine_options

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
bench.command()(rates)
bench.command()(context)
bench.command()(kernels)
bench.command()(page)


@bench.command()
@engine_options
def scorers(
    model: MeasuredModel = "phantom",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Documents a task, 12 questions each.")] = 1,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Hits by scorer, task and budget of pages, on multi-needle's documents. Prints a Markdown table."""
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    from gates.scorers import BUDGETS, table

    with GateProgress("scorers") as progress:
        arms = table(config, progress, seeds=seeds)
    tasks = list(dict.fromkeys(arm.task for arm in arms))
    trials = arms[0].trials
    budgets = " / ".join(map(str, BUDGETS))
    console.write(f"| scorer | {' | '.join(f'{task}, {budgets} pages' for task in tasks)} |\n")
    console.write(f"| --- |{' --- |' * len(tasks)}\n")
    for scorer in dict.fromkeys(arm.name for arm in arms):
        cells = [" / ".join(str(arm.hits) for arm in arms if (arm.name, arm.task) == (scorer, task)) for task in tasks]
        console.write(f"| {scorer} | {' | '.join(cells)} |\n")
    console.write(f"\nHits of {trials}; exact sees everything.\n")


@bench.command()
@engine_options
def speed(
    model: MeasuredModel = "phantom",
    tokens: Annotated[int, typer.Option("--tokens", min=1024, help="Length of the prefilled document.")] = 42_355,
    peer: Annotated[str | None, typer.Option("--peer", help="llama.cpp: decode beside it, in turns.")] = None,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Decode, prefill and second-turn rates; medians with their spread."""
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    from gates.speed import measure

    with GateProgress("speed") as progress:
        rates = measure(config, progress, tokens=tokens, peer=peer)
    for rate in rates:
        spread = f"{min(rate.rounds):,.1f} .. {max(rate.rounds):,.1f} over {len(rate.rounds)}"
        line = f"{rate.what}: {rate.value:,.1f} {rate.unit} ({spread})"
        if rate.ratio is not None:
            line += f"; {peer} {rate.peer:,.1f} {rate.unit}, ratio {rate.ratio:.2f}"
        console.write(line + "\n")


@bench.command()
@engine_options
def sharing(
    model: MeasuredModel = "phantom",
    clients: Annotated[int, typer.Option("--clients", min=2, max=64, help="Requests at once.")] = 8,
    prefix: Annotated[int, typer.Option("--prefix", min=1024, help="Tokens that all begin with.")] = 20_000,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Bytes and computed tokens of clients that share a prefix, with sharing and without. Prints a Markdown table."""
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    from engine.units import format_bytes
    from gates.sharing import measure

    with GateProgress("sharing") as progress:
        arms = measure(config, progress, clients=clients, prefix=prefix)
    rows = {
        "host store in use": [format_bytes(arm.host_bytes) for arm in arms],
        "device pool in use": [format_bytes(arm.pool_bytes) for arm in arms],
        "digests of the stored pages": [format_bytes(arm.digest_bytes) for arm in arms],
        "prompt tokens computed": [f"{arm.computed_tokens:,} of {arm.prompt_tokens:,}" for arm in arms],
        "fetched from the host": [format_bytes(arm.bytes_fetched) for arm in arms],
        "seconds until all were answered": [f"{arm.seconds:.1f}" for arm in arms],
        "right answers": [f"{arm.hits} of {clients}" for arm in arms],
    }
    console.write(f"| {clients} clients, {prefix:,} tokens alike | sharing on | sharing off |\n| --- | --- | --- |\n")
    for name, cells in rows.items():
        console.write(f"| {name} | {' | '.join(cells)} |\n")


@bench.command()
@engine_options
def eviction(
    model: MeasuredModel = "phantom",
    tasks: Annotated[str, typer.Option("--tasks", help="Of the gates' tasks, with commas.")] = "keyed,disjoint",
    questions: Annotated[int, typer.Option("--questions", min=1, help="Asked in turn of one document.")] = 6,
    verbose: Verbose = False,
    *,
    flags: Flags,
) -> None:
    """Pages fetched a step, by what leaves a full pool: least recently used, or of least mass. Prints a table."""
    from gates.context import load_context
    from gates.eviction import POLICIES, compare
    from gates.multi_needle import POOL
    from gates.options import GateOptions
    from kvring_cli.start import settle

    config = settle(model, flags, verbose).config
    pool = config.kv_capacity or POOL
    with GateProgress("eviction") as progress:
        context = load_context(config, GateOptions(), progress)
        rows = compare(context, pool, config.retrieve_share, tasks.split(","), questions)
    console.write(f"| pool {pool:,}, selection {config.retrieve_share} % | {' | '.join(POLICIES)} |\n")
    console.write(f"| --- |{' --- |' * len(POLICIES)}\n")
    for row in rows:
        cells = " | ".join(f"{row.misses[name]:.1f}" for name in POLICIES)
        console.write(f"| {row.task}, {row.steps} steps, {row.spare} slots beside the largest window | {cells} |\n")


@bench.command()
def load(
    model: MeasuredModel = "phantom",
    options: ServeOptions = None,
    *,
    clients: Annotated[int, typer.Option("--clients", min=1, max=1000, help="Clients at once.")] = 200,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long they ask.")] = 60.0,
    report: ReportFile = None,
) -> None:
    """A crowd of clients against a real server: each answered or refused by rule, memory flat. PASS 0, FAIL 1."""
    from gates.load import run
    from kvring_cli.commands.gate import show

    check_json(report)
    with GateProgress("load") as progress:
        found = run(model, clients=clients, seconds=seconds, options=options or (), say=progress)
    show(found)
    for name in ("requests_per_second", "answers_per_second", "tokens_per_second", "answer_seconds_median"):
        console.write(f"{name.replace('_', ' ')}: {found.environment.get(name)}\n")
    save_json(report, found.to_json())
    raise typer.Exit(found.exit_code)


@bench.command()
def beyond(
    model: MeasuredModel = "phantom",
    *,
    prompt: Annotated[int, typer.Option("--prompt", min=64, help="Tokens of the prompt.")] = 60_000,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of the answer.")] = 2_000,
    pool: Annotated[int, typer.Option("--kv-capacity", min=64, help="Tokens of the device pool.")] = 4_032,
    prefill: Annotated[str, typer.Option("--prefill", help="How the prompt is read.")] = "window",
) -> None:
    """One request far beyond the pool through a real server: ended as asked, usage right. PASS 0, FAIL 1."""
    from gates.beyond import run
    from kvring_cli.commands.gate import show

    with GateProgress("beyond") as progress:
        found = run(model, prompt=prompt, tokens=tokens, pool=pool, prefill=prefill, say=progress)
    show(found)
    timings = found.environment.get("timings", {})
    for name in ("prompt_per_second", "predicted_per_second"):
        console.write(f"{name.replace('_', ' ')}: {timings.get(name, 0):,.1f}\n")
    raise typer.Exit(found.exit_code)
