"""The candidates of each route on a card: how many programs gather, attend and score, launched as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engine import kernel_cache
from engine.model.config import ModelConfig
from engine.model.random import random_config
from engine.platform import Platform
from engine.routes import CANDIDATES, COMPILED_IN, Bands, attention_key, family, pick
from gates.kernels import Attending, Gathering, Scene, Scoring
from kvring_cli.calibration.choose import bands, fastest
from kvring_cli.calibration.graph import graphed

POOLS = (64, 280, 1024)
"""Pages; the bands end there."""
KV_HEADS = 8
SHAPES = ((128, 4), (128, 8), (64, 4))
"""Head dims and query heads per KV head that are measured apart: Llama and Qwen3, larger Qwen3, small models."""
Find = Callable[[torch.device, Platform], "Bands | None"]


def finder(key: str, subject: Callable[[Scene], Gathering | Attending | Scoring], config: ModelConfig) -> Find:
    """Who finds the bands of `key` with heads as in `config`.

    Programs that only copy must leave the same bits; where they share out a sum its order differs, and so may the last
    bits of bfloat16.
    """
    copies = family(key) == "gather_units"

    def agree(ours: Tensor, reference: Tensor) -> bool:
        return torch.equal(ours, reference) if copies else torch.allclose(ours, reference, atol=2e-2, rtol=2e-2)

    def find(device: torch.device, platform: Platform, pools: tuple[int, ...] = POOLS) -> Bands | None:
        if device.type == "cuda":
            kernel_cache.point(torch.cuda.get_device_capability(device))
        compiled_in = pick(COMPILED_IN[family(key)], 1)
        best = []
        for pages in pools:
            scene = replace(Scene.of(config, device, torch.bfloat16, pages), triton=True)
            work = subject(scene)
            units = {each: each if copies else scene.units(each) for each in CANDIDATES[family(key)]}
            ways = {each: graphed(work.work(programs), device) for each, programs in units.items()}
            best.append(fastest(ways, compiled_in, device, agree))
        found = bands(pools, best)
        return None if {schedule for _, schedule in found} == {compiled_in} else found

    return find


def _heads(head_dim: int, group: int) -> ModelConfig:
    return replace(random_config("random:tiny"), heads=KV_HEADS * group, kv_heads=KV_HEADS, head_dim=head_dim)


FINDERS: Mapping[str, Find] = {
    "gather_units": finder("gather_units", Gathering, _heads(128, 4)),
    "page_scores": finder("page_scores", Scoring, _heads(128, 4)),
    **{attention_key(*shape): finder(attention_key(*shape), Attending, _heads(*shape)) for shape in SHAPES},
}
