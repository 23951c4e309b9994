"""Models of random weights: as fast as real ones of their sizes, and there before any weights are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model.load import LoadedModel, open_model
from engine.model.transformer import LayerWeights, Transformer, Weights
from engine.ops.linear import Matrix
from engine.ops.packed import TORCH, multiplied, pack
from engine.units import MIB
from engine.weights.quant import TYPES
from engine.weights.random_parts import random_parts
from kvring_cli.models import resolve
from kvring_cli.predict import Work


@dataclass(frozen=True)
class Size:
    """Of a stand-in."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of one layer's matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    @property
    def layer_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes.values())


CPU_SIZES = (Size(256, 768, 4, 2, 64, 4), Size(512, 1536, 8, 4, 64, 4), Size(1024, 3072, 8, 4, 128, 2))
CUDA_SIZES = (Size(1024, 3072, 32, 8, 128, 24), Size(4096, 12288, 32, 8, 128, 24))
"""Heads alike, and as Qwen3-4B, Qwen3-8B and Llama-3.1-8B have them: kernels are compiled once, and serve these too.

Many layers, although they need 4 GB of RAM for their KV: what the host takes for a token varies by 0.2 ms on a shared
machine, and with 8 layers that was 30 us of a layer's 150.
"""
_CACHE = 160 * MIB
"""More than a card's last cache: so many bytes of layers differ, and the others are the same ones again."""


def stand_in(size: Size, device: torch.device, dtype: torch.dtype, *, four_bit: bool = False) -> LoadedModel:
    """`four_bit`: its layers' matrices packed, as those of a GGUF file on a CPU in bfloat16."""
    opened = open_model(resolve("phantom"))  # for its tokenizer
    config = replace(opened.config, **vars(size))
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return random_matrix(rows, columns, dtype, generator)

    def packed(rows: int, columns: int) -> Matrix:
        parts = random_parts(TYPES["Q4_0"], rows, columns, columns**-0.5, generator)
        return multiplied(pack(parts, TYPES["Q4_0"], dtype, TORCH))

    ones = torch.ones(size.hidden, device=device, dtype=dtype)
    differ = size.layers if device.type == "cpu" else -(-_CACHE // (size.layer_weights * dtype.itemsize))
    layers = [
        LayerWeights(
            attention_norm=ones,
            mlp_norm=ones,
            **{name: (packed if four_bit else matrix)(*shape) for name, shape in size.shapes.items()},
        )
        for _ in range(min(size.layers, max(2, differ)))
    ]
    embed = matrix(config.vocab, size.hidden)
    every = tuple(layers[number % len(layers)] for number in range(size.layers))
    transformer = Transformer(config, Weights(embed, every, ones, embed))
    return LoadedModel(transformer, opened.tokenizer, None, config, "stand-in", "stand-in", resolve("phantom"))


def shallower(model: LoadedModel, layers: int) -> LoadedModel:
    """Its first layers only; the same weights."""
    weights = model.transformer.weights
    config = replace(model.config, layers=layers)
    transformer = Transformer(config, replace(weights, layers=weights.layers[:layers]))
    return replace(model, transformer=transformer, config=config)


def random_matrix(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[rows, columns] on the generator's device, drawn there: a card draws in milliseconds what takes a CPU seconds."""
    drawn = torch.empty(rows, columns, device=generator.device, dtype=dtype if generator.device.type != "cpu" else None)
    return drawn.normal_(0, columns**-0.5, generator=generator).to(dtype)


def work_of(model: LoadedModel, *, four_bit: bool = False) -> Work:
    """What predictions read of a loaded model."""
    return Work.of(model.config, model.transformer.dtype, four_bit=four_bit)
