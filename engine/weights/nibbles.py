"""4-bit GGUF blocks as codes, for matrix products that read them without dequantising.

Q4_0, Q4_1 and Q4_K all say w = a * code + b for groups of 32 weights. Here that is (code - 8) * scale + centre, the
form that torch's 4-bit product takes. Block layouts: ggml-quants.h of https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Kind

GROUP = 32
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)


@dataclass(frozen=True)
class Nibbles:
    """A matrix of 4-bit codes: weight = (code - 8) * scale + centre, exactly what `gguf.dequantize` gives."""

    codes: np.ndarray  # uint8 [rows, columns], 0..15
    scale: np.ndarray  # float32 [rows, columns / 32]
    centre: np.ndarray  # float32 [rows, columns / 32]


def read_nibbles(raw: np.ndarray, kind: Kind) -> Nibbles:
    """raw: uint8 [rows, bytes of a row] of one of KINDS."""
    rows = raw.shape[0]
    if kind == Kind.Q4_K:
        codes, scale, low = _read_k(raw.reshape(rows, -1, 144))
    else:
        floats = 2 if kind == Kind.Q4_1 else 1
        blocks = raw.reshape(rows, -1, 2 * floats + 16)
        head = blocks[..., : 2 * floats].copy().view(np.float16).astype(np.float32)
        scale = head[..., 0]
        low = head[..., 1] if kind == Kind.Q4_1 else -8 * scale
        packed = blocks[..., 2 * floats :]
        codes = np.concatenate([packed & 15, packed >> 4], -1)  # first half of a block, then the second
    return Nibbles(codes.reshape(rows, -1), scale.reshape(rows, -1), (low + 8 * scale).reshape(rows, -1))


def _read_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """256 weights: d, dmin (float16), 12 bytes of 6-bit scales and minima for 8 groups, 128 bytes of codes."""
    d, dmin = (blocks[..., at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    codes = np.stack([packed & 15, packed >> 4], -2)  # [..., 4, 2, 32]: groups in order
    return codes, d * scales.astype(np.float32), -dmin * minima.astype(np.float32)
