"""`kvring plan`: what of a model fits where, and how fast it would be; for this machine or a card that isn't here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import ConfigError
from engine.switches import SETTINGS, resolve
from engine.units import format_bytes
from kvring_cli import console, offers
from kvring_cli.options import AsJson, Flags, engine_options

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.kv.budget import Capacity
    from engine.platform import Facts
    from kvring_cli.engines import Choice
    from kvring_cli.forecast import Forecast
    from kvring_cli.measured import Measured
    from kvring_cli.planning import Plan


@engine_options
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model that is here, or a published one. Left out: all of those.",
            autocompletion=offers.PLANNED,
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(
            "--card",
            help="A card that isn't here: 12gb, 3060-12gb, ... Left out: this machine.",
            autocompletion=offers.CARDS,
        ),
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="32GiB", help="RAM of the PC around that card.")] = None,
    weight_bits: Annotated[
        float | None,
        typer.Option("--weight-bits", help="Bits of a weight on the card. Left out: as this build loads it."),
    ] = None,
    compute_capability: Annotated[
        str | None,
        typer.Option("--compute-capability", metavar="8.6", help="Pretend a card's. Switch: NINFER_AGENT_CC."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run it here too, and hold the prediction against that.")
    ] = False,
    as_json: AsJson = False,
    *,
    flags: Flags,
) -> None:
    """Say what fits, with the arithmetic: weights, pool, digests, host store, largest context; and predict times."""
    from engine.platform import gather
    from kvring_cli.planning import overview, plan_for

    for warning in resolve("", flags, os.environ).warnings:
        console.warn(warning)
    if model is None:
        for flag, given in (("--measure", measure), ("--compute-capability", compute_capability)):
            if given:
                raise console.BadUsage(f"{flag} is of one model, and none is named", "give MODEL, or leave it out")
        rows = overview([card] if card else None, _memory(ram), weight_bits, flags=flags, environ=os.environ)
        _overview(rows, as_json)
        return
    if measure and card is not None:
        raise console.BadUsage("--measure runs on this machine, and --card is another", "leave one of them out")
    facts = gather()
    made, config, forecast = plan_for(
        model, card, _memory(ram), weight_bits, flags=flags, environ=os.environ, facts=facts
    )
    engine = _engine(facts, card, compute_capability, config.device)
    measured = None
    if measure and made.capacity is not None:
        from kvring_cli.commands.gate import GateProgress
        from kvring_cli.measured import run

        with GateProgress("plan") as progress:
            measured = run(model, config, made, progress)
    if as_json:
        body = {**made.as_json(), "engine": engine.engine, "forecast": _forecast(forecast)}
        if measured is not None:
            told = vars(measured.predicted(forecast.at)) if forecast.at else None
            body["measured"] = {**vars(measured), "prediction": told}
        console.write_json(body)
    else:
        for line in _lines(made, config):
            console.write(line + "\n")
        console.write(f"engine    {engine.engine}: {engine.reason}\n")
        _predicted(forecast, measured)
    if made.capacity is None:
        raise ConfigError(made.refusal, made.fix)


def _memory(ram: str | None) -> int | None:
    """Bytes of `--ram`, which takes what `--ram-limit` takes: a bare 32 is a unit forgotten, and not 32 bytes."""
    limit = next(setting for setting in SETTINGS if setting.field == "ram_limit_bytes")
    try:
        return None if ram is None else limit.read(ram, "--ram")
    except ConfigError as error:
        raise console.BadUsage(error.message, error.fix) from None


def _engine(facts: Facts, card: str | None, capability: str | None, device: str) -> Choice:
    """Which engine would run there; ConfigError where nobody can tell."""
    from kvring_cli.cards import find_card
    from kvring_cli.engines import pick_engine, without_cards

    environ = dict(os.environ)
    pretended = capability or (find_card(card).gpu.capability if card else None)
    if pretended:
        environ["NINFER_AGENT_CC"] = pretended
    choice = pick_engine(without_cards(facts) if device == "cpu" else facts, environ)
    if choice.outcome in ("unreadable", "unsupported"):
        raise ConfigError(choice.reason, choice.fix)
    return choice


def _lines(made: Plan, config: EngineConfig) -> list[str]:
    from engine.config import KV_EXPERIMENTAL, KV_MARK, PAGE

    shape, place, capacity = made.shape, made.place, made.capacity
    dtype = made.kv.form.dtype.name
    half = shape.heads, shape.kv_heads, shape.head_dim
    lines = [
        f"model     {shape.name}: {shape.layers} layers, {half[0]} heads over {half[1]} KV heads of {half[2]}, "
        f"{shape.parameters / 1e9:.3g} billion weights ({shape.origin})",
        f"place     {place.name}: {place.arithmetic}",
        f"weights   {shape.parameters / 1e9:.3g} billion x {made.weight_bits:g} bits / 8 = "
        f"{format_bytes(made.weight_bytes)}",
        f"KV        {made.kv.form.arithmetic(shape.paged)} = {format_bytes(made.kv.token_bytes)} a token, "
        f"{format_bytes(made.kv.page_bytes)} a page ({dtype}{KV_MARK if dtype in KV_EXPERIMENTAL else ''}"
        f"{f'; {capacity.kv_reason}' if capacity else ''})",
    ]
    if shape.sliding_layers:
        lines.append(f"sliding   {shape.sliding_layers} more layers see {shape.window:,} tokens, and don't page")
    if made.hypothetical:
        lines.append(f"note      {made.hypothetical}")
    if capacity is None:
        lines.append(f"context   largest that fits: {made.largest:,} tokens ({made.limited_by})")
        return lines
    pages = capacity.pool_pages
    how = "the whole context" if not capacity.ring else _pool_arithmetic(config, pages)
    total = capacity.device_bytes
    return [
        *lines,
        f"pool      {how} = {pages:,} pages = {pages * PAGE:,} tokens = {format_bytes(capacity.pool_bytes)}",
        f"digests   {format_bytes(capacity.digest_bytes)}; staging {format_bytes(capacity.staging_bytes)}"
        + (f"; a step of prefill {format_bytes(capacity.workspace_bytes)}" if capacity.workspace_bytes else ""),
        *(_tails(capacity) if shape.sliding_layers else ()),
        f"device    {format_bytes(total)}" + (f" of {format_bytes(place.device)}" if place.device is not None else ""),
        f"host      {capacity.host_pages:,} pages = {format_bytes(capacity.host_bytes)} of {format_bytes(place.ram)}",
        f"context   {capacity.context:,} tokens; largest that fits: {made.largest:,} (limit: {made.limited_by})",
    ]


def _tails(capacity: Capacity) -> list[str]:
    from engine.kv.tail import SNAPSHOTS, TAILS

    return [
        f"tails     {format_bytes(capacity.tail_bytes)} for {TAILS} conversations at once; their {SNAPSHOTS} snapshots "
        f"take {format_bytes(capacity.snapshot_bytes)} of the host"
    ]


def _pool_arithmetic(config: EngineConfig, pages: int) -> str:
    from engine.config import PAGE, SLACK
    from engine.kv.budget import DEFAULT_WINDOW

    if config.kv_capacity is not None:
        return "as asked"
    window = config.kv_window or DEFAULT_WINDOW
    asked = -(-window // PAGE) + -(-config.prefill_chunk // PAGE) + SLACK
    return f"{window}/64 + {config.prefill_chunk}/64 + {SLACK}" if asked == pages else "cut to the trained context"


def _predicted(forecast: Forecast, measured: Measured | None) -> None:
    if forecast.prediction is None:
        console.write(f"predicted unknown: {forecast.origin}\n")
    else:
        found = forecast.prediction
        console.write(
            f"predicted prefill {found.prefill_seconds:,.3g} s ({found.prefill_rate:,.0f} tokens/s, exact)\n"
            f"          decode {found.decode_rate:,.3g} tokens/s\n"
            f"          second turn {found.second_turn_seconds:,.3g} s to the first token, 64 new ones\n"
            f"          from {forecast.origin}\n"
        )
    if measured is None:
        return
    told = measured.predicted(forecast.at) if forecast.at else None
    head = "measured  "
    for what, field, unit in (
        (f"prefill of {measured.prompt:,} tokens", "prefill_seconds", "s"),
        ("decode after them", "decode_rate", "tokens/s"),
        (f"second turn after {measured.conversation:,} tokens", "second_turn_seconds", "s"),
    ):
        real = getattr(measured, field)
        beside = f"; predicted {getattr(told, field):,.3g}, ratio {getattr(told, field) / real:.2f}" if told else ""
        console.write(f"{head}{what} {real:,.3g} {unit}{beside}\n")
        head = " " * len(head)
    console.write(f"{head}by {measured.clock}\n")


def _forecast(forecast: Forecast) -> dict[str, Any]:
    return {"origin": forecast.origin, "prediction": vars(forecast.prediction) if forecast.prediction else None}


def _overview(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        console.write_json(rows)
        return
    console.write("| card | model | bits a weight | weights | KV a token | pool | largest context | limit |\n")
    console.write("| --- | --- | --- | --- | --- | --- | --- | --- |\n")
    for row in rows:
        pool = f"{row['pool_tokens']:,} tokens, {format_bytes(row['pool_bytes'])}" if row["fits"] else "-"
        context = f"{row['largest_context']:,}" if row["fits"] else "does not fit"
        console.write(
            f"| {row['card']} | {row['model']} | {row['weight_bits']:g} | "
            f"{format_bytes(row['weight_bytes'])} | {format_bytes(row['kv_bytes_per_token'])} {row['kv_dtype']} | "
            f"{pool} | {context} | {row['limited_by']} |\n"
        )
    console.write("\nA quantised GGUF file stays so on the card; 16 bits is what a plain folder takes.\n")
