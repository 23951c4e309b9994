"""The generator of documents: if the gates believe something false about it, they judge an engine wrongly."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gates.facts import DISJOINT, TASKS, matches
from gates.filler import FILLERS, HELD_OUT, text_filler
from gates.haystack import HEAD_TOKENS, TAIL_TOKENS, build, chat_counter
from gates.phantom.evaluate import measure
from gates.phantom.model import load

_PIECE = re.compile(r"<\|\w+\|>|\d| ?[a-zA-Z]{1,6}|\s|[^\sa-zA-Z\d]")


def encode(text: str) -> list[str]:
    """A stand-in tokenizer: short word pieces, single digits, single signs."""
    return _PIECE.findall(text)


COUNT = chat_counter(encode)
fillers = st.sampled_from(sorted(FILLERS))
tasks = st.sampled_from(sorted(TASKS))


@settings(max_examples=40)
@given(task=tasks, filler=fillers, seed=st.integers(0, 10**6), tokens=st.integers(600, 6000))
def test_every_document_keeps_its_promises(task, filler, seed, tokens):
    document = build(task, tokens, COUNT, seed, filler=filler)
    assert document.tokens == tokens == COUNT.prompt(document.messages(document.asked[0]))
    assert len({fact.expected for fact in document.asked}) == 12
    for placed in document.placed:
        start, end = placed.span
        assert document.text[start:end] == placed.fact.text
        assert document.text[slice(*placed.value_span)] == placed.fact.expected
        assert document.text.count(placed.fact.text) == 1
        assert sum(matches(other.fact.text, placed.fact.expected) for other in document.placed) == 1


@settings(max_examples=10)
@given(task=tasks, filler=fillers, seed=st.integers(0, 10**6))
def test_the_same_seed_writes_the_same_document(task, filler, seed):
    first, again = (build(task, 1500, COUNT, seed, filler=filler) for _ in range(2))
    assert first == again
    assert first.text != build(task, 1500, COUNT, seed + 1, filler=filler).text


@pytest.mark.parametrize("task", sorted(TASKS))
@pytest.mark.parametrize("filler", sorted(FILLERS))
def test_no_fact_stands_where_sink_or_recent_pages_would_show_it(task, filler):
    document = build(task, 12_000, COUNT, 5, filler=filler)
    for placed in document.placed:
        assert len(encode(document.text[: placed.span[0]])) >= HEAD_TOKENS - 10
        assert len(encode(document.text[placed.span[1] :])) >= TAIL_TOKENS


def test_a_fact_stands_at_the_depth_it_was_given():
    document = build("keyed", 20_000, COUNT, 1, depths=[0.45])
    assert abs(document.placed[0].depth - 0.45) < 0.01


@pytest.mark.parametrize("task", sorted(TASKS))
def test_seam_values_lie_across_a_page_boundary(task):
    document = build(task, 8_000, COUNT, 2, seam=64, lines=60)
    for fact in document.asked:
        before = len(encode("<|im_start|>user\n" + document.text[: document.where(fact).value_span[0]]))
        assert before // 64 != (before + len(encode(fact.expected)) - 1) // 64


_FUNCTION_WORDS = """a an and are as at be been did do does for from get go had has have how in is it its list long
    many much of on or our out should than that the their there they thing this to under up use used was were what when
    where which who with""".split()  # noqa: SIM905


def content_words(text: str) -> set[str]:
    """The words that carry meaning, by their first five letters (a crude stem)."""
    return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in _FUNCTION_WORDS and len(word) > 1}


def test_disjoint_questions_share_no_content_word_with_their_facts():
    assert len(DISJOINT) >= 32
    for text, question in DISJOINT:
        assert not content_words(text) & content_words(question), text


def test_twelve_facts_deal_into_two_turns_without_overlap():
    document = build("disjoint", 3000, COUNT, 3)
    first, second = document.turn(1), document.turn(2)
    assert len(first) == len(second) == 6 and not set(first) & set(second)
    messages = document.messages(second[0], [(first[0], first[0].expected)])
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[-1]["content"] == second[0].question and messages[0]["content"].startswith(document.text)


def test_lines_are_many_and_differ_only_in_number_and_value():
    document = build("lines", 42_355, COUNT, 4)
    assert len(document.placed) == 400
    shapes = {re.sub(r"\d+", "#", placed.fact.text) for placed in document.placed}
    assert len(shapes) == 1


def test_a_users_own_text_is_a_filler_unless_it_gives_the_answers_away():
    filler = text_filler("One short sentence. Another one, not longer! A third?", "mine")
    document = build("keyed", 2000, COUNT, 1, filler=filler)
    assert document.tokens == 2000 and "Another one, not longer!" in document.text
    with pytest.raises(ValueError, match="empty"):
        text_filler("  \n ")


def test_facts_that_cannot_fit_are_refused_with_numbers():
    with pytest.raises(ValueError, match="480"):
        build("keyed", 200, COUNT, 1)
    assert build("keyed", 200, COUNT, 1, asked=1).tokens == 200


def test_two_kinds_are_kept_out_of_training():
    assert len(HELD_OUT) == 2 and set(HELD_OUT) <= set(FILLERS)


@pytest.mark.parametrize(
    ("answer", "expected", "found"),
    [
        ("48213", "48213", True),
        ("The code is 48213.", "48213", True),
        ("答案是48213。", "48213", True),
        ("148213", "48213", False),
        ("482130", "48213", False),
        ("48213a", "48213", False),
        ("1,48213", "48213", False),
        ("48213.5", "48213", False),
        ("ARCH-4201!", "ARCH-4201", True),
        ("ARCH-42011", "ARCH-4201", False),
        ("", "48213", False),
    ],
)
def test_an_answer_matches_only_on_the_whole_value(answer, expected, found):
    assert matches(answer, expected) is found


PHANTOM = Path(__file__).parents[1] / "gates" / "phantom"


def test_the_shipped_phantom_is_the_file_whose_hash_is_published():
    for line in (PHANTOM / "phantom.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((PHANTOM / name).read_bytes()).hexdigest() == digest
    assert (PHANTOM / "model.safetensors").stat().st_size <= 16 * 2**20


def test_the_phantoms_tokenizer_takes_chinese_and_splits_digits():
    tokenizer = Tokenizer.from_file(str(PHANTOM / "tokenizer.json"))
    text = "黄昏时分，渔舟唱晚，牧童骑着水牛缓缓归来。今天天气很好，我们一起去公园散步。"
    assert len(tokenizer.encode(text).ids) <= 1.5 * len(text)
    assert len(tokenizer.encode("48213").ids) == 5


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_shipped_phantom_answers_both_turns_with_everything_visible(task):
    found = measure(load(PHANTOM), [(task, "prose", 1200, 7, "")], str(PHANTOM / "tokenizer.json"), False, 1)[0]
    assert (found["turn1"], found["turn2"]) == (6, 6)
