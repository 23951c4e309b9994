"""The risk: kernels score, choose or make room otherwise than their torch references, so other pages are seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel here")

from engine.config import PAGE
from engine.ops import geometry as g
from engine.ops import triton_pages, triton_score, triton_select, triton_slots
from engine.recall.digest import encode_keys, pack_codes
from engine.recall.score import mass, page_lse
from engine.recall.select import HYSTERESIS, WORTH, choose
from tests.scenes import DEVICE, Scene, geometry, ints


@pytest.mark.parametrize(
    ("dim", "tokens", "far", "splits"),
    [(64, 2, [0, 1], 2), (80, 2, [0, 1], 2), (128, 2, [1], 4), (64, 9, [0, 1], 2), (80, 9, [1], 4)],
)
def test_page_scores_and_closed_codes_are_the_reference(dim, tokens, far, splits):
    heads, kv_heads, past = 4, 2, 7
    scene = Scene(dim, heads, kv_heads, tokens, 0, past, torch.bfloat16)
    codes = torch.zeros(len(far), past + 10, PAGE, dim // 2, dtype=torch.uint8, device=DEVICE)
    scales = torch.zeros(len(far), past + 10, PAGE, device=DEVICE)
    groups = ints([[0] * len(far), far])
    ids = torch.tensor(scene.ids[:past], device=DEVICE)
    slots = torch.tensor(scene.slot_of[scene.ids[:past]], device=DEVICE)[None]
    triton_pages.close_pages(scene.pool[None], slots, ids, codes, scales, groups)
    expected, sizes = encode_keys(scene.kv[:past, 0, far].cpu())  # CUDA's division by a constant is not exact
    assert torch.equal(codes[:, ids].transpose(0, 1).cpu(), pack_codes(expected))
    assert torch.equal(scales[:, ids].transpose(0, 1).cpu(), sizes)

    scored, spare = (5, 3) if tokens > 5 else (tokens, 0)  # the last of the tokens; rows of no token
    scores = triton_score.PageScores(scored, heads, kv_heads, past + 4, DEVICE, 4, 4)
    scores.listed.fill_(9)
    state = geometry(PAST=past, FARTHEST=4, TOKENS=tokens)
    q = torch.cat([scene.q, scene.q.new_full((spare, heads, dim), 1e4)])
    scores(q, codes, scales, groups[1], ints(scene.ids), state, scene.turns, scene.rope.score_scale)
    distance = np.minimum(np.arange(past, 0, -1), 4)
    expected, sizes = expected.to(DEVICE).float(), sizes.to(DEVICE)
    looking = scene.q[-scored:].view(scored, kv_heads, -1, dim)[:, far].reshape(scored, -1, dim)
    wanted = page_lse(scene.rope, looking, expected, distance, sizes)
    rows, far = scored * heads // kv_heads, len(far)
    torch.testing.assert_close(scores.lse[:far, :rows, :past], wanted, atol=2e-2, rtol=2e-3)
    parts = [
        part[: far * scores.lse.shape[1] * splits].view(far, -1, splits)[:, :rows] for part in (scores.top, scores.sum)
    ]
    assert scores.splits == splits
    torch.testing.assert_close((parts[1].log() + parts[0]).logsumexp(-1), scores.lse[:far, :rows, :past].logsumexp(-1))
    assert not scores.listed[:far].any()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_ranks_and_picks_choose_what_the_reference_chooses(seed, compact):
    random = np.random.default_rng(seed)
    kv_heads, tokens, past, capacity = int(random.integers(1, 5)), int(random.integers(1, 4)), 90 + seed, 110
    slots, budget, neighbors = 64, int(random.integers(1, 24)), seed % 3
    scores = triton_score.PageScores(tokens, kv_heads, kv_heads, capacity, DEVICE, 3 * kv_heads, 3 * kv_heads)
    scores.rows, scores.splits = tokens, 3
    scores.lse.fill_(float("nan"))
    lse = torch.tensor(random.normal(size=(kv_heads, tokens, past)) * 3, device=DEVICE, dtype=torch.float32)
    scores.lse[:, :tokens, :past] = lse
    for split in range(3):
        part = lse[..., split::3]
        for out, value in ((scores.top, part.amax(-1)), (scores.sum, (part - part.amax(-1, True)).exp().sum(-1))):
            out[: kv_heads * 8 * 3].view(kv_heads, 8, 3)[:, :tokens, split] = value
    always = np.zeros(past, dtype=bool)
    always[:2] = always[-3:] = True
    excluded = np.zeros(past, dtype=bool)
    excluded[10:13] = True
    eligible = ~always & ~excluded
    lexical = np.where(random.random(past) < 0.1, random.random(past), 0.0)
    quota = budget // 4
    held = np.flatnonzero(eligible & (random.random(past) < 0.3))
    shared = {"neighbors": neighbors, "lexical": lexical, "lexical_quota": quota}
    taken = choose(None, eligible, budget, **shared).pages
    wanted = choose(mass(lse).cpu().numpy(), eligible, budget, held=held, **shared).pages

    role = np.full(capacity, g.HIDDEN)
    role[:past][eligible], role[:past][always] = g.CANDIDATE, g.ALWAYS
    role[taken] = g.TAKEN
    why = np.zeros(capacity)
    why[held] = g.KEY
    role, why = (torch.tensor(x, device=DEVICE).to(torch.uint8) for x in (role, why))
    scores.order.fill_(7)
    pages = capacity + 5
    ids = random.permutation(pages)[:capacity]
    tables = random_tables(random, pages, slots, ids[:past], tick=9)
    before = {name: getattr(tables, name).clone() for name in ("slot_of", "page_in", "last_used")}
    fixed = np.flatnonzero(always | np.isin(np.arange(past), taken))
    window, choice = ints(np.full(capacity, -9)), triton_select.Choice.empty(slots, DEVICE)
    misses = triton_slots.Misses.empty(1, slots, DEVICE).layer(0)
    left, depth = budget - len(taken), min(budget, int(eligible.sum()))
    assert depth <= triton_select.most_ranks(kv_heads, capacity)
    state = geometry(PAST=past, TOKENS=tokens, LEFT=left, DEPTH=depth, WINDOW=len(fixed) + left, TICK=9)
    counters = torch.zeros(g.COUNTERS, dtype=torch.int64, device=DEVICE)
    bars = ints([-1] * kv_heads)
    triton_select.rank(scores, bars, why, role, choice, state, HYSTERESIS, WORTH)
    enough = bars.clone()  # where most or all of those that count pass
    scores.listed.zero_()
    bars.copy_(
        torch.where(ints(random.integers(0, 2, kv_heads)) == 1, enough, ints(random.integers(0, 1 << 30, kv_heads)))
    )
    triton_select.rank(scores, bars, why, role, choice, state, HYSTERESIS, WORTH)
    triton_select.pick(scores, role, why, choice, state, neighbors)
    restless = ints([seed % 2])
    triton_slots.bring(ints(fixed), choice, restless, window, ints(ids), tables, misses, state, counters, compact)

    expected = np.sort(np.concatenate([wanted, np.flatnonzero(always)]))
    got = window[: len(expected)].tolist()
    assert (got if compact else sorted(got)) == expected.tolist() and window[len(expected)] == -9
    assert np.flatnonzero(why.cpu().numpy()[:past]).tolist() == wanted.tolist()
    check_claims(before, tables, misses, ids[expected], 9)
    assert int(counters[g.FETCHED]) == int(misses.count)
    changed = set(np.setdiff1d(held, taken)) != set(np.setdiff1d(wanted, taken))
    assert bool(choice.changed) == bool(restless) == changed and choice.redo
    choice.changed.zero_()
    choice.pages.fill_(-9)  # a window that stays is not built again
    state[g.STEADY] = 1
    for before in (1, 0):
        restless.fill_(before)
        triton_slots.bring(ints(fixed), choice, restless, window, ints(ids), tables, misses, state, counters, compact)
        assert (bool(choice.redo), int(restless)) == (bool(before), 0) and window[: len(expected)].tolist() == got


def random_tables(random, pages: int, slots: int, mine: np.ndarray, tick: int) -> triton_slots.Tables:
    page_in = np.full(slots, -1)
    filled = random.permutation(slots)[: slots - 3]
    page_in[filled] = random.permutation(pages)[: len(filled)]
    slot_of = np.full(pages, -1)
    slot_of[page_in[filled]] = filled
    pinned = np.zeros(pages)
    pinned[random.permutation(np.setdiff1d(np.arange(pages), mine))[:2]] = 1
    last_used = random.integers(0, tick, slots)
    return triton_slots.Tables(
        ints(slot_of), ints(page_in), ints(last_used), torch.tensor(pinned, device=DEVICE).to(torch.uint8)
    )


def check_claims(before, tables, out, wanted: np.ndarray, tick: int) -> None:
    """Every wanted page is resident, each slot holds one page, and victims were the least recently used."""
    slot_of, page_in, used = (getattr(tables, name).cpu().numpy() for name in ("slot_of", "page_in", "last_used"))
    assert (slot_of[wanted] >= 0).all() and (used[slot_of[wanted]] == tick).all()
    full = np.flatnonzero(page_in >= 0)
    assert (slot_of[page_in[full]] == full).all() and (slot_of >= 0).sum() == len(full)
    missing = int(out.count)
    misses, places = out.pages[:missing].tolist(), out.places[:missing].tolist()
    assert [int(slot_of[page]) for page in misses] == places
    old = {name: table.cpu().numpy() for name, table in before.items()}
    age = np.where(old["page_in"] < 0, -1, old["last_used"])
    locked = (old["page_in"] >= 0) & (tables.pinned.cpu().numpy()[np.maximum(old["page_in"], 0)] != 0)
    resident = old["slot_of"][wanted]
    age[resident[resident >= 0]] = tick
    free = np.flatnonzero((age != tick) & ~locked)
    assert places == free[np.argsort(age[free], kind="stable")][:missing].tolist()


def test_opened_pages_take_free_then_oldest_slots_and_are_zero():
    layers, slots, pages = 2, 6, 9
    pool = torch.full((layers, slots, 2, 1, PAGE, 16), float("nan"), device=DEVICE)
    page_in = np.array([[0, 1, 2, 3, -1, 4], [4, 3, 2, 1, 0, -1]])
    slot_of = np.full((layers, pages), -1)
    for layer in range(layers):
        for slot, page in enumerate(page_in[layer]):
            if page >= 0:
                slot_of[layer, page] = slot
    pinned = torch.zeros(pages, dtype=torch.uint8, device=DEVICE)
    pinned[0] = 1
    tables = triton_slots.Tables(ints(slot_of), ints(page_in), ints([[1, 2, 3, 1, 0, 5]] * 2), pinned)
    triton_slots.open_pages(ints([7, 8]), pool, tables, ints(np.zeros((layers, 8))), geometry(TICK=6))
    assert tables.page_in.tolist() == [[0, 1, 2, 8, 7, 4], [8, 3, 2, 1, 0, 7]]
    assert tables.slot_of[:, 7].tolist() == [4, 5] and tables.slot_of[:, 8].tolist() == [3, 0]
    assert int(tables.slot_of[0, 3]) == -1 and int(tables.slot_of[1, 4]) == -1
    assert (pool[0, [3, 4]] == 0).all() and (pool[1, [0, 5]] == 0).all() and pool[0, 0].isnan().all()
