"""The risk: attention over pages, or a pass between the products, that is fast and wrong.

Each is held against its torch reference, on a GPU where there is one, else under Triton's interpreter on tiny shapes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.ops import geometry as g
from engine.ops import triton_layers
from engine.ops.norm import rms_norm
from engine.ops.triton_attention import PagedAttention
from tests.scenes import DEVICE, Scene

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "tokens", "first", "past"),
    [
        (64, 4, 2, 1, 5, 6),
        (80, 2, 2, 1, 63, 3),
        (96, 6, 2, 3, 0, 2),
        (128, 8, 2, 7, 60, 3),
        (256, 2, 1, 1, 0, 1),
        (64, 3, 3, 1, 9, 0),
    ],
)
@pytest.mark.parametrize("compact", [False, True])
def test_paged_attention_is_the_reference(dim, heads, kv_heads, tokens, first, past, dtype, compact):
    cold = {0, past - 1} if past else set()
    scene = Scene(dim, heads, kv_heads, tokens, first, past, dtype, cold)
    window = [page for page in range(past) if page % 3 != 1]
    attention = PagedAttention(heads, kv_heads, dim, 8, DEVICE, 8)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    how = {"counters": counters, "dtype": torch.float32, "spare": 8 - tokens if tokens > 1 else 0}
    for pages in (None, window):
        seen = list(range(past)) if pages is None else pages
        out = scene.attended(attention, pages, compact, **how)
        torch.testing.assert_close(out, scene.reference(seen, compact), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    met = sum(page in cold for page in range(past)) + sum(page in cold for page in window)
    assert int(counters[g.STREAMED]) == met


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 300), st.integers(1, 600))
def test_partial_sums_have_room_for_every_number_of_tokens(kv_heads, group, most, units):
    """Eight tokens of groups of five wrote beyond buffers that were large enough for 1 and for 256."""
    attention = PagedAttention(kv_heads * group, kv_heads, 2, most, torch.device("cpu"), units)
    for tokens in range(1, most + 1):
        assert attention._splits(tokens) * tokens * kv_heads * group <= attention._lse.numel()


def test_the_passes_between_the_products():
    torch.manual_seed(3)
    x, y = torch.randn(3, 200, device=DEVICE), torch.randn(3, 200, device=DEVICE)
    w = torch.rand(200, device=DEVICE)
    total, normed = triton_layers.add_rms_norm(x, y, w, 1e-5)
    torch.testing.assert_close(total, x + y)
    torch.testing.assert_close(normed, rms_norm(x + y, w, 1e-5))
    torch.testing.assert_close(triton_layers.add_rms_norm(x, None, w, 1e-5)[1], rms_norm(x, w, 1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(triton_layers.swiglu(x), torch.nn.functional.silu(gate) * up)
    for tokens in (1, 2):
        qkv = torch.randn(tokens, 13 * 80, device=DEVICE)
        plain, a, b = qkv.clone().view(tokens, 13, 80), torch.rand(80, device=DEVICE), torch.rand(80, device=DEVICE)
        triton_layers.head_norm(*qkv.view(tokens, 13, 80).split([9, 2, 2], 1)[:2], a, b, 1e-6)
        got = qkv.view(tokens, 13, 80)
        torch.testing.assert_close(got[:, :9], rms_norm(plain[:, :9], a, 1e-6))
        torch.testing.assert_close(got[:, 9:11], rms_norm(plain[:, 9:11], b, 1e-6))
        assert torch.equal(got[:, 11:], plain[:, 11:])
    out, lse = torch.randn(3, 2, 80, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    more, other = torch.randn(3, 2, 80, device=DEVICE), torch.randn(2, 3, device=DEVICE)
    share = torch.sigmoid(other - lse).T[..., None]
    wanted, both = out * (1 - share) + more * share, torch.logaddexp(lse, other)
    triton_layers.merge_into(out, lse, more, other)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, both)
