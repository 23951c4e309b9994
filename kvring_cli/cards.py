"""The presets in `profiles/cards/`: what a size of card starts with, and datasheet facts of cards that aren't here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from engine.errors import ConfigError
from engine.platform import Gpu
from engine.units import GIB, parse_bytes
from kvring_cli.names import did_you_mean

SCHEMA = "kvring.card/1"
PCIE_LANE = {3: 0.985, 4: 1.969, 5: 3.938}
"""GB/s of one lane by generation, after line coding."""


@dataclass(frozen=True)
class Preset:
    """Settings for a size of card, by field of EngineConfig. `ram`: bytes that a PC around such a card has."""

    name: str
    memory: int
    ram: int
    settings: dict[str, Any]
    typical: str


@dataclass(frozen=True)
class CardFacts:
    """From a datasheet. Rates per second."""

    key: str
    preset: str
    gpu: Gpu
    half_flops: float
    bandwidth: float  # bytes
    pcie: float  # bytes, one way


SERVERS = {"nvidia-h200-sm90": (989e12, 4.8e12, PCIE_LANE[5] * 16e9)}
"""Datasheets of cards that were measured and are no preset: FLOP/s of dense 16-bit, bytes/s of memory and of PCIe."""


def datasheet(hardware_class: str) -> tuple[float, float, float] | None:
    """FLOP/s, memory bytes/s and PCIe bytes/s of a card by its class, if somebody wrote its datasheet down."""
    for card in cards().values():
        if card.gpu.hardware_class == hardware_class:
            return card.half_flops, card.bandwidth, card.pcie
    return SERVERS.get(hardware_class)


@cache
def presets() -> dict[str, Preset]:
    return {name: _preset(name, raw) for name, raw in _files().items()}


@cache
def cards() -> dict[str, CardFacts]:
    found = {}
    for preset, raw in _files().items():
        for key, card in raw["cards"].items():
            generation, lanes = card["pcie"]
            gpu = Gpu(
                name=card["name"],
                capability=card["capability"],
                multiprocessors=card["multiprocessors"],
                total=parse_bytes(raw["memory"]),
                display=True,
                pcie_generation=generation,
                pcie_width=lanes,
            )
            pcie = PCIE_LANE[generation] * lanes * 1e9
            found[key] = CardFacts(key, preset, gpu, card["half_tflops"] * 1e12, card["bandwidth"] * 1e9, pcie)
    return found


def find_preset(name: str) -> Preset:
    """ConfigError with the nearest names."""
    known = presets()
    if name.lower() not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"there is no card profile '{name[:60]}'", f"{near}one of {', '.join(known)}")
    return known[name.lower()]


def find_card(name: str) -> CardFacts:
    """`3060-12gb`, or a preset's name for its typical card. ConfigError with the nearest names."""
    name = name.lower()
    if name in presets():
        name = presets()[name].typical
    if name not in cards():
        near = did_you_mean(name, [*presets(), *cards()])
        raise ConfigError(
            f"there is no card '{name[:60]}' in profiles/cards", f"{near}one of {', '.join([*presets(), *cards()])}"
        )
    return cards()[name]


def preset_for(gpu: Gpu) -> Preset | None:
    """The largest preset that the card's memory holds; 24gb for every card above it; None below the smallest."""
    if gpu.total is None:
        return None
    # A card sold as 12 GB reports a little less than 12 GiB.
    fitting = [preset for preset in presets().values() if preset.memory <= gpu.total + GIB // 2]
    return max(fitting, key=lambda preset: preset.memory, default=None)


def _files() -> dict[str, Any]:
    import yaml

    folder = resources.files("profiles") / "cards"
    texts = {
        entry.name[:-5]: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    }
    return {name: yaml.safe_load(texts[name]) for name in sorted(texts, key=lambda name: (len(name), name))}


def _preset(name: str, raw: dict[str, Any]) -> Preset:
    settings = {
        field: parse_bytes(value) if field.endswith("_bytes") else value for field, value in raw["settings"].items()
    }
    return Preset(name, parse_bytes(raw["memory"]), parse_bytes(raw["ram"]), settings, raw["typical"])
