"""Attention with its log-sum-exp over staged keys on a GPU: a well-kept kernel where one serves, the reference else.

cuDNN's takes grouped heads as they are and reaches 690 TFLOP/s on an H200 (4,096 rows against 16,384 keys of 128);
PyTorch's flash kernel reaches 359 with the KV heads repeated.
"""

from __future__ import annotations

from torch import Tensor, bfloat16, float16, ops

from engine.ops.attention import attend_reference


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
    group = q.shape[1] // keys.shape[0]
    keys, values = (part.repeat_interleave(group, 0)[None] for part in (keys, values))
    out, lse, *_ = ops.aten._scaled_dot_product_flash_attention(
        q.transpose(0, 1)[None], keys, values, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse[0]


def reference(q: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The same by the plain formula, for dtypes and devices that no kernel takes."""
    out, lse = attend_reference(q, keys, values, 0 if causal else None, scale)
    return out, lse.transpose(0, 1)


def choose(q: Tensor, keys: Tensor, values: Tensor) -> tuple[str, object]:
    """The first of them that runs on tensors like these, and its name."""
    if q.is_cuda and q.dtype in (bfloat16, float16):
        for name, kernel in (("cudnn", cudnn), ("flash", flash)):
            try:
                kernel(q, keys, values, True, 1.0)
                return name, kernel
            except RuntimeError:
                continue
    return "reference", reference
