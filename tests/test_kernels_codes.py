"""The risk: a kernel reads or writes the codes of a page as other numbers than the torch form does."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops import triton_moves, triton_pages
from engine.ops.rope import rotate
from engine.ops.triton_attention import PagedAttention
from engine.recall.digest import encode_keys, pack_codes
from tests.scenes import CASES, DEVICE, CodedScene, geometry, ints


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_attention_reads_codes_as_the_reference_decodes_them(name, dim):
    scene = CodedScene(name, dim, 4, 2, 2, 63, 3, cold={1})
    attention = PagedAttention(4, 2, dim, 8, DEVICE, 8)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    for pages in (None, [0, 2]):
        seen = [0, 1, 2] if pages is None else pages
        for dtype in (torch.float32, torch.bfloat16):
            how = {"counters": counters, "dtype": dtype, "cold": pages is None}
            out = scene.attended(attention, pages, False, scene.form.layout, **how)
            wanted = scene.reference(seen, False)
            near = {torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype] * float(wanted.abs().max())
            torch.testing.assert_close(out.float(), wanted, atol=near, rtol=0)


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_appended_tokens_become_the_codes_of_the_reference(name, dim):
    scene = CodedScene(name, dim, 4, 2, 5, 62, 2)
    q, k, v = (torch.randn(5, heads, dim, device=DEVICE) * 3 for heads in (4, 2, 2))
    k[0, 0], v[1, 1] = 0, 0
    k[2, 1, 3] = v[3, 0, 5] = float("nan")
    before, turned = scene.pool.clone(), torch.empty(5, 4, dim, device=DEVICE)
    offsets = scene.rope.cos_sin(torch.arange(2 * PAGE, device=DEVICE))
    triton_pages.append(
        q,
        k,
        v,
        turned,
        scene.pool,
        ints(scene.slot_of),
        ints(scene.ids),
        geometry(PAST=2, FIRST=62, TOKENS=5),
        offsets,
        scene.form.layout,
    )
    rows = torch.arange(62, 67, device=DEVICE)
    place = torch.tensor([scene.slot_of[scene.ids[2 + int(row) // PAGE]] for row in rows], device=DEVICE)
    scene.form.write(before, place, rows % PAGE, rotate(k, *scene.rope.cos_sin(rows % PAGE)), v)
    got, wanted = (scene.form.decode(data, torch.float32) for data in (scene.pool, before))
    for part in (0, 1):
        a, b = (numbers[place, part, :, rows % PAGE] for numbers in (got, wanted))
        assert torch.equal(a.isfinite(), b.isfinite()) and b.isnan().any(-1).sum() == 1
        # A product that was rounded otherwise may fall on the other side of a step, here and there.
        near = (a - b).abs().nan_to_num() <= 1e-5 + 1e-4 * b.abs().nan_to_num()
        assert near.float().mean() > 0.99
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[place.cpu()] = False
    assert torch.equal(scene.pool[untouched], before[untouched])
    kept = [part[place[0]].view(torch.uint8)[:, :62] for part in scene.form.views(scene.pool)]
    assert all(
        torch.equal(a, b[place[0]].view(torch.uint8)[:, :62])
        for a, b in zip(kept, scene.form.views(before), strict=True)
    )


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_key_codes_of_closed_pages_are_made_from_what_the_pages_hold(name, dim):
    scene = CodedScene(name, dim, 2, 2, 1, 0, 2)
    codes = torch.zeros(2, 12, PAGE, dim // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(2, 12, PAGE, device=DEVICE)
    ids = torch.tensor(scene.ids[:2], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:2]], device=DEVICE)[None]
    groups = ints([[0, 0], [0, 1]])
    triton_pages.close_pages(scene.pool[None], slots, ids, codes, scales, groups, scene.form.layout)
    expected, sizes = encode_keys(scene.kv[:2, 0].transpose(0, 1).cpu())
    assert torch.equal(codes[:, ids].cpu(), pack_codes(expected)) and torch.equal(scales[:, ids].cpu(), sizes)


@pytest.mark.parametrize(("name", "dim"), CASES)
def test_staged_codes_are_the_numbers_that_they_stand_for(name, dim):
    scene = CodedScene(name, dim, 2, 2, 1, 0, 4, cold=(1, 3))
    pages = torch.tensor(scene.ids[:4], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:4]], device=DEVICE)
    distance = torch.tensor([4, 3, 2, 1], device=DEVICE)
    keys, values = (torch.empty(2, 4 * PAGE, dim, device=DEVICE) for _ in range(2))
    triton_moves.stage(
        scene.pool, scene.host[:, 0], slots, pages, distance, scene.turns, keys, values, 3, scene.form.layout
    )
    plain = scene.kv[:4, 0].reshape(4, 2 * PAGE, dim)
    wanted = rotate(plain, *scene.rope.page_turns(-distance.cpu().numpy())).view(4, 2, PAGE, dim)
    torch.testing.assert_close(keys.view(2, 4, PAGE, dim), wanted.transpose(0, 1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(values.view(2, 4, PAGE, dim), scene.kv[:4, 1].transpose(0, 1))
