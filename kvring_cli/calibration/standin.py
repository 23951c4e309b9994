"""Models of random weights: as fast as real ones of their sizes, and there before any weights are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model.load import LoadedModel, open_model
from engine.model.transformer import LayerWeights, Transformer, Weights
from engine.ops.linear import Matrix
from engine.ops.packed import TORCH, multiplied, pack
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


CPU_SIZES = (Size(256, 768, 4, 2, 64, 4), Size(512, 1536, 8, 4, 64, 4), Size(1024, 3072, 8, 4, 128, 2))
CUDA_SIZES = (Size(1024, 3072, 8, 4, 128, 8), Size(2048, 6144, 16, 8, 128, 6), Size(4096, 12288, 32, 8, 128, 4))


def stand_in(size: Size, device: torch.device, dtype: torch.dtype, *, four_bit: bool = False) -> LoadedModel:
    """`four_bit`: its layers' matrices packed, as those of a GGUF file on a CPU in bfloat16."""
    opened = open_model(resolve("phantom"))  # for its tokenizer
    config = replace(opened.config, **vars(size))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(device, dtype)

    def packed(rows: int, columns: int) -> Matrix:
        parts = random_parts(TYPES["Q4_0"], rows, columns, columns**-0.5, generator)
        return multiplied(pack(parts, TYPES["Q4_0"], dtype, TORCH))

    q, kv = size.heads * size.head_dim, size.kv_heads * size.head_dim
    shapes = {
        "qkv": (q + 2 * kv, size.hidden),
        "o": (size.hidden, q),
        "gate_up": (2 * size.ffn, size.hidden),
        "down": (size.hidden, size.ffn),
    }
    ones = torch.ones(size.hidden, device=device, dtype=dtype)
    layers = tuple(
        LayerWeights(
            attention_norm=ones,
            mlp_norm=ones,
            **{name: (packed if four_bit else matrix)(*shape) for name, shape in shapes.items()},
        )
        for _ in range(size.layers)
    )
    embed = matrix(config.vocab, size.hidden)
    transformer = Transformer(config, Weights(embed, layers, ones, embed))
    return LoadedModel(transformer, opened.tokenizer, None, config, "stand-in", "stand-in", resolve("phantom"))


def work_of(model: LoadedModel, *, four_bit: bool = False) -> Work:
    """What predictions read of a loaded model."""
    return Work.of(model.config, model.transformer.dtype, four_bit=four_bit)
