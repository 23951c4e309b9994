"""Curves over context lengths as a PNG. matplotlib is an extra: asked for before anything is measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from kvring_cli import console
from kvring_cli.files import check_writable


@dataclass(frozen=True)
class Curve:
    """Points (tokens of context, value) of one panel; panels of one `unit` are drawn together."""

    name: str
    unit: str
    points: Sequence[tuple[float, float]]


def check_plot(path: Path | None) -> None:
    """KVRingError where the file can't be written or matplotlib is missing, BadUsage for another kind of file."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise console.BadUsage(f"--plot writes PNG files, '{path.name}' is named otherwise", f"--plot {path.stem}.png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed", "pip install matplotlib")
    check_writable("--plot", str(path))


def draw(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """One panel a unit, lengths on a logarithmic axis."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a screen

    units = list(dict.fromkeys(curve.unit for curve in curves))
    figure = Figure(figsize=(6 * len(units), 4.5), layout="constrained")
    for axes, unit in zip(figure.subplots(1, len(units), squeeze=False)[0], units, strict=True):
        for curve in (curve for curve in curves if curve.unit == unit):
            axes.plot(*zip(*curve.points, strict=True), marker="o", label=curve.name)
        axes.set(xscale="log", xlabel="tokens of context", ylabel=unit, ylim=(0, None))
        ticks = sorted({tokens for curve in curves for tokens, _ in curve.points})
        axes.set_xticks(ticks, [f"{tokens / 1024:.3g}K" for tokens in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
