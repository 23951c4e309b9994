"""The two PTX instructions of ops/triton_mma.py in numpy, for Triton's interpreter, written from PTX's manual."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def _tensor(array: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _numbers(pairs: tl.tensor, mantissa: int) -> np.ndarray:
    """A thread's two 16-bit floats: float32 [warp, group of 8, lane of 4, 2]."""
    bits = np.ascontiguousarray(pairs.handle.data).view(np.uint16).reshape(-1, 8, 4, 2)
    if mantissa == 7:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def mma(a0, a1, a2, a3, b0, b1, c, mantissa):
    """mma.m16n8k16: A's rows g and g + 8 are in a0, a2 and a1, a3; D's columns 2 t and 2 t + 1 in each pair of four."""
    b = np.concatenate([_numbers(b0, mantissa), _numbers(b1, mantissa)], -1)
    found = ()
    for first, second in ((a0, a2), (a1, a3)):
        a = np.concatenate([_numbers(first, mantissa), _numbers(second, mantissa)], -1)
        d = np.einsum("wgtk,wntk->wgn", a, b).reshape(-1, 2)
        found += (d[:, 0], d[:, 1])
    return tuple(_tensor(own.handle.data + more, tl.float32) for own, more in zip(c, found, strict=True))


def bytes_of(low, high, select):
    """prmt: four of the eight bytes of two int32, by the lowest three bits of four nibbles."""
    low, high, select = (value.handle.data if isinstance(value, tl.tensor) else value for value in (low, high, select))
    low, high, select = np.broadcast_arrays(*(np.asarray(value, np.int64) for value in (low, high, select)))
    bytes = np.stack([word >> shift & 255 for word in (low, high) for shift in (0, 8, 16, 24)], -1)
    places = np.stack([select >> shift & 7 for shift in (0, 4, 8, 12)], -1)
    chosen = np.take_along_axis(bytes, places, -1) << np.array([0, 8, 16, 24])
    return _tensor(chosen.sum(-1).astype(np.uint32).view(np.int32), tl.int32)
