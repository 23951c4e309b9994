"""`kvring inspect`: what a model is and what its cache costs, read from its tables; nothing is computed or loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import PAGE
from engine.units import format_bytes
from kvring_cli import console
from kvring_cli.options import AsJson, Model

if TYPE_CHECKING:
    from engine.model.assemble import Layout
    from engine.model.config import ModelConfig
    from engine.model.load import OpenedModel
    from engine.weights.source import WeightSource

_COMPONENTS = {
    "embedding": ("embed",),
    "attention": ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"),
    "mlp": ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    "norms": ("norm", *("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm")),
    "head": ("head",),
}


def inspect(model: Model, as_json: AsJson = False) -> None:
    """Say what a model is: architecture, bytes, what a token costs in the cache. Refuses a damaged one."""
    from kvring_cli import models

    report = describe(Path(models.resolve(model)))
    if as_json:
        console.write_json(report)
        return
    width = max(len(key) for key in report)
    for key, value in report.items():
        console.write(f"{key.replace('_', ' '):<{width}}  {_show(key, value)}\n")


def describe(path: Path) -> dict[str, Any]:
    """Everything about the model at `path`; ModelError for one that is missing, damaged, incomplete or unsupported."""
    from engine.errors import ModelError
    from engine.model.assemble import check_table
    from engine.model.load import open_model
    from engine.model.random import PREFIX

    if str(path).startswith(PREFIX):
        raise ModelError(f"{path} has no file: its weights are drawn at the start", f"kvring plan {path} has its sizes")
    opened = open_model(path)
    source, config, layout = opened.source, opened.config, opened.layout
    check_table(config, source, layout)
    sizes = {name: source.bytes_of(name) for name in source.shapes}
    kinds: Counter[str] = Counter()
    for name, size in sizes.items():
        kinds[source.kind_of(name)] += size
    return {
        "model": str(path),
        "container": opened.container,
        "files": len(source.files),
        "architecture": config.family,
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab,
        "trained_context": config.trained_context,
        "rotary_scaling": config.rope.kind,
        **({"sliding_layers": config.sliding_layers, "sliding_window": config.window} if config.sliding else {}),
        "parameters": _parameters(source, layout, config),
        "weight_bytes": sum(sizes.values()),
        "loaded_bytes": _loaded(opened),
        "component_bytes": _by_component(sizes, layout, config),
        "dtypes": dict(sorted(kinds.items())),
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "kv_bytes_per_page": config.kv_bytes_per_token * PAGE,
        **({"left_out": config.left_out} if config.left_out else {}),
        "chat_template": opened.chat is not None,
        "digest": opened.digest(),
        "complete": True,
    }


def _loaded(opened: OpenedModel) -> dict[str, int]:
    """Bytes of the weights where they are computed with, by place and dtype, as `--weights auto` loads them."""
    import torch

    from engine.model.packing import held_bytes, packed_types

    places = {"card": ("cuda", torch.bfloat16), "cpu": ("cpu", torch.bfloat16), "cpu float32": ("cpu", torch.float32)}
    return {
        name: held_bytes(opened.source, opened.loaded, packed_types("auto", *place), *place)
        for name, place in places.items()
    }


def _expected(config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Tensor name -> part, of every tensor that this config has."""
    from engine.model.assemble import layer_shapes, top_shapes
    from engine.weights.names import layer_names

    parts = {layout.top[part]: part for part in top_shapes(config)}
    for layer in range(config.layers):
        names = layer_names(layout.layer, layer)
        parts |= {names[part]: part for part in layer_shapes(config)}
    return parts


def _by_component(sizes: Mapping[str, int], layout: Layout, config: ModelConfig) -> dict[str, int]:
    part_of = _expected(config, layout)
    component_of = {part: component for component, parts in _COMPONENTS.items() for part in parts}
    totals = Counter(dict.fromkeys(_COMPONENTS, 0))
    for name, size in sizes.items():
        totals[component_of[part_of[name]] if name in part_of else "other"] += size
    return dict(totals)


def _parameters(source: WeightSource, layout: Layout, config: ModelConfig) -> int:
    from math import prod

    return sum(prod(source.shapes[name]) for name in _expected(config, layout))


def _show(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in value.items() if size)
    if "bytes" in key:
        return format_bytes(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
