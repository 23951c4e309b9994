"""`kvring inspect`: what a model is and what its cache costs, read from its tables; nothing is computed or loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config import PAGE
from engine.errors import ModelError
from engine.units import format_bytes
from kvring_cli import console
from kvring_cli.options import Model

if TYPE_CHECKING:
    from engine.model.assemble import Layout
    from engine.model.config import ModelConfig
    from engine.weights.gguf import GGUFFile
    from engine.weights.safetensors import SafetensorsFolder

    Source = SafetensorsFolder | GGUFFile

_COMPONENTS = {
    "embedding": ("embed",),
    "attention": ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias"),
    "mlp": ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    "norms": ("norm", "attention_norm", "mlp_norm", "q_norm", "k_norm"),
    "head": ("head",),
}


def inspect(
    model: Model, as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False
) -> None:
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
    from engine.weights.source import digest_of

    container, source, config, layout, template = _open(path)
    missing = sorted(name for name in _expected(config, layout) if name not in source.shapes)
    if missing:
        raise ModelError(
            f"{len(missing)} tensors are missing, the first is '{missing[0]}'",
            "the file is incomplete or its config is of another model: download both again",
        )
    sizes, kinds = _sizes(source)
    return {
        "model": str(path),
        "container": container,
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
        "parameters": _parameters(source, layout, config),
        "weight_bytes": sum(sizes.values()),
        "component_bytes": _by_component(sizes, layout, config),
        "dtypes": dict(sorted(kinds.items())),
        "kv_bytes_per_token": config.kv_bytes_per_token,
        "kv_bytes_per_page": config.kv_bytes_per_token * PAGE,
        "chat_template": template,
        "digest": digest_of(source.files, repr(config).encode()),
        "complete": True,
    }


def _open(path: Path) -> tuple[str, Source, ModelConfig, Layout, bool]:
    """Container, tables, config as the loader has it, names, and whether there is a chat template."""
    from engine.model.assemble import Layout
    from engine.model.gguf_config import from_gguf
    from engine.model.hf_config import from_hf
    from engine.text.gguf_text import text_of_gguf
    from engine.text.hf_text import read_json, text_of_folder
    from engine.weights import names
    from engine.weights.gguf import GGUFFile
    from engine.weights.safetensors import SafetensorsFolder

    source: Source
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{path} has no config.json", "give the folder that save_pretrained wrote")
        generation = path / "generation_config.json"
        config = from_hf(read_json(path / "config.json"), read_json(generation) if generation.exists() else None)
        source = SafetensorsFolder(path)
        tokenizer, chat = text_of_folder(path, config.bos, config.eos)
        container, layout = "safetensors", Layout(names.HF_TOP, names.HF_LAYER, names.HF_DERIVED)
    else:
        source = GGUFFile(path)
        divisors = None
        if "rope_freqs.weight" in source.shapes:
            divisors = tuple(float(x) for _, block in source.blocks("rope_freqs.weight") for x in block.tolist())
        config = from_gguf(source.metadata, source.shapes, divisors)
        tokenizer, chat = text_of_gguf(source.metadata, path.name)
        container, layout = "gguf", Layout(names.GGUF_TOP, names.GGUF_LAYER, names.GGUF_DERIVED)
    return container, source, replace(config, eos=tokenizer.eos, bos=tokenizer.bos), layout, chat is not None


def _expected(config: ModelConfig, layout: Layout) -> dict[str, str]:
    """Tensor name -> part, of every tensor that this config has."""
    from engine.model.assemble import layer_shapes, top_shapes
    from engine.weights.names import layer_names

    parts = {layout.top[part]: part for part in top_shapes(config)}
    for layer in range(config.layers):
        names = layer_names(layout.layer, layer)
        parts |= {names[part]: part for part in layer_shapes(config)}
    return parts


def _sizes(source: Source) -> tuple[dict[str, int], Counter[str]]:
    """Bytes in the file by tensor, and by type. The readers keep both in their tables of places."""
    sizes: dict[str, int] = {}
    kinds: Counter[str] = Counter()
    for name, place in source._places.items():
        sizes[name] = place.end - place.start
        kind = place.kind.name if hasattr(place, "kind") else str(place.dtype).removeprefix("torch.")
        kinds[kind] += sizes[name]
    return sizes, kinds


def _by_component(sizes: Mapping[str, int], layout: Layout, config: ModelConfig) -> dict[str, int]:
    part_of = _expected(config, layout)
    component_of = {part: component for component, parts in _COMPONENTS.items() for part in parts}
    totals = Counter(dict.fromkeys(_COMPONENTS, 0))
    for name, size in sizes.items():
        totals[component_of[part_of[name]] if name in part_of else "other"] += size
    return dict(totals)


def _parameters(source: Source, layout: Layout, config: ModelConfig) -> int:
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
