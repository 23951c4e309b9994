"""Models of well-known shapes with random weights: `random:qwen3-8b`. For measuring speed; they say nothing of sense.

One token a byte of text, so that a document's length in tokens is known beforehand.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from engine.errors import ConfigError, ModelError
from engine.model.config import ModelConfig
from engine.model.gemma import LOCAL_THETA, every_but_sixth, gemma_fields
from engine.model.sizes import PUBLISHED, Sizes
from engine.model.transformer import LayerWeights, Transformer, Weights
from engine.ops.four_bit import BLOCK
from engine.ops.linear import Matrix
from engine.ops.packed import TORCH, Kernels, multiplied, pack, stack
from engine.ops.rope import RopeConfig
from engine.text.tokenizer import Tokenizer
from engine.weights.quant import QuantType
from engine.weights.random_parts import random_parts

PREFIX = "random:"
_SPREAD = 0.02
"""Standard deviation of a weight, as models are initialised."""
_PIECE = 1 << 25
"""Packed weights that are drawn at once."""


SHAPES = {**PUBLISHED, "tiny": Sizes("qwen3", 2, 64, 128, 4, 2, 64, 320, 1e4, 1 << 20, tied=True)}
CONTEXT = 1 << 20
"""Tokens that may be asked of random weights: more than the shape was trained on, as nothing was learnt."""


def shape_of(name: str) -> Sizes:
    """The shape that `random:NAME` asks for; ModelError with the known ones."""
    shape = SHAPES.get(name.removeprefix(PREFIX).lower())
    if shape is None:
        raise ModelError(f"no shape is named '{name}'", "one of " + ", ".join(PREFIX + known for known in SHAPES))
    return shape


def random_config(name: str) -> ModelConfig:
    """What `random:NAME` is, before any weights."""
    shape = shape_of(name)
    gemma = {}
    if shape.family == "gemma3":
        local = RopeConfig(theta=LOCAL_THETA)
        gemma = gemma_fields(shape.hidden, every_but_sixth(shape.layers), shape.window, local, shape.head_dim)
    return ModelConfig(
        family=shape.family,
        layers=shape.layers,
        hidden=shape.hidden,
        ffn=shape.ffn,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        norm_eps=1e-6,
        rope=RopeConfig(theta=shape.theta),
        trained_context=CONTEXT,
        tied=shape.tied,
        attention_bias=shape.bias,
        **(gemma or {"qk_norm": shape.family == "qwen3"}),
    )


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, kind: QuantType | None = None, kernels: Kernels = TORCH
) -> tuple[Transformer, Tokenizer, ModelConfig]:
    """The same weights for the same name, device, dtype and type.

    kind: of all matrices, computed with by `kernels`; None for plain ones.
    """
    shape, config = shape_of(name), random_config(name)
    random = torch.Generator(device).manual_seed(0)

    def plain(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, _SPREAD, generator=random)

    def matrix(rows: int, columns: int) -> Matrix:
        if kind is None:
            return plain(rows, columns)
        if columns % kind.block:
            raise ConfigError(
                f"rows of {columns} are no whole blocks of {kind.block}, which {kind.name} needs", "--weights q8_0"
            )
        pieces = []
        for row in range(0, rows, step := max(1, _PIECE // columns // BLOCK) * BLOCK):
            parts = random_parts(kind, min(step, rows - row), columns, _SPREAD, random)
            piece = pack(parts, kind, dtype, kernels)
            pieces.append(multiplied(piece) if rows % BLOCK == 0 else piece)
        return stack(pieces)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.float32 if config.sandwich else dtype, device=device)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = tuple(
        LayerWeights(
            attention_norm=ones(shape.hidden),
            qkv=matrix(q + 2 * kv, shape.hidden),
            o=matrix(shape.hidden, q),
            mlp_norm=ones(shape.hidden),
            gate_up=matrix(2 * shape.ffn, shape.hidden),
            down=matrix(shape.hidden, shape.ffn),
            qkv_bias=plain(q + 2 * kv) if shape.bias else None,
            q_norm=ones(shape.head_dim) if config.qk_norm else None,
            k_norm=ones(shape.head_dim) if config.qk_norm else None,
            attention_out_norm=ones(shape.hidden) if config.sandwich else None,
            mlp_out_norm=ones(shape.hidden) if config.sandwich else None,
        )
        for _ in range(shape.layers)
    )
    embed = matrix(shape.vocab, shape.hidden)
    head = embed if shape.tied else matrix(shape.vocab, shape.hidden)
    weights = Weights(embed, layers, ones(shape.hidden), head)
    return Transformer(config, weights), _byte_tokenizer(), config


def random_path(name: str) -> Path:
    """What stands where a file's path would."""
    return Path(name.replace(":", "-"))


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, bos=None, eos=())
