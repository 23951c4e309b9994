"""Sizes of a model without its weights: from its file's tables, or from a published config for planning ahead."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.model.sizes import PUBLISHED as SIZES
from engine.model.sizes import Sizes, Weighed
from kvring_cli.names import did_you_mean

if TYPE_CHECKING:
    import torch

    from engine.model.load import OpenedModel


@dataclass(frozen=True)
class Shape(Weighed):
    """One decoder. `weight_bits`: bits that a weight takes in its file; `origin`: where these numbers are from."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    trained_context: int
    tied: bool
    weight_bits: float = 16.0
    four_bit: bool = False  # the file holds 4-bit codes that a CPU in bfloat16 computes with
    origin: str = "published config"
    sliding_layers: int = 0  # that that see `window` tokens only, and don't page
    window: int = 0
    source: OpenedModel | None = field(default=None, repr=False, compare=False)  # None without a file

    @property
    def paged(self) -> int:
        """Layers whose keys and values are pages."""
        return self.layers - self.sliding_layers

    def held_bits(self, device: str, dtype: torch.dtype, weights: str) -> float:
        """Bits of a weight where it is computed with; `weights` as in EngineConfig, `device` its type."""
        from engine.model.packing import held_bits, held_bytes, packed_types
        from engine.weights.quant import TYPES

        plain = 8.0 * dtype.itemsize
        if self.source is None:
            kind = TYPES.get(weights.upper())
            if kind:
                return held_bits(kind, device, dtype)
            return plain if self.weight_bits == 16 else min(plain, self.weight_bits)  # published in 16 bits: dense
        from engine.model.load import quantised

        opened = quantised(self.source, weights)
        size = held_bytes(opened.source, opened.loaded, packed_types(weights, device, dtype), device, dtype)
        return 8 * size / self.parameters

    def held_types(self, dtype: torch.dtype, weights: str, bits: float) -> tuple[dict[str, float], tuple[str, float]]:
        """On a card: bytes of a layer's matrices by the type that they are held in, and the output matrix's own; a type
        is that of a GGUF file, the dtype, or "4.5 bits" where no file and no `weights` names one.
        """
        from engine.weights.quant import TYPES

        plain = str(dtype).removeprefix("torch.")
        if self.source is None:
            kind = weights.lower() if weights.upper() in TYPES else f"{bits:g} bits"
            kind = plain if bits >= 8 * dtype.itemsize else kind
            return {kind: self.layer_weights * bits / 8}, (kind, self.head_weights * bits / 8)
        from math import prod

        from engine.model.load import quantised
        from engine.model.packing import packed_types
        from engine.weights.names import MATRICES

        source, layout = quantised(self.source, weights).source, self.source.layout
        types = packed_types(weights, "cuda", dtype)

        def held(name: str) -> tuple[str, float]:
            kind = source.kind_of(name)
            each = TYPES[kind].bits if kind in types else 8.0 * dtype.itemsize
            return kind.lower() if kind in types else plain, prod(source.shapes[name]) * each / 8

        names = [layout.layer[part].format(layer) for part in MATRICES for layer in range(self.layers)]
        found: dict[str, float] = {}
        for name in names:
            kind, size = held(name)
            found[kind] = found.get(kind, 0.0) + size / self.layers
        return found, held(layout.top["embed" if self.tied else "head"])

    def as_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "source"}

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)


def _published(name: str, sizes: Sizes) -> Shape:
    fields = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "trained_context", "tied")
    return Shape(
        name, *(getattr(sizes, field) for field in fields), sliding_layers=sizes.sliding_layers, window=sizes.window
    )


_PLANNED = ("qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen2.5-1.5b", "qwen2.5-7b", "gemma-3-4b", "gemma-3-12b")
PUBLISHED = {
    shape.name: shape
    for shape in (
        *(_published(name, SIZES[name]) for name in _PLANNED),
        Shape("27b-2.1bit", 64, 5120, 21_760, 40, 8, 128, 152_064, 131_072, False, 2.1, origin="a dense 27B, made up"),
    )
}


def shape_of(model: str) -> Shape:
    """Of a model that is here, or of a published one by name. ModelError with the names."""
    from engine.model.random import CONTEXT, PREFIX
    from engine.model.random import shape_of as random_shape
    from kvring_cli import models

    if model.lower() in PUBLISHED and not Path(model).exists():
        return PUBLISHED[model.lower()]
    if model.startswith(PREFIX):
        shape = _published(model, random_shape(model))  # refuses a name that isn't one
        return replace(shape, trained_context=CONTEXT, origin="random weights of the published shape")
    path = models.find(model)
    if path is None:
        names = [*PUBLISHED, *models.NAMES]
        listed = f"names: {', '.join(names)}; or give a Hugging Face folder or a .gguf file"
        raise models.unknown(model, did_you_mean(model, names) + listed)
    import torch

    from engine.model.load import open_model
    from engine.ops.packed import takes_four_bit
    from engine.weights.quant import TYPES

    opened = open_model(path)
    config = opened.config
    shape = Shape(
        path.stem if path.is_file() else path.resolve().name,
        config.layers,
        config.hidden,
        config.ffn,
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.vocab,
        config.trained_context,
        config.tied,
        origin=str(path),
        sliding_layers=config.sliding_layers,
        window=config.window,
    )
    size = sum(opened.source.bytes_of(name) for name in opened.source.shapes)
    first = TYPES.get(opened.source.kind_of(opened.layout.layer["gate"].format(0)))
    four = first is not None and takes_four_bit(first, torch.bfloat16)
    return replace(shape, weight_bits=round(8 * size / shape.parameters, 2), four_bit=four, source=opened)


def check_bits(bits: float | None) -> None:
    """ConfigError for a `--weight-bits` that no quantisation has."""
    if bits is not None and not 1 <= bits <= 32:  # NaN fails too
        raise ConfigError(f"{bits:g} bits a weight are no quantisation", "--weight-bits from 1 to 32, 4.5 say")
