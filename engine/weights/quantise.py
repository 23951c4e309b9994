"""A file's matrices quantised while they are loaded, by the `gguf` package's quantisers or, where it has none, ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quantize
from torch import Tensor

from engine.errors import ConfigError, ModelError
from engine.weights.quant import TYPES, QuantType
from engine.weights.quantise_k import BITS, quantise_k
from engine.weights.source import WeightSource

_BLOCK = 1 << 18
"""Weights quantised at once: what stays in a second-level cache. Sixteen times as many take K types twice as long."""
_TERNARY_ERROR = 0.02
"""Of a block's largest value: how far weights may lie from -d, 0 and d. Those trained so are there but for rounding."""
_LARGEST = float(np.finfo(np.float16).max)
"""Of a weight: every type's scales are float16, and Q4_1 holds the least weight of a block in one."""


def quantise(values: np.ndarray, name: str) -> np.ndarray:
    """float32 [rows, columns], whole blocks -> uint8 [rows, bytes of a row]. NotImplementedError: nobody can."""
    return quantise_k(values, name) if name in BITS else quantize(values, GGMLQuantizationType[name])


def quantisers() -> tuple[str, ...]:
    """Names of the types that can be quantised to, as `--weights` takes them."""
    able = []
    for name, kind in TYPES.items():
        try:
            quantise(np.zeros((1, kind.block), np.float32), name)
            able.append(name.lower())
        except NotImplementedError:
            continue
    return tuple(able)


class QuantisedSource:
    """Another source, with the matrices of `names` as one type. Implements WeightSource.

    ConfigError for a type that can't be quantised to; ModelError, when a matrix is read, if a weight is no number or
    too large for the scales, or if it isn't ternary and should be. Matrices whose rows are no whole number of blocks
    stay as they are: `kept` names them.
    """

    def __init__(self, source: WeightSource, kind: QuantType, names: set[str]) -> None:
        if kind.name.lower() not in quantisers():
            raise ConfigError(
                f"{kind.name} can be read, and nothing here can quantise to it",
                f"--weights {', '.join(quantisers())}; or quantise with llama.cpp's llama-quantize and give the .gguf",
            )
        self.files: list[Path] = source.files
        self.shapes = source.shapes
        self._source, self._kind = source, kind
        self._names = {name for name in names if source.shapes[name][-1] % kind.block == 0}
        self.kept = names - self._names | getattr(source, "kept", set())

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        return self._source.blocks(name)

    def raw(self, name: str) -> Tensor:
        if name not in self._names:
            return self._source.raw(name)
        rows, columns = self.shapes[name]
        raw = torch.empty(rows, self.bytes_of(name) // rows, dtype=torch.uint8)
        step = max(1, _BLOCK // columns)
        for first, block in self._source.blocks(name):
            for row in range(0, len(block), step):
                values = block[row : row + step].float().numpy()
                self._insist_on_range(name, first + row, values)
                if self._kind.ternary:
                    self._insist_on_ternary(name, first + row, values)
                raw[first + row : first + row + len(values)] = torch.from_numpy(quantise(values, self._kind.name))
        return raw

    def where(self, name: str) -> str:
        return self._source.where(name)

    def bytes_of(self, name: str) -> int:
        if name not in self._names:
            return self._source.bytes_of(name)
        rows, columns = self.shapes[name]
        return rows * columns // self._kind.block * self._kind.block_bytes

    def kind_of(self, name: str) -> str:
        return self._kind.name if name in self._names else self._source.kind_of(name)

    def _insist_on_range(self, name: str, row: int, values: np.ndarray) -> None:
        """A NaN would be a block of zeros in one type and of NaN in another."""
        worst = max(values.max(), -values.min(), key=lambda value: np.inf if np.isnan(value) else value)
        if not worst <= _LARGEST:
            raise ModelError(
                f"tensor '{name}' in {self.where(name)} holds {worst:g} as a weight, in rows from {row}: scales of "
                f"{self._kind.name} are float16 and end at {_LARGEST:,.0f}",
                "the file is damaged: download it again",
            )

    def _insist_on_ternary(self, name: str, row: int, values: np.ndarray) -> None:
        blocks = np.abs(values.reshape(-1, self._kind.block))
        size = blocks.max(1, keepdims=True)
        off = np.minimum(blocks, size - blocks) > _TERNARY_ERROR * size
        if off.any():
            raise ModelError(
                f"{off.mean():.0%} of the weights of '{name}', rows from {row}, are none of -d, 0 and d: the model was "
                f"not trained to be ternary, and {self._kind.name} would leave nothing of it",
                "--weights q4_k keeps what a model learnt",
            )
