"""Which KV head groups look far: the keys of those alone are coded and scored.

The other groups need sink and recent pages only, and see what the far ones select. Measured once per model, from the
attention that its groups really give (`kvring heads`); about half of a model's groups never look back far.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from engine.errors import ConfigError
from engine.files import cache_folder, write_whole

SCHEMA = "kvring.far-heads/1"
FAR = 0.3
"""A group looks far if one page beyond sink and recent ones gets this share of its attention to closed pages.

On SmolLM2-135M (5,000 tokens through a pool of 2,048, six questions, `Engine.coverage`) recall's window holds 83.1 % of
the exact step's attention with all 90 groups scored, 82.7 with the 60 that look farthest, 82.5 with 39; 46 look so far.
"""


@dataclass(frozen=True)
class FarHeads:
    """KV heads whose keys are scored, by paging layer: ascending, at least one in each."""

    by_layer: tuple[tuple[int, ...], ...]
    kv_heads: int
    source: str = "all"

    @classmethod
    def all(cls, layers: int, kv_heads: int) -> FarHeads:
        return cls((tuple(range(kv_heads)),) * layers, kv_heads)

    @classmethod
    def best(cls, looks: np.ndarray, share: float, source: str) -> FarHeads:
        """The share (0..1] of the groups that look farthest. looks: float [layer, kv_head]."""
        return cls.above(looks, float(np.sort(looks, axis=None)[-max(1, round(share * looks.size))]), source)

    @classmethod
    def above(cls, looks: np.ndarray, least: float, source: str) -> FarHeads:
        """Groups that look at least so far, and the farthest looking one of every layer."""
        kept = (looks >= least) | (looks >= looks.max(1, keepdims=True))
        return cls(tuple(tuple(np.flatnonzero(row).tolist()) for row in kept), looks.shape[1], source)

    @classmethod
    def spread(cls, layers: int, kv_heads: int, share: float) -> FarHeads:
        """So many groups of a model whose weights are random, where none looks farther than another."""
        order = np.random.default_rng(0).permuted(np.tile(np.arange(kv_heads), (layers, 1)), axis=1)
        kept = order[:, : max(1, round(share * kv_heads))]
        return cls(tuple(tuple(sorted(row.tolist())) for row in kept), kv_heads, "assumed: random weights")

    @cached_property
    def first(self) -> tuple[int, ...]:
        """Where each layer's groups begin among all that look far; one entry more, their number, at the end."""
        return (0, *np.cumsum([len(heads) for heads in self.by_layer]).tolist())

    @property
    def count(self) -> int:
        return self.first[-1]

    @property
    def groups(self) -> int:
        """All of them."""
        return len(self.by_layer) * self.kv_heads

    def everything(self, layer: int) -> bool:
        return len(self.by_layer[layer]) == self.kv_heads

    def __str__(self) -> str:
        return f"{self.count} of {self.groups} head groups ({self.source})"


def far_heads(
    setting: str | int, layers: int, kv_heads: int, *, name: str, digest: str, folder: Path | None = None
) -> FarHeads:
    """What `EngineConfig.far_heads` means for a model of so many paging layers; `digest` identifies it.

    ConfigError where a share is asked for and nobody measured which groups look far.
    """
    every = FarHeads.all(layers, kv_heads)
    if setting == "all" or setting == 100:
        return every
    measured = read_looks(digest, (layers, kv_heads), folder)
    if measured is not None:
        if setting == "auto":
            return FarHeads.above(measured, FAR, "measured by kvring heads")
        return FarHeads.best(measured, int(setting) / 100, "the farthest looking by kvring heads")
    if setting == "auto":
        return every
    if digest == "random":
        return FarHeads.spread(layers, kv_heads, int(setting) / 100)
    raise ConfigError(
        f"--far-heads {setting} keeps key codes of the head groups that look far, and nobody measured which ones of "
        f"{name} do",
        f"kvring heads -m {name} first, or --far-heads all",
    )


def looks_file(digest: str, folder: Path | None = None) -> Path:
    """Where the measurement of the model with this digest is kept: in `folder`, else in the user's cache."""
    return (folder or cache_folder() / "heads") / f"{digest[:32]}.json"


def write_looks(looks: np.ndarray, digest: str, origin: str, folder: Path | None = None) -> Path:
    """Keep a measurement, float [layer, kv_head]; `origin` says where and how it was made."""
    path = looks_file(digest, folder)
    found = {"schema": SCHEMA, "model": digest, "origin": origin, "looks": np.round(looks, 4).tolist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(found))
    return path


def read_looks(digest: str, shape: tuple[int, int], folder: Path | None = None) -> np.ndarray | None:
    """float [layer, kv_head] of a model, None if it was not measured, or another's cache holds it and keeps it shut.
    ConfigError for a file that is damaged.
    """
    path = looks_file(digest, folder)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    except UnicodeError:
        text = ""
    try:
        found = json.loads(text)
        looks = np.asarray(found["looks"], dtype=np.float64)
        whole = found["schema"] == SCHEMA and found["model"] == digest and looks.shape == shape
    except (ValueError, KeyError, TypeError):
        whole = False
    if not whole or not np.isfinite(looks).all():
        raise ConfigError(f"{path} is no measurement of this model's head groups", "delete it, or kvring heads again")
    return looks
