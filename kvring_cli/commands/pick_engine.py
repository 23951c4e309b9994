"""`kvring pick-engine`: the engine that suits the card, and the `serve` line that starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvring_cli import console, offers
from kvring_cli.options import AsJson

if TYPE_CHECKING:
    from engine.platform import Facts
    from kvring_cli.engines import Choice
    from kvring_cli.planning import Plan

PLACEHOLDER = "MODEL"


def pick_engine(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="What to put into the serve line.", autocompletion=offers.MODELS)
    ] = PLACEHOLDER,
    compute_capability: Annotated[
        str | None,
        typer.Option(
            "--compute-capability", metavar="8.6", help="Pretend a card. Switch: NINFER_AGENT_CC.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which engine suits this card. Exit 0 chosen, 3 capability unreadable, 4 something is missing, 5 unsupported."""
    from engine.config import PAGE
    from engine.platform import gather
    from kvring_cli.engines import pick_engine as pick
    from kvring_cli.scripts import to_paste

    environ = dict(os.environ)
    if compute_capability is not None:
        environ["NINFER_AGENT_CC"] = compute_capability
    facts = gather()
    choice = pick(facts, environ)
    plan, weights = _planned(model, facts, choice, environ)
    if plan is not None:
        choice = replace(choice, kv_dtype=plan.kv.form.dtype.name)
        if plan.capacity is not None:
            choice = replace(choice, pool_tokens=plan.capacity.pool_pages * PAGE)
    if weights is not None:
        choice = choice.with_setting("--weights", weights)
    if as_json:
        console.write_json({**choice.as_json(), "serve": choice.command(model)})
        raise typer.Exit(choice.exit_code)
    lines = {"card": choice.card, "capability": choice.capability, "engine": choice.engine, "reason": choice.reason}
    if choice.outcome == "chosen":
        lines |= {
            "kv dtype": _kv(choice, plan),
            "window": f"{choice.window_tokens:,} tokens",
            "pool": f"{choice.pool_tokens:,} tokens",
            "weights": weights and f"{weights}, quantised while they are loaded: they don't fit as they are",
            "serve": to_paste(choice.command(model), facts.system == "windows"),
        }
    for name, value in lines.items():
        if value is not None:
            console.write(f"{name:<11} {value}\n")
    if choice.outcome != "chosen":
        from engine.errors import KVRingError

        console.report(KVRingError(choice.reason, choice.fix))
    raise typer.Exit(choice.exit_code)


def _kv(choice: Choice, plan: Plan | None) -> str:
    """What pages will hold and why; without a plan, what they hold if memory lets them."""
    from kvring_cli.engines import kv_on_cpu

    if plan is not None and plan.capacity is not None:
        return f"{choice.kv_dtype} ({plan.capacity.kv_reason})"
    if choice.engine == "torch-cpu" and (of_gguf := kv_on_cpu(gguf=True)) != choice.kv_dtype:
        return f"{choice.kv_dtype}, {of_gguf} of a GGUF file"
    return f"{choice.kv_dtype}, k8v4 where memory holds the context only so"


def _planned(model: str, facts: Facts, choice: Choice, environ: Mapping[str, str]) -> tuple[Plan | None, str | None]:
    """What the line gives here, and what the model must be quantised to for it; None: no model that is here, or a
    pretended card; nothing.
    """
    from engine.errors import KVRingError
    from kvring_cli import models
    from kvring_cli.engines import pretends
    from kvring_cli.fewer_bits import Asked, fewer_bits

    if choice.outcome != "chosen" or model == PLACEHOLDER:
        return None, None
    try:
        path = str(models.resolve(model))
        if pretends(environ):
            return None, None
        asked = Asked.of(path, facts, choice.command(model)[1:], environ)
        plan = asked.plan()
        fitting = fewer_bits(asked, plan)
    except KVRingError as error:  # the line is for when that is mended
        console.warn(f"{error.message} (fix: {error.fix})")
        return None, None
    return (fitting[1], fitting[0]) if fitting else (plan, None)
