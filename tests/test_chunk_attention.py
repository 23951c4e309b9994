"""The risk: a kernel that others keep attends otherwise than asked, for some number of rows or heads."""

from __future__ import annotations

import pytest
import torch

from engine.ops import cuda_flash
from engine.ops.cuda_flash import FEW, choose, cudnn, flash, reference

CUDA = torch.cuda.is_available()


def tensors(rows: int, keys: int, heads: int, kv_heads: int, dim: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + keys)
    sizes = (rows, heads, dim), (kv_heads, keys, dim), (kv_heads, keys, dim)
    return tuple(torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)


def test_only_the_number_of_rows_says_which_kernel_serves(monkeypatch):
    q, keys, values = tensors(4, 4, 2, 1, 64, "cpu")
    plain = choose(q, keys, values)
    assert plain.of(1) is plain.of(FEW + 1) is reference
    for serving, few, many in (({flash, cudnn}, flash, cudnn), ({cudnn}, cudnn, cudnn), ({flash}, flash, flash)):
        monkeypatch.setattr(cuda_flash, "_runs", lambda kernel, *seen, serving=serving: kernel in serving)
        chosen = choose(q, keys, values)
        assert chosen.of(1) is chosen.of(FEW) is few and chosen.of(FEW + 1) is many


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="both kernels are a card's")
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("rows", "keys", "causal"), [(1, 65, False), (63, 700, False), (200, 200, True), (1025, 4000, False)]
)
def test_kernels_of_a_card_are_the_reference(dim, rows, keys, causal):
    q, k, v = tensors(rows, keys, 8, 2, dim, "cuda")
    attention = choose(q, k, v)
    assert attention.few is flash
    wanted, wanted_lse = reference(q, k, v, causal, dim**-0.5)
    for kernel in {attention.few, attention.many}:
        out, lse = kernel(q, k, v, causal, dim**-0.5)
        torch.testing.assert_close(out.float(), wanted.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, wanted_lse, atol=1e-3, rtol=1e-4)
