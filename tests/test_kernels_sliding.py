"""The risk: a kernel shows a layer that slides another window than its own, or writes beside it.

Held against the torch reference, on a GPU where there is one, else under Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.kv.tail import Tail, TailShape
from engine.ops import geometry as g
from engine.ops import triton_layers
from engine.ops.norm import geglu
from engine.ops.rope import RopeConfig, Rotary
from engine.ops.sliding import attend_window
from engine.ops.triton_sliding import SlidingAttention
from tests.scenes import DEVICE

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "window", "before", "tokens", "spare"),
    [
        (64, 4, 2, 100, 0, 1, 0),
        (80, 2, 2, 100, 99, 1, 0),
        (96, 6, 2, 64, 200, 1, 0),
        (128, 3, 1, 65, 130, 40, 24),
        (256, 4, 1, 130, 1000, 1, 0),
        (256, 4, 1, 100, 320, 21, 0),
        (16, 2, 1, 1, 7, 9, 3),
    ],
)
def test_a_kernel_appends_to_the_tail_and_attends_to_the_window(
    dim, heads, kv_heads, window, before, tokens, spare, dtype
):
    """Rows beyond the step's tokens write nothing, and change no other; the tail has lost what nobody sees any more."""
    torch.manual_seed(dim + before)
    rope, end = Rotary(RopeConfig(theta=1e4), dim, DEVICE), before + tokens
    q, k, v = (torch.randn(end + spare, n, dim, device=DEVICE).to(dtype) for n in (heads, kv_heads, kv_heads))
    turned_q, turned_k = (rope.rotate(x, torch.arange(end + spare, device=DEVICE)) for x in (q, k))
    wanted = attend_window(
        turned_q[before:end].float(),
        *(x[:end].float().transpose(0, 1) for x in (turned_k, v)),
        window,
        rope.score_scale,
    )

    shape = TailShape(3, kv_heads, dim, window, dtype)
    tail = Tail(shape, shape.room(0), DEVICE)
    tail.data.fill_(float("nan"))
    for start in range(0, before, 50):
        stop = min(before, start + 50)
        tail.reserve(start, stop)
        tail.append(1, turned_k[start:stop], v[start:stop], start)
    tail.reserve(before, end)
    kept = tail.data.clone()
    words = torch.from_numpy(g.vector({**tail.words(before), g.TOKENS: tokens})).to(DEVICE)
    qkv = torch.cat([x[before:] for x in (q, k, v)], 1)  # as a model gives them: parts of one tensor
    parts = qkv.split([heads, kv_heads, kv_heads], 1)
    got = SlidingAttention(rope, heads, kv_heads, window, 40)(1, *parts, words)
    torch.testing.assert_close(got[:tokens].float(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert got.isfinite().all()
    by_kernel = tail.data.clone()
    tail.data.copy_(kept)
    tail.append(1, turned_k[before:end], v[before:end], before)
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(by_kernel, tail.data, equal_nan=True, **near)


def test_the_gate_of_a_gemma():
    torch.manual_seed(5)
    for dtype in (torch.float32, torch.bfloat16):
        x = (4 * torch.randn(3, 200, device=DEVICE)).to(dtype)
        torch.testing.assert_close(triton_layers.geglu(x), geglu(x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
