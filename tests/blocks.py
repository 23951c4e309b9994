"""Blocks of quantised numbers of any type, and their values by `gguf.quants.dequantize`, the oracle."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from engine.weights.quant import QuantType

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)} | dict.fromkeys(
    ("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)
)
"""Where a block's float16 numbers lie, if not at its start alone."""


def random_blocks(kind: QuantType, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes at all, save for the scales: every combination of codes is one that a file may hold."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, blocks, kind.block_bytes), dtype=np.uint8)
    for at in FLOATS.get(kind.name, (0,)):
        raw[..., at : at + 2] = random.uniform(0.01, 0.1, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(rows, -1)


def below_three(raw: np.ndarray, kind: QuantType) -> np.ndarray:
    """Blocks of TQ2_0 without the code that no quantiser writes: each 3 becomes a 2."""
    blocks = raw.reshape(len(raw), -1, kind.block_bytes).copy()
    codes = blocks[..., :64]
    codes ^= codes & codes >> 1 & 0x55
    return blocks.reshape(raw.shape)


def values(raw: np.ndarray, kind: QuantType) -> torch.Tensor:
    """float32 [row, column], by the oracle."""
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind.name]))


def furthest(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error, of the largest value."""
    return float((got.float().cpu() - wanted).abs().max() / wanted.abs().max())
