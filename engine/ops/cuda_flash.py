"""Attention with its log-sum-exp over staged keys on a GPU: a well-kept kernel where one serves, the reference else.

cuDNN's reaches 690 TFLOP/s on an H200 (4,096 rows against 16,384 keys of 128) where PyTorch's flash kernel reaches 359,
but spends 40 to 60 ms on a plan for each pair of lengths that it has not met in the process, and is no faster for few
rows (64 and 200 rows: 72 us against 46 and 70 over 4,003 keys, 206 against 78 and 226 over 16,384).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, bfloat16, float16, ops

from engine.ops.attention import attend_reference

Kernel = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
FEW = 1024
"""Rows up to which flash serves. Which of them depends on nothing else, so that what streams is the dense pass bit for
bit; 1,024 rows against 131,072 keys cost 36 layers 0.1 s more than cuDNN's rate, about as much as its plans."""


def cudnn(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, heads, dim], keys and values [kv_head, S, dim] -> out [T, heads, dim] of q's dtype, lse float32 [heads, T].

    causal: row r sees keys 0..r. RuntimeError where cuDNN doesn't serve.
    """
    out, lse, *_ = ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1)[None], keys[None], values[None], None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0])


def flash(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same through PyTorch's own flash kernel, compute capability 8.0 and newer."""
    keys, values = (part.transpose(0, 1)[None] for part in (keys, values))
    lengths = q.shape[0], keys.shape[1]
    out, lse, *_ = ops.aten._flash_attention_forward(
        q[None], keys, values, None, None, *lengths, 0.0, causal, False, scale=scale
    )
    return out[0], lse[0]


def reference(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same by the plain formula, for dtypes and devices that no kernel takes."""
    out, lse = attend_reference(q, keys, values, 0 if causal else None, scale)
    return out, lse.transpose(0, 1)


@dataclass(frozen=True)
class ChunkAttention:
    """The kernels that serve few rows and many."""

    few: Kernel
    many: Kernel

    def of(self, rows: int) -> Kernel:
        return self.few if rows <= FEW else self.many

    def __call__(self, q: Tensor, *seen: object) -> tuple[Tensor, Tensor]:
        """As each of them."""
        return self.of(len(q))(q, *seen)


def choose(q: Tensor, keys: Tensor, values: Tensor) -> ChunkAttention:
    """Those that run on tensors like these."""
    kernels = [kernel for kernel in (flash, cudnn) if _runs(kernel, q, keys, values)] or [reference]
    return ChunkAttention(kernels[0], kernels[-1])


def _runs(kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor) -> bool:
    if not q.is_cuda or q.dtype not in (bfloat16, float16):
        return False
    try:
        kernel(q, keys, values, True, 1.0)
    except RuntimeError:
        return False
    return True
