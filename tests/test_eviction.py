"""The risk: a comparison of eviction policies whose replay is not what a pool does."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RecallParams, SamplingParams
from engine.examine import looks
from gates.eviction import POLICIES, Step, misses

STEPS = st.lists(st.frozensets(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=30)


def by_hand(windows, slots: int) -> int:
    """Least recently used, as every textbook has it."""
    held, fetched = OrderedDict(), 0
    for now, window in enumerate(windows):
        fetched += len(window - held.keys())
        for page in sorted(window):
            held[page] = now
            held.move_to_end(page)
        for page in sorted(held.keys() - window, key=lambda page: (held[page], page))[: max(0, len(held) - slots)]:
            del held[page]
    return fetched


@given(STEPS, st.integers(4, 9))
def test_the_replay_is_a_pool_and_nothing_beats_the_floor(windows, slots):
    steps = [Step(window, {page: 1.0 / (page + 1) for page in range(13)}) for window in windows]
    found = {name: misses(steps, slots, name) for name in POLICIES}
    assert found["least recently used"] == by_hand(windows, slots)
    distinct = len(frozenset().union(*windows))
    assert distinct <= found["floor (knows the future)"] <= min(found.values())
    assert all(misses(steps, 13, name) == distinct for name in POLICIES), "a pool for all: each page once"


def test_mass_keeps_what_scores_high_and_age_what_was_seen_last():
    page = {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.2}
    steps = [Step(frozenset(window), page) for window in ({0, 1}, {1, 2}, {3, 1}, {0, 1})]
    assert misses(steps, 3, "least recent mass") == 4, "page 2 left, page 0 stayed"
    assert misses(steps, 3, "least recently used") == 5, "page 0 left and came back"
    with pytest.raises(ValueError, match="larger than the pool"):
        misses(steps, 1, "least recently used")


def test_an_engine_tells_what_each_layer_saw(make_engine, words):
    engine = make_engine(kv_capacity=16 * 64, sink=64)
    prepared = engine.prepare(
        words(1800), SamplingParams(max_tokens=3, ignore_eos=True), RecallParams(prefill="window")
    )
    seen = looks(engine, prepared)
    layers = engine.model.config.layers
    assert {look.layer for look in seen} == set(range(layers)) and len(seen) % layers == 0
    for look in seen[-2 * layers :]:
        assert 0 in look.window and len(look.window) <= 16 and look.scores.shape[1] >= look.window.max()
