"""The risk: a later turn pays again, resumes from what is not its own prefix, or reports cached what was computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import PAGE, RecallParams, SamplingParams
from engine.prefix import EXACT, PrefixIndex

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
EXACTLY = RecallParams(prefill="exact", decode="exact")


def turns(document: str, *pairs: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate((document, *pairs))]


def test_a_second_turn_computes_only_its_new_tokens_and_answers_as_a_cold_run(make_engine, words):
    warm, cold = make_engine(), make_engine(reuse=False)
    first = warm.complete(warm.prepare(turns(words(2400)), SHORT, EXACTLY))
    follow = turns(words(2400), first.text, "And what came after the bridge?")
    second = warm.complete(warm.prepare(follow, SHORT, EXACTLY))
    assert second.usage.cached >= first.usage.prompt - PAGE
    assert second.usage.computed == second.usage.prompt - second.usage.cached < 3 * PAGE
    assert cold.complete(cold.prepare(follow, SHORT, EXACTLY)).tokens == second.tokens


def test_cached_is_what_was_not_computed(make_engine, words, monkeypatch):
    engine = make_engine()
    engine.complete(engine.prepare(words(1000), SHORT))
    computed = []
    real = type(engine.model.transformer).forward

    def counting(self, tokens, attend):
        computed.append(len(tokens))
        return real(self, tokens, attend)

    monkeypatch.setattr(type(engine.model.transformer), "forward", counting)
    result = engine.complete(engine.prepare(words(1000), SHORT))
    assert result.usage.cached > 0
    assert sum(computed) == result.usage.computed + result.usage.generated - 1


def test_a_changed_first_token_shares_nothing(make_engine, words):
    engine = make_engine()
    engine.complete(engine.prepare("A " + words(1000), SHORT))
    assert engine.complete(engine.prepare("The " + words(1000), SHORT)).usage.cached == 0


def test_pages_of_a_window_never_serve_an_exact_request(make_engine, words):
    engine = make_engine()
    engine.complete(engine.prepare(words(2400), SHORT, RecallParams(prefill="window")))
    exact = engine.complete(engine.prepare(words(2400), SHORT, EXACTLY))
    # What was computed before anything was hidden is exact by nature.
    assert exact.usage.cached <= 32 * PAGE
    dense = make_engine(ring="off", kv_capacity=None)
    assert dense.complete(dense.prepare(words(2400), SHORT)).tokens == exact.tokens


def test_pages_of_one_scorer_never_serve_another(make_engine, words):
    engine = make_engine()
    tail = " ".join(["and then the engine"] * 60)
    for scorer in ("token", "lexical"):
        params = RecallParams(prefill="recall", scorer=scorer)
        result = engine.complete(engine.prepare(words(2400) + tail, SHORT, params))
        assert result.usage.cached <= 32 * PAGE


def test_a_b_a_keeps_both_while_the_store_lasts(make_engine, words):
    engine = make_engine(max_context=4096)
    a, b = words(1200, 1), words(1200, 2)
    for prompt in (a, b):
        engine.complete(engine.prepare(prompt, SHORT))
    again = engine.complete(engine.prepare(a, SHORT))
    assert again.usage.cached >= again.usage.prompt - PAGE


def test_the_least_recently_used_conversation_goes_first_tail_first(make_engine, words):
    engine = make_engine(max_context=3000)
    a, b, c = words(1000, 1), words(1000, 2), words(2000, 3)
    for prompt in (a, b, a, c):
        engine.complete(engine.prepare(prompt, SHORT))
        engine.audit(deep=True)
    kept_b = engine.complete(engine.prepare(b, SHORT)).usage.cached
    assert kept_b == 0


def test_under_pressure_the_older_conversation_loses_its_tail_and_what_is_in_use_loses_nothing(make_engine, words):
    """48 pages; a and b leave 15 each, and c needs 22: the 4 that are short are the end of b."""
    engine = make_engine(max_context=48 * PAGE)
    a, b, c = words(1000, 1), words(1000, 2), words(1400, 3)
    for prompt in (a, b, a):
        engine.complete(engine.prepare(prompt, SHORT))
    again = engine.admit(engine.prepare(a, SHORT))
    held = list(again.sequence.pages)
    newcomer = engine.admit(engine.prepare(c, SHORT))
    while engine.step():
        engine.audit(deep=True)
        assert again.done or again.sequence.pages[: len(held)] == held
    assert again.cached == 15 * PAGE and newcomer.finish == "length"
    assert engine.complete(engine.prepare(b, SHORT)).usage.cached == 11 * PAGE


def test_reuse_off_caches_nothing(make_engine, words):
    engine = make_engine(reuse=False)
    for _ in range(2):
        assert engine.complete(engine.prepare(words(1000), SHORT)).usage.cached == 0
    assert engine.stats()["checkpoint_pages"] == 0


@settings(max_examples=60)
@given(st.data())
def test_the_index_matches_the_longest_common_prefix_of_what_was_published(data):
    """Against a plain model: a list of published token lists."""
    index, published, references = PrefixIndex(), [], np.zeros(10_000, dtype=np.int32)
    fresh = iter(range(10_000))
    alphabet = st.lists(st.integers(0, 1), min_size=0, max_size=5)
    for _ in range(data.draw(st.integers(1, 8))):
        tokens = [token for bit in data.draw(alphabet) for token in [bit] * PAGE]
        pages = [next(fresh) for _ in range(len(tokens) // PAGE)]
        for page in index.publish(tokens, pages, [EXACT] * len(pages)):
            references[page] = 1
        published.append(tokens)
    probe = [token for bit in data.draw(alphabet) for token in [bit] * PAGE] + [7] * data.draw(st.integers(0, 63))
    common = max(
        next((i for i, (a, b) in enumerate(zip(probe, known, strict=False)) if a != b), min(len(probe), len(known)))
        for known in published
    )
    assert len(index.match(probe, set())[0]) == common // PAGE
    size = len(index)
    assert len(index.evict(size, references)) == size and len(index) == 0


def test_eviction_spares_pages_in_use():
    index, references = PrefixIndex(), np.zeros(10, dtype=np.int32)
    index.publish([1] * PAGE + [2] * PAGE, [0, 1], [EXACT, EXACT])
    references[[0, 1]] = [1, 2]
    assert index.evict(5, references) == []
    references[1] = 1
    assert index.evict(1, references) == [1]


@pytest.mark.parametrize("tag", ["window", "recall:fused"])
def test_the_index_gives_only_what_is_accepted(tag):
    index = PrefixIndex()
    index.publish([1] * PAGE, [0], [tag])
    assert index.match([1] * PAGE, set())[0] == []
    assert index.match([1] * PAGE, {tag})[0] == [0]
    index.publish([1] * PAGE, [1], [EXACT])
    assert index.match([1] * PAGE, {tag})[0] == [1]
