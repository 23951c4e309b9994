"""The risk: a task whose right answer is not in its document, stands where everything is seen, or can be guessed."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from gates.context import Context
from gates.facts import matches
from gates.filler import FILLERS, read_filler, text_filler
from gates.haystack import build
from gates.multi_needle import common
from gates.options import GateOptions
from gates.registry import run_in
from gates.ruler import PAPERS, make_paper
from gates.suite import chosen_tasks, run
from tests.models import phantom_folder
from tests.test_haystack import COUNT, encode

tasks = st.sampled_from(sorted(PAPERS))


@settings(max_examples=15)
@given(task=tasks, seed=st.integers(0, 10**6), tokens=st.integers(3_000, 6_000))
def test_every_paper_holds_its_answers_and_its_length(task, seed, tokens):
    paper = make_paper(task, tokens, COUNT, seed, "prose")
    assert 0.6 * tokens <= paper.tokens <= 1.02 * tokens
    for ask in paper.asks:
        messages = paper.messages(ask)
        document = "\n".join(message["content"] for message in messages).removesuffix(ask.text)
        assert all(matches(document, value) for value in ask.values)
        assert ask.answered(f"It is {' and '.join(ask.values)}.")
        assert not ask.answered(" ".join(ask.values[:-1])) and not ask.answered("")
        assert [message["role"] for message in messages][::2] == ["user"] * (len(messages) // 2 + 1)
    assert paper == make_paper(task, tokens, COUNT, seed, "prose")
    assert paper != make_paper(task, tokens, COUNT, seed + 1, "prose")


@pytest.mark.parametrize("task", sorted(set(PAPERS) - {"frequent"}))
def test_no_asked_value_stands_among_the_newest_pages(task):
    paper = make_paper(task, 12_000, COUNT, 3, "prose")
    for ask in paper.asks:
        text = "\n".join(message["content"] for message in paper.messages(ask))
        last = max(text.rindex(value) for value in ask.values if value not in ask.text)
        assert len(encode(text[last:])) > 700


def test_what_is_too_short_is_refused_with_numbers():
    with pytest.raises(ValueError, match="don't fit"):
        make_paper("multi-value", 300, COUNT, 1, "prose")


CHINESE = "春天来临时，老师在河边慢慢地看书。邻居说，傍晚要到市场里去准备晚饭！" * 40
CODE = "\n".join(f"def f{i}(x):\n    return x * {i}  # step {i}" for i in range(200))


OWN = {"chinese": CHINESE, "code": CODE, "run-on": "no stop at all " * 3_000, "solid": "x" * 50_000}


@pytest.mark.parametrize("text", OWN.values(), ids=OWN)
def test_any_text_makes_a_haystack_of_the_length_that_was_asked(text):
    document = build("keyed", 6_000, COUNT, 1, filler=text_filler(text, "own"))
    assert abs(document.tokens - 6_000) <= 8
    assert all(document.text.count(fact.text) == 1 for fact in document.asked)


def test_a_control_by_shared_words_is_run_only_where_such_words_are_common():
    made = {name: build("disjoint", 6_000, COUNT, 1, filler=text_filler(text)) for name, text in OWN.items()}
    assert common(build("disjoint", 6_000, COUNT, 1)) and not common(made["chinese"]) and not common(made["solid"])


def test_a_text_that_gives_the_answers_away_is_refused_or_left_out():
    plain = "The weather was fine that day.\n" * 50
    document = build("keyed", 2_000, COUNT, 1, filler=text_filler(plain, "own"), asked=2)
    giving = plain + "".join(f"They say it is {fact.expected} there.\n" for fact in document.asked)
    again = build("keyed", 2_000, COUNT, 1, filler=text_filler(giving, "own"), asked=2)
    assert all(again.text.count(fact.expected) == 1 for fact in again.asked)
    with pytest.raises(ValueError, match="collides"):
        build("lines", 2_000, COUNT, 1, filler=text_filler("As line 1 says, so does line 2.\n" * 50, "own"), asked=2)


def test_a_text_that_names_a_papers_keys_in_capitals_is_left_out_there_too():
    plain = "The weather was fine that day.\n" * 50
    paper = make_paper("conversation", 4_000, COUNT, 1, text_filler(plain))
    keys = [ask.text.removeprefix("What is the access code for ").rstrip("?") for ask in paper.asks]
    naming = plain + "".join(f"{key.title()} has another one.\n" for key in keys)
    again = make_paper("conversation", 4_000, COUNT, 1, text_filler(naming))
    said = " ".join(text for turn in again.turns for text in turn).lower()
    assert [said.count(key) for key in keys] == [1] * len(keys)


def test_a_haystack_that_is_no_text_is_refused_and_of_a_large_one_its_beginning_read(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "empty").write_text(" \n")
    for name, said in (("binary", "not UTF-8"), ("empty", "holds no text"), ("missing", "can't be read")):
        with pytest.raises(ConfigError, match=said):
            read_filler(str(tmp_path / name))
    (tmp_path / "large").write_text("\ufeffA line.\n" * 9)
    monkeypatch.setattr("gates.filler.MOST", 20)
    begun = islice(read_filler(str(tmp_path / "large")).stream(Random(1)), 3)
    assert [*begun] == ["A line.", "\ufeffA line.", "\ufeffA"]
    assert read_filler(None) == "prose" and "prose" in FILLERS


def suite(phantom, settings=None, **options):
    config = EngineConfig(str(phantom_folder()), **(settings or {}))
    return run(Context(config, phantom, GateOptions(**options), lambda what, share: None))


@pytest.mark.parametrize("prefill", ["auto", "window"])
def test_the_suite_marks_what_the_model_cannot_do_and_counts_the_rest(prefill, phantom):
    report = suite(phantom, {"prefill": prefill}, quick=True, length=2_500, tasks=("keyed", "variables"))
    judged = [check.name.split(":")[0] for check in report.checks if not check.name.startswith("instrument")]
    assert report.verdict == "PASS" and judged == ["keyed"]
    assert any(note.startswith("variables: not counted") for note in report.notes)


def test_a_prompt_that_no_pool_would_hide_is_refused_with_the_length_that_would_do(phantom):
    context = Context(EngineConfig(str(phantom_folder())), phantom, GateOptions(length=3_500), lambda what, share: None)
    for name in ("multi-needle", "long-problem", "agreement"):
        with pytest.raises(ConfigError, match=r"3,500 tokens is less than two pools of 1,792") as refused:
            run_in(name, context)
        assert "3584" in refused.value.fix
    tight = replace(context, config=replace(context.config, max_context=900))
    with pytest.raises(ConfigError, match=r"--max-context is 900"):
        run_in("agreement", tight)
    with pytest.raises(ConfigError, match=r"1,024 tokens doesn't outgrow"):
        run_in("arch", replace(context, config=replace(context.config, max_context=2_048)))


def test_packed_positions_are_judged_by_what_the_model_finds_within_its_own_context(phantom):
    short = replace(phantom, config=replace(phantom.config, trained_context=2_048))
    report = suite(short, {"positions": "compact"}, quick=True, length=3_500, tasks=("keyed",))
    assert report.verdict == "PASS", report.reasons
    dense, recall = (next(arm for arm in report.arms if arm.name == name) for name in ("dense", "recall"))
    assert max(outcome.tokens for outcome in dense.outcomes) < 1_200 and recall.hits == recall.trials
    assert {arm.name for arm in report.arms} == {"dense", "recall", "recall off"}


def test_the_suite_without_a_task_that_counts_says_weak_model(phantom):
    assert suite(phantom, quick=True, length=2_500, tasks=("variables",)).verdict == "WEAK MODEL"
    with pytest.raises(ConfigError, match=r"7 pages leaves none to select"):
        suite(phantom, length=2_500, budget=448)
    with pytest.raises(ConfigError, match=r"less than two pools of 1,280"):
        suite(phantom, length=2_500, budget=1_280)
    with pytest.raises(ConfigError, match="no task 'nonsense'"):
        suite(phantom, tasks=("nonsense",))
    assert chosen_tasks(GateOptions(tasks=("keyed", "lines", "keyed"))) == ("keyed", "lines")
