"""`kvring bench`: measure on this machine. `scorers`: hits by scorer, task and budget; `speed`: rates."""

from __future__ import annotations

from typing import Annotated

import typer

from kvring_cli import console
from kvring_cli.commands.gate import GateProgress
from kvring_cli.options import Flags, Verbose, engine_options

bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
ModelOption = Annotated[str, typer.Option("--model", "-m", help="The model that is measured.")]


@bench.command()
@engine_options
def scorers(
    model: ModelOption = "phantom",
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
    model: ModelOption = "phantom",
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
