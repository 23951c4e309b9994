"""The risk: the window shows something else than it should, overruns its budget, or a score misses what matters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import PAGE
from engine.errors import ConfigError
from engine.kv.page import page_count
from engine.kv.share import share_window
from engine.ops.attention import PartialAttention, attend_reference, flash
from engine.ops.rope import RopeConfig, Rotary
from engine.recall.digest import encode_keys, pack_codes, unpack_codes
from engine.recall.lexical import lexical_scores
from engine.recall.score import mass, page_lse
from engine.recall.select import HYSTERESIS, REASONS, WORTH, choose, control
from engine.recall.window import fits, span

shares = st.builds(
    lambda sink, chunk, extra, share: (sink * PAGE, chunk * PAGE, sink + 1 + chunk + 4 + extra, share),
    st.integers(0, 20),
    st.integers(1, 20),
    st.integers(0, 300),
    st.integers(1, 100),
)


@given(shares)
def test_the_shares_of_a_window_add_up_to_the_pool(case):
    sink, chunk, pool, share = case
    budget = share_window(pool, sink, share, chunk, "auto")
    assert budget.sink + budget.selection + budget.recent + budget.free == budget.pool == pool
    assert min(budget.selection, budget.free) >= 0 and budget.recent >= 1


@given(shares, st.integers(0, 5000), st.integers(1, 20))
def test_a_window_never_exceeds_the_pool_and_never_loses_sink_or_recent(case, past, own):
    sink, chunk, pool, share = case
    budget = share_window(pool, sink, share, chunk, "auto")
    own = min(own, -(-chunk // PAGE) + 1)
    if fits(past, own, pool):
        return
    selection = min(budget.selection, pool - budget.free - budget.sink - own - 1)
    always = span(past, own, budget, selection)
    eligible = np.flatnonzero(always.eligible())
    chosen = eligible[: max(0, selection)]
    window = always.window(chosen)
    assert len(window) + own <= pool
    assert len(np.unique(window)) == len(window) and (np.diff(window) > 0).all()
    assert set(range(min(budget.sink, past))) <= set(window.tolist()) and past - 1 in window


def test_a_pool_too_small_is_refused_with_its_parts():
    with pytest.raises(ConfigError, match=r"sink 4 \+ open 1 \+ chunk 16 \+ working 4 = 25"):
        share_window(24, 256, 50, 1024, "auto")


@st.composite
def selections(draw):
    pages, heads = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return (
        rng.random((heads, pages)).astype(np.float32),
        rng.random(pages) < 0.7,
        draw(st.integers(0, 70)),
        draw(st.integers(0, 2)),
        (rng.random(pages) < 0.2) * rng.random(pages),
        draw(st.integers(0, 20)),
    )


@given(selections())
def test_a_selection_keeps_its_budget_and_takes_eligible_pages_only(case):
    scores, eligible, budget, neighbors, lexical, quota = case
    chosen = choose(scores, eligible, budget, neighbors=neighbors, lexical=lexical, lexical_quota=quota)
    assert len(chosen.pages) == min(budget, eligible.sum())  # there is always something worth a free slot
    assert eligible[chosen.pages].all() and (np.diff(chosen.pages) > 0).all()
    assert (chosen.reasons == REASONS.index("lexical")).sum() <= quota


@given(selections())
def test_the_best_page_of_every_head_is_chosen_while_the_budget_has_room_for_the_heads(case):
    scores, eligible, budget, _, _, _ = case
    heads = len(scores)
    if not eligible.any() or budget < heads:
        return
    chosen = choose(scores, eligible, budget)
    best = np.where(eligible, scores, -np.inf).argmax(1)
    assert set(best.tolist()) <= set(chosen.pages.tolist())


def test_neighbours_come_along_and_lexical_cannot_crowd_out_keys():
    scores = np.zeros((1, 40), dtype=np.float32)
    scores[0, 20] = 1
    eligible, lexical = np.ones(40, dtype=bool), np.zeros(40)
    lexical[[3, 5, 7, 9, 11, 13]] = 5
    chosen = choose(scores, eligible, 8, neighbors=1, lexical=lexical, lexical_quota=2)
    assert {19, 20, 21} <= set(chosen.pages.tolist())
    assert (chosen.reasons == REASONS.index("lexical")).sum() <= 2


def test_a_held_page_stays_until_another_is_clearly_better():
    eligible = np.ones(3, dtype=bool)
    for held, other, stays in (
        (0.3, 0.3 * HYSTERESIS, True),
        (0.3, 0.3 * HYSTERESIS + 2 * WORTH, False),
        (0.0001, 0.9 * WORTH, True),  # many times better, and still next to nothing
        (0.0001, 1.1 * WORTH, False),
    ):
        scores = np.array([[held, other, 0.00005]], dtype=np.float32)
        assert choose(scores, eligible, 1, held=np.array([0])).pages.tolist() == [0 if stays else 1]


def test_a_page_brings_its_neighbours_once_and_they_stay_beside_it():
    scores = np.full((1, 12), 0.01, dtype=np.float32)
    scores[0, 5], eligible = 1.0, np.ones(12, dtype=bool)
    first = choose(scores, eligible, 3, neighbors=1)
    assert first.pages.tolist() == [4, 5, 6]
    assert choose(scores, eligible, 3, neighbors=1, held=first.pages).pages.tolist() == [4, 5, 6]
    assert choose(scores, eligible, 3, neighbors=1, held=np.array([0, 5, 9])).pages.tolist() == [0, 5, 9]


def test_no_lexical_match_selects_nothing_rather_than_the_newest():
    chosen = choose(None, np.ones(9, dtype=bool), 5, lexical=np.zeros(9), lexical_quota=5)
    assert len(chosen.pages) == 0


def test_controls_fill_the_same_budget():
    eligible, rng = np.ones(50, dtype=bool), np.random.default_rng(0)
    assert control("newest", eligible, 7, rng).pages.tolist() == list(range(43, 50))
    assert len(set(control("random", eligible, 7, rng).pages.tolist())) == 7


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_key_codes_survive_packing_and_stay_within_half_a_step(pages, seed):
    keys = torch.randn(pages, 2, PAGE, 32, generator=torch.Generator().manual_seed(seed))
    codes, scales = encode_keys(keys)
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)
    assert ((codes * scales.unsqueeze(-1) - keys).abs() <= scales.unsqueeze(-1) * 0.5 + 1e-6).all()


def test_lexical_finds_the_page_that_shares_a_run_and_tells_digit_orders_apart():
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, 400, 50 * PAGE)
    tokens[20 * PAGE + 5 : 20 * PAGE + 8] = [2, 3, 7]
    tokens[30 * PAGE + 5 : 30 * PAGE + 8] = [7, 3, 2]
    scores = lexical_scores(tokens, np.array([2, 3, 7]))
    assert scores.argmax() == 20 and scores[30] < scores[20]
    assert lexical_scores(tokens, np.array([9_000])).max() == 0
    assert lexical_scores(tokens, np.array([], dtype=np.int64)).max() == 0


# --- attention over pages against the plain formula ----------------------------------------


def paged(keys: torch.Tensor, values: torch.Tensor, rope: Rotary) -> torch.Tensor:
    """Un-rotated keys and values [S, kv_head, dim] as stored pages [n, 2, kv_head, 64, dim]; the rest is poison."""
    pages = page_count(len(keys))
    stored = torch.full((pages * PAGE, 2, *keys.shape[1:]), 9.0)
    stored[: len(keys), 0] = rope.rotate(keys, torch.arange(len(keys)) % PAGE)
    stored[: len(keys), 1] = values
    return stored.view(pages, PAGE, 2, *keys.shape[1:]).permute(0, 2, 3, 1, 4).contiguous()


@settings(max_examples=25)
@given(
    length=st.integers(0, 300),
    rows=st.sampled_from([1, 2, 8, 9, 40, 130]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    segment=st.sampled_from([1, 2, 64]),
    seed=st.integers(0, 1000),
)
def test_pages_attend_as_the_plain_formula_does(length, rows, kv_heads, group, segment, seed):
    """R(base + i) = R(base) R(i), segments merge, rows see no future: all against float64 softmax attention."""
    generator = torch.Generator().manual_seed(seed)
    rope, dim, total = Rotary(RopeConfig(theta=1e6), 32), 32, length + rows
    q = torch.randn(rows, kv_heads * group, dim, generator=generator)
    k, v = (torch.randn(total, kv_heads, dim, generator=generator) for _ in range(2))
    at = torch.arange(total)
    turned_q = rope.rotate(q, at[length:]).double()
    turned_k = rope.rotate(k, at).double().repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", turned_q, turned_k) / math.sqrt(dim)
    scores.masked_fill_(at.view(1, 1, -1) > at[length:].view(1, -1, 1), -math.inf)
    expected = torch.einsum("hts,shd->thd", scores.softmax(-1), v.double().repeat_interleave(group, 1))

    stored, past = paged(k, v, rope), length // PAGE
    partial = PartialAttention(rope, rope.rotate(q, at[length:] - past * PAGE), kv_heads)
    for start in range(0, past, segment):
        pages = np.arange(start, min(start + segment, past))
        partial.add(stored[pages], past - pages)
    own = np.arange(past, len(stored))
    partial.add(stored[own], past - own, length - past * PAGE)
    assert (partial.result().double() - expected).abs().max() < 2e-5


@pytest.mark.parametrize("first_row", [None, 0, 5, 64])
def test_the_flash_kernel_agrees_with_the_reference(first_row):
    generator = torch.Generator().manual_seed(3)
    rows = 70
    length = 200 if first_row is None else first_row + rows
    q = torch.randn(rows, 6, 64, generator=generator)
    k, v = (torch.randn(2, length, 64, generator=generator) for _ in range(2))
    out, lse = flash(q, k, v, first_row, 0.125)
    wanted, wanted_lse = attend_reference(q, k, v, first_row, 0.125, rows=33)
    assert (out - wanted).abs().max() < 1e-5 and (lse - wanted_lse).abs().max() < 1e-5


def test_token_scores_are_the_attention_mass_of_each_page():
    generator = torch.Generator().manual_seed(5)
    rope, pages = Rotary(RopeConfig(theta=1e5), 32), 7
    k = torch.randn(pages * PAGE, 2, 32, generator=generator)
    q = torch.randn(3, 4, 32, generator=generator)
    at = torch.arange(pages * PAGE)
    scores = torch.einsum(
        "thd,shd->hts", rope.rotate(q, pages * PAGE + torch.arange(3)), rope.rotate(k, at).repeat_interleave(2, 1)
    )
    attention = (scores * rope.score_scale).softmax(-1).view(2, 2, 3, pages, PAGE).sum(-1)  # [kv, group, row, page]
    stored = paged(k, k, rope)
    lse = page_lse(rope, rope.rotate(q, torch.arange(3)), stored[:, 0], pages - np.arange(pages))
    assert (mass(lse) - attention.amax((1, 2))).abs().max() < 1e-5


@given(st.integers(25, 300), st.integers(0, 40_000), st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 8))
def test_a_budget_for_a_long_system_prompt_and_tools_still_adds_up(pool, system, start, length, requests):
    from engine.kv.budget import Capacity
    from engine.prepare import _budget

    window = share_window(pool, 256, 50, 1024, "auto")
    capacity = Capacity(50_000, 782, pool, 782, True, window, 0, 0, 0, 0, 0)
    notes: list[str] = []
    tools = (start, start + length) if length else (0, 0)
    grown = _budget(capacity, system, tools, notes)
    assert grown.always + grown.selection + grown.recent + grown.free == pool and grown.always <= max(4, pool // 2)
    assert grown.recent >= 2 and grown.selection >= 0
    first, end = tools[0] // PAGE, -(-tools[1] // PAGE)
    seen = set(range(grown.sink)) | set(range(*grown.kept))
    if length and end - first <= pool // 2 - 4:
        assert set(range(first, end)) <= seen
    assert bool(notes) == (not set(range(first, end)) | set(range(-(-system // PAGE))) <= seen)
    part = grown.part(min(requests, max(1, pool // 8)))
    assert part.always + part.selection + part.recent + part.free == part.pool <= pool
    assert part.kept == grown.kept and min(part.recent, part.free) >= 0
    for budget, step in ((grown, grown.longest_step), (part, part.step_tokens)):
        own = step // PAGE
        selection = max(0, min(budget.selection, budget.pool - budget.free - budget.always - own - 1))
        always = span(700, own, budget, selection)
        assert not always.eligible()[slice(*budget.kept)].any()
        visible = always.window(np.flatnonzero(always.eligible())[:selection]).tolist()
        assert set(range(*budget.kept)) <= set(visible) and sorted(set(visible)) == visible
        assert len(visible) + own <= budget.pool
