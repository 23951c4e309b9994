"""The risk: a token is stored, copied or staged elsewhere, or otherwise turned, than its page says."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.config import PAGE
from engine.ops import triton_moves, triton_pages
from engine.ops.rope import rotate
from tests.scenes import CUDA, DEVICE, Scene, geometry, ints


@pytest.mark.parametrize("dim", [64, 80])
def test_appended_tokens_are_rotated_and_stored_where_they_belong(dim):
    heads, kv_heads, tokens, first, spare = 4, 2, 5, 62, 3  # spare rows are of no token
    scene = Scene(dim, heads, kv_heads, tokens, first, 2, torch.bfloat16)
    fused = torch.randn(tokens + spare, (heads + 2 * kv_heads) * dim, device=DEVICE).to(torch.bfloat16)
    q, k, v = fused.view(tokens + spare, -1, dim).split([heads, kv_heads, kv_heads], 1)
    turned = torch.empty(tokens + spare, heads, dim, device=DEVICE)
    offsets = scene.rope.cos_sin(torch.arange(2 * PAGE, device=DEVICE))
    state = geometry(PAST=2, FIRST=first, TOKENS=tokens)
    before = scene.pool.clone()
    triton_pages.append(q, k, v, turned, scene.pool, ints(scene.slot_of), ints(scene.ids), state, offsets)
    rows = torch.arange(first, first + tokens, device=DEVICE)
    wanted = rotate(q[:tokens].float(), *scene.rope.cos_sin(rows))
    torch.testing.assert_close(turned[:tokens], wanted, atol=1e-5, rtol=1e-5)
    keys = rotate(k[:tokens], *scene.rope.cos_sin(rows % PAGE))
    for index, row in enumerate(rows.tolist()):
        slot = scene.slot_of[scene.ids[2 + row // PAGE]]
        torch.testing.assert_close(scene.pool[slot, 0, :, row % PAGE], keys[index], atol=1e-2, rtol=1e-2)
        assert torch.equal(scene.pool[slot, 1, :, row % PAGE], v[index])
        before[slot, :, :, row % PAGE] = scene.pool[slot, :, :, row % PAGE]
    assert torch.equal(scene.pool.nan_to_num(9.0), before.nan_to_num(9.0))


def test_bytes_survive_the_way_to_the_host_and_back():
    layers, slots, pages = 2, 5, 7
    pool = torch.randn(layers, slots, 2, 2, PAGE, 16, device=DEVICE).to(torch.bfloat16)
    host = torch.zeros(pages, layers, 2, 2, PAGE, 16, dtype=torch.bfloat16)
    host = host.pin_memory() if CUDA else host
    where = torch.tensor([[3, 1], [0, 4]], device=DEVICE)
    triton_moves.store_pages(pool, host, where, torch.tensor([6, 2], device=DEVICE), 3)
    if CUDA:
        torch.cuda.synchronize()
    for layer, page, slot in ((0, 6, 3), (0, 2, 1), (1, 6, 0), (1, 2, 4)):
        assert torch.equal(host[page, layer], pool[layer, slot].cpu())
    back = torch.zeros_like(pool[1])
    triton_moves.gather(host[:, 1], back, ints([2, 6, 0]), ints([1, 3, 2]), ints([2]), 4)
    assert torch.equal(back[1], pool[1, 4]) and torch.equal(back[3], pool[1, 0]) and not back[2].any()


@pytest.mark.parametrize("dim", [64, 80])
def test_staged_pages_are_rotated_to_the_chunk_and_cold_ones_come_from_the_host(dim):
    scene = Scene(dim, 2, 2, 1, 0, 4, torch.float32, cold=(1, 3))
    pages = torch.tensor(scene.ids[:4], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:4]], device=DEVICE)
    distance = torch.tensor([4, 3, 2, 1], device=DEVICE)
    keys, values = (torch.empty(2, 4 * PAGE, dim, device=DEVICE) for _ in range(2))
    triton_moves.stage(scene.pool, scene.host[:, 0], slots, pages, distance, scene.turns, keys, values, 3)
    plain = scene.kv[:4, 0].reshape(4, 2 * PAGE, dim)
    wanted = rotate(plain, *scene.rope.page_turns(-distance.cpu().numpy())).view(4, 2, PAGE, dim)
    torch.testing.assert_close(keys.view(2, 4, PAGE, dim), wanted.transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(values.view(2, 4, PAGE, dim), scene.kv[:4, 1].transpose(0, 1))
