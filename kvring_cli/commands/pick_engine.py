"""`kvring pick-engine`: the engine that suits the card, and the `serve` line that starts it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvring_cli import console


def pick_engine(
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="What to put into the serve line.")] = "MODEL",
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability", metavar="8.6", help="Pretend a card. Switch: NINFER_AGENT_CC.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Which engine suits this card. Exit 0 chosen, 3 capability unreadable, 4 something is missing, 5 unsupported."""
    import shlex

    from engine.platform import gather
    from kvring_cli.engines import pick_engine as pick

    environ = dict(os.environ)
    if compute_capability is not None:
        environ["NINFER_AGENT_CC"] = compute_capability
    choice = pick(gather(), environ)
    if as_json:
        console.write_json({**choice.as_json(), "serve": choice.command(model)})
        raise typer.Exit(choice.exit_code)
    lines = {"card": choice.card, "capability": choice.capability, "engine": choice.engine, "reason": choice.reason}
    if choice.outcome == "chosen":
        lines |= {
            "kv dtype": f"{choice.kv_dtype}, k8v4 where memory holds the context only so",
            "window": f"{choice.window_tokens:,} tokens",
            "pool": f"{choice.pool_tokens:,} tokens",
            "serve": shlex.join(choice.command(model)),
        }
    for name, value in lines.items():
        if value is not None:
            console.write(f"{name:<11} {value}\n")
    if choice.outcome != "chosen":
        from engine.errors import KVRingError

        console.report(KVRingError(choice.reason, choice.fix))
    raise typer.Exit(choice.exit_code)
