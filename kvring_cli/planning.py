"""What of a model fits where: the engine's own capacity arithmetic, for this machine or a card that isn't here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.config import PAGE, EngineConfig
from engine.device import DEVICE_SHARE, resolve_dtype
from engine.errors import ConfigError, KVRingError
from engine.kv.budget import RAM_HEADROOM, Capacity, Memory, activation_bytes, check_weights
from engine.kv.choose import choose_kv
from engine.kv.dtype import KV, named
from engine.kv.longest import longest, plan_within
from engine.kv.page import KVShape
from engine.kv.tail import TailShape, plan_tails
from engine.ops.attention import SEGMENT
from engine.ops.geometry import STAGED_PAGES
from engine.platform import Facts, gather
from engine.platform.facts import DESKTOP
from engine.recall.digest import KIND_OF, digest_token_bytes
from engine.recall.far_heads import FarHeads
from engine.switches import resolve
from engine.units import GIB, format_bytes
from kvring_cli.cards import CardFacts, find_card, find_preset, presets
from kvring_cli.shapes import PUBLISHED, Shape, check_bits, shape_of

if TYPE_CHECKING:
    from kvring_cli.forecast import Forecast

COMMON_BITS = 4.5
"""Of a weight in the files that people with small cards have."""
PLAIN_BITS = 16
"""Of a weight on a card where the file isn't quantised."""
SYSTEM_RAM = 4 * GIB
"""What a PC's own programs are taken to use, where its free RAM isn't known."""


@dataclass(frozen=True)
class Place:
    """Where a model would run. `device` None: on the CPU. Bytes that are free there."""

    name: str
    ram: int
    device: int | None
    dtype: torch.dtype
    arithmetic: str

    @property
    def memory(self) -> Memory:
        return Memory(self.ram, self.device)


@dataclass(frozen=True)
class Plan:
    """`capacity` None: it does not fit, `refusal` says why. `largest`: tokens of the largest context that would."""

    shape: Shape
    place: Place
    capacity: Capacity | None
    largest: int
    refusal: str
    fix: str
    kv: KVShape
    weight_bytes: int
    weight_bits: float
    limited_by: str
    hypothetical: str = ""  # that the plan is for another file of this model

    def summary(self) -> str:
        if self.capacity is None:
            return f"{self.shape.name} does not fit: {self.refusal}"
        return (
            f"context {self.capacity.context:,} tokens (largest that fits: {self.largest:,}), pool "
            f"{self.capacity.pool_pages * PAGE:,} tokens, "
            f"host store {format_bytes(self.capacity.host_bytes)} of {self.capacity.kv}"
        )

    def as_json(self) -> dict[str, Any]:
        body = {
            "model": self.shape.as_json(),
            "place": {**asdict(self.place), "dtype": str(self.place.dtype).removeprefix("torch.")},
            "fits": self.capacity is not None,
            "largest_context": self.largest,
            "limited_by": self.limited_by,
            "kv_dtype": self.kv.form.dtype.name,
            "kv_bytes_per_token": self.kv.token_bytes,
            "weight_bits_on_device": self.weight_bits,
            "weight_bytes": self.weight_bytes,
            "hypothetical": self.hypothetical,
        }
        if self.capacity is None:
            return {**body, "refusal": self.refusal, "fix": self.fix}
        return {**body, "capacity": {**asdict(self.capacity), "device_bytes": self.capacity.device_bytes}}


def card_place(card: CardFacts, ram: int) -> Place:
    """A card from its datasheet in a PC with `ram` bytes."""
    total = card.gpu.total or 0
    device = min(int(total * DEVICE_SHARE), total - DESKTOP)
    free = max(0, ram - SYSTEM_RAM)
    return Place(
        card.key,
        free,
        device,
        torch.bfloat16,
        f"device: the smaller of 90 % of {format_bytes(total)} and that less {format_bytes(DESKTOP)} for the desktop = "
        f"{format_bytes(device)}; RAM: {format_bytes(ram)} less {format_bytes(SYSTEM_RAM)} for the system = "
        f"{format_bytes(free)}, {format_bytes(RAM_HEADROOM)} of it left alone",
    )


def here(facts: Facts, config: EngineConfig, model: str = "", ram: int | None = None) -> Place:
    """This machine as it is now, for the device and dtype that an engine would take. `model`: its file."""
    memory = facts.memory
    if ram is None and memory is None:
        raise ConfigError("the system does not say how much RAM is free", "kvring plan MODEL --ram 16GiB says it")
    free = memory.usable if ram is None else ram
    gpu = None if config.device == "cpu" or not facts.torch.sees_card else facts.gpu
    if config.device.startswith("cuda") and gpu is None:
        raise ConfigError("no CUDA device is here to plan for", "--card 12gb plans for one that isn't here")
    if gpu is None or gpu.free is None:
        dtype = resolve_dtype(config.dtype, torch.device("cpu"), model)
        return Place("this CPU", free, None, dtype, f"RAM: {format_bytes(free)} free")
    device = max(0, min(int(gpu.free * DEVICE_SHARE), gpu.free - gpu.desktop_bytes))
    text = f"device: {format_bytes(gpu.free)} free, {format_bytes(device)} of it to use; RAM: {format_bytes(free)} free"
    return Place(gpu.name, free, device, resolve_dtype(config.dtype, torch.device("cuda")), text)


def plan_here(model: str, facts: Facts, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Plan:
    """`make_plan` for this machine under the settings in force; ConfigError where the model can't be served at all."""
    config = resolve(model, flags, environ).config
    shape = shape_of(model)
    plan = make_plan(shape, here(facts, config, shape.origin), config)
    if plan.capacity is None:
        raise ConfigError(plan.refusal, plan.fix)
    return plan


def make_plan(shape: Shape, place: Place, config: EngineConfig, *, weight_bits: float | None = None) -> Plan:
    """`weight_bits`: of a weight on the device; None: as this build loads them."""
    core = KVShape(shape.paged, shape.kv_heads, shape.head_dim, place.dtype)
    tail = TailShape(shape.sliding_layers, shape.kv_heads, shape.head_dim, shape.window, place.dtype)
    loaded = shape.held_bits("cpu" if place.device is None else "cuda", place.dtype, config.weights)
    bits = float(loaded if weight_bits is None else weight_bits)
    weights = int(shape.parameters * bits / 8)
    sizes = (shape.hidden, shape.ffn, shape.heads, shape.head_dim)
    activations = 0 if place.device is None else activation_bytes(*sizes, place.dtype.itemsize)

    def capacity(settings: EngineConfig) -> Capacity:
        kind = KIND_OF.get(settings.scorer)
        share = settings.far_heads if isinstance(settings.far_heads, int) else 100
        far = FarHeads.spread(core.layers, core.kv_heads, share / 100)
        device = "cpu" if place.device is None else "cuda"
        memory = place.memory
        if place.device is None:  # weights lie in the same memory, and are loaded before the tiers are sized
            check_weights(settings, memory, weights)
            memory = replace(memory, ram=memory.ram - weights)
        plan = partial(
            plan_within,
            settings,
            trained_context=shape.trained_context,
            memory=memory,
            weight_bytes=weights,
            digest_token_bytes=digest_token_bytes(kind, core, device, far) if kind else 0,
            token_bytes=activations,
            staging_pages=SEGMENT if place.device is None else STAGED_PAGES,
            **plan_tails(tail, settings, shape.trained_context),
        )
        return choose_kv(settings, core, shape.trained_context, plan)[1]

    largest, limit = _largest(capacity, config, shape)
    found, refusal, fix = None, "", ""
    try:
        found = capacity(config)
    except KVRingError as error:
        refusal, fix = error.message, error.fix
    kv = replace(core, kv=KV[found.kv] if found else named(config.kv_dtype, place.dtype))
    beyond = ""
    if bits < loaded:
        beyond = f"{bits:g} bits a weight is what a quantised file would give; this one takes {loaded:.3g}"
    return Plan(shape, place, found, largest, refusal, fix, kv, weights, bits, limit, beyond)


def _largest(capacity: Any, config: EngineConfig, shape: Shape) -> tuple[int, str]:
    """Tokens of the largest context that is not refused, and what forbids the next page."""
    compact = config.positions == "compact"
    tokens, why = longest(capacity, config, max(shape.trained_context, 1 << 20) if compact else shape.trained_context)
    return tokens, why or ("no farther was looked" if compact else "what the model was trained for")


def plan_for(
    model: str,
    card: str | None,
    ram: int | None,
    weight_bits: float | None,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    facts: Facts | None = None,
) -> tuple[Plan, EngineConfig, Forecast]:
    """What `kvring plan` prints: the plan, the settings behind it, and the predicted times."""
    from engine.device_profile import user_file
    from kvring_cli.forecast import forecast, rates_here, rates_of_card

    shape = shape_of(model)
    check_bits(weight_bits)
    if card is not None:
        found = find_card(card)
        preset = find_preset(found.preset)
        place = card_place(found, preset.ram if ram is None else ram)
        config = resolve(model, flags, environ, preset.settings).config
        rates, origin = rates_of_card(found)
    else:
        facts = facts or gather()
        config = resolve(model, flags, environ).config
        place = here(facts, config, shape.origin, ram)
        mine = user_file(environ, config.device_profile_path)
        rates, origin = rates_here(facts, mine, cpu=place.device is None)
    plan = make_plan(shape, place, config, weight_bits=weight_bits)
    return plan, config, forecast(plan, config, rates, origin)


def overview(
    names: Sequence[str] | None,
    ram: int | None,
    weight_bits: float | None,
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Every published model on each card (None: one of each preset), as it is published and quantised, or in the bits
    that `flags` or `weight_bits` name."""
    rows = []
    check_bits(weight_bits)
    for name in names or list(presets()):
        card = find_card(name)
        preset = find_preset(card.preset)
        place = card_place(card, preset.ram if ram is None else ram)
        config = resolve("", flags, environ, preset.settings).config
        for shape in PUBLISHED.values():
            both = sorted({float(PLAIN_BITS), weight_bits or _bits(shape)}, reverse=True)
            for bits in (None,) if config.weights != "auto" and weight_bits is None else both:
                rows.append(_row(card.key, make_plan(shape, place, config, weight_bits=bits)))
    return rows


def _bits(shape: Shape) -> float:
    return shape.weight_bits if shape.weight_bits < PLAIN_BITS else COMMON_BITS


def _row(card: str, plan: Plan) -> dict[str, Any]:
    capacity = plan.capacity
    return {
        "card": card,
        "model": plan.shape.name,
        "weight_bits": plan.weight_bits,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes_per_token": plan.kv.token_bytes,
        "kv_dtype": plan.kv.form.dtype.name,
        "fits": capacity is not None,
        "pool_tokens": capacity.pool_pages * PAGE if capacity else 0,
        "pool_bytes": capacity.pool_bytes if capacity else 0,
        "host_bytes": capacity.host_bytes if capacity else 0,
        "largest_context": plan.largest,
        "limited_by": plan.limited_by,
    }
