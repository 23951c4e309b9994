"""What a card's products of one row cost by the type of the weights: plain, packed, and the output matrix.

Launched as CUDA graphs, as in a step, over more matrices than a cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine.ops.linear import Matrix, linear
from engine.ops.packed import pack
from engine.trials import median_seconds
from engine.units import MIB
from engine.weights.quant import TYPES
from engine.weights.random_parts import random_parts
from kvring_cli.calibration.graph import LAUNCHES, graphed
from kvring_cli.calibration.standin import CUDA_SIZES, random_matrix

Points = list[tuple[str, float, float]]
PACKED = ("Q4_K", "Q6_K", "Q8_0", "TQ2_0")
"""Types that are measured; a prediction takes the nearest of them for another, and says so."""
HEADS = (16_384, 131_072)
"""Rows of the output matrices."""
SHARES = (4, 1)
"""Of a layer's rows: two sizes, so that what a launch costs is told from what a byte does."""
_ROUNDS = 7
_CACHE = 256 * MIB


def cases(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Callable[[], Points]]]:
    """What is measured, and how."""
    for rows in HEADS:
        yield f"an output matrix of {rows:,} rows", lambda rows=rows: [_head(rows, device, dtype)]
    yield "products with plain weights", lambda: list(_products(None, device, dtype))
    for name in PACKED:
        yield f"products with {name}", lambda name=name: list(_products(name, device, dtype))


def _head(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[str, float, float]:
    head = random_matrix(rows, CUDA_SIZES[-1].hidden, dtype, torch.Generator(device).manual_seed(0))
    row = torch.ones(1, head.shape[1], device=device, dtype=dtype)
    seconds = _seconds(lambda number: linear(row, head).float(), device)
    return f"head/{_name(dtype)}", head.nbytes, head.nbytes / seconds


def _products(kind: str | None, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """`product/TYPE`: bytes of a layer's matrices a second for one row; `unpack/TYPE`: the same where many rows make
    plain ones of them first.
    """
    for share in SHARES:
        layers = [_layer(kind, share, device, dtype)]
        size = sum(matrix.nbytes for matrix in layers[0])
        layers += [_layer(kind, share, device, dtype) for _ in range(_CACHE // size)]
        rows = {columns: torch.ones(1, columns, device=device, dtype=dtype) for _, columns in _shapes(share)}

        def product(number: int, layers=layers, rows=rows) -> Tensor:
            return [linear(rows[matrix.shape[1]], matrix) for matrix in layers[number % len(layers)]][-1]

        yield f"product/{kind.lower() if kind else _name(dtype)}", size, size / _seconds(product, device)
        if kind is None:
            continue
        from engine.ops.triton_packed import dequantise

        def unpack(number: int, layers=layers) -> Tensor:
            return [dequantise(matrix) for matrix in layers[number % len(layers)]][-1]

        yield f"unpack/{kind.lower()}", size, size / _seconds(unpack, device)


def _layer(kind: str | None, share: int, device: torch.device, dtype: torch.dtype) -> list[Matrix]:
    generator = torch.Generator(device).manual_seed(0)
    if kind is None:
        return [random_matrix(*shape, dtype, generator) for shape in _shapes(share)]
    from engine.ops.triton_packed import TRITON

    parts = (random_parts(TYPES[kind], *shape, shape[1] ** -0.5, generator) for shape in _shapes(share))
    return [pack(part, TYPES[kind], dtype, TRITON) for part in parts]


def _shapes(share: int) -> list[tuple[int, int]]:
    return [(rows // share, columns) for rows, columns in CUDA_SIZES[-1].shapes.values()]


def _seconds(work: Callable[[int], Tensor], device: torch.device) -> float:
    return median_seconds(graphed(work, device), device, _ROUNDS) / LAUNCHES


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
