"""The risk: a gate that can't turn red, or calls a fault of the instrument a pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from gates.arms import blinding, forgetting
from gates.context import Context
from gates.facts import Fact
from gates.interval import clopper_pearson, fisher, sign_test
from gates.options import GateOptions
from gates.registry import GATES, known, run_gate, run_in
from gates.verdict import Arm, Check, Outcome, Report
from tests.models import phantom_folder


def arm(name="default", kind="positive", hits=12, trials=12, cut=0, **more):
    outcomes = [
        Outcome(1, 42_355, 1, 0.5, "48213", "", index < hits, cut=hits <= index < hits + cut) for index in range(trials)
    ]
    return Arm(name, "keyed", kind, outcomes, **more)


def verdict(*arms, checks=(), blinding=()):
    return Report("x", list(arms), list(checks), blinding_switches=list(blinding)).judge()


DENSE = arm("dense", "dense")
OFF = arm("recall off", "control", hits=0, twin="default")


def test_all_green_beside_red_controls_passes():
    report = verdict(DENSE, arm(), OFF, checks=[Check("instrument", True, "")])
    assert (report.verdict, report.exit_code) == ("PASS", 0)


def test_one_miss_fails():
    assert verdict(DENSE, arm(hits=11), OFF).exit_code == 1


def test_a_control_that_stays_green_is_blind_whatever_else_is_green():
    report = verdict(DENSE, arm(), arm("recall off", "control", hits=12, twin="default"))
    assert (report.verdict, report.exit_code) == ("BLIND", 3)
    assert verdict(DENSE, arm(hits=3), arm("recall off", "control", hits=12)).exit_code == 3


def test_a_weak_model_is_not_judged():
    report = verdict(arm("dense", "dense", hits=11), arm(), OFF)
    assert (report.verdict, report.exit_code) == ("WEAK MODEL", 4) and "11 of 12" in report.reasons[0]


def test_cut_answers_are_inconclusive_and_wrong_ones_are_not():
    assert verdict(DENSE, arm(hits=10, cut=2), OFF).exit_code == 5
    assert verdict(DENSE, arm(hits=10, cut=1), OFF).exit_code == 1


def test_a_control_counts_only_beside_its_green_twin():
    report = verdict(DENSE, arm(), arm("tail 256", "control", hits=0, twin="tail 64"))
    assert report.exit_code == 1 and "twin" in report.reasons[0]


def test_a_failed_instrument_check_and_a_failed_control_check_turn_it_red():
    assert verdict(DENSE, arm(), OFF, checks=[Check("pages hidden", False, "0 hidden")]).exit_code == 1
    assert verdict(checks=[Check("a", True, ""), Check("flip", False, "not caught", control=True)]).exit_code == 3


def test_a_wrong_answer_is_held_against_the_engine_only_where_the_model_knows_better():
    fact = Fact("keyed", "red fox", "The code is 48213.", "The code?", "48213")
    for said, seeing, verdict, noted in (("48213", "", "PASS", 0), ("1", "48213", "FAIL", 0), ("1", "2", "PASS", 1)):
        report = Report("reuse", checks=[Check("cached", True, "")])
        report.answered("right", fact, said, lambda seeing=seeing: seeing)
        assert (report.judge().verdict, len(report.notes)) == (verdict, noted)


def test_a_switch_that_blinds_the_engine_fails_by_name():
    report = verdict(DENSE, arm(), OFF, blinding=["NINFER_KV_RETRIEVE=0"])
    assert report.exit_code == 1 and "NINFER_KV_RETRIEVE=0" in report.reasons[0]


def test_nothing_run_is_not_a_pass():
    assert verdict().exit_code == 5


def test_an_unknown_gate_is_refused_by_name():
    with pytest.raises(ConfigError, match="no gate 'nonsense'"):
        run_gate("nonsense", EngineConfig(model=""))


def test_all_names_every_gate_once():
    assert "suite" not in known(["all"], outside=True) and "agreement" in known(["all"], outside=True)
    with pytest.raises(ConfigError, match="needs the inside"):
        known(["reuse", "fits"], outside=True)
    assert known(["fits", "all"]) == ["fits", *(name for name in GATES if name not in ("fits", "suite"))]


@given(trials=st.integers(1, 60), data=st.data())
def test_the_interval_is_the_exact_one(trials, data):
    """Oracle: the definition. At each bound, the tail beyond the hits has just 2.5 %."""
    hits = data.draw(st.integers(0, trials))
    low, high = clopper_pearson(hits, trials)
    assert low <= hits / trials <= high

    def chance(rate, counts):
        return sum(comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in counts)

    assert low == 0.0 if hits == 0 else abs(chance(low, range(hits, trials + 1)) - 0.025) < 1e-6
    assert high == 1.0 if hits == trials else abs(chance(high, range(hits + 1)) - 0.025) < 1e-6


def test_thousands_of_trials_have_an_interval_too():
    """Oracle: the closed forms. `--seeds 100` of twelve questions is more than C(n, k) in a float can count."""
    low, high = clopper_pearson(3000, 3000)
    assert abs(low - 0.025 ** (1 / 3000)) < 1e-9 and high == 1.0
    low, high = clopper_pearson(600, 1200)
    assert abs(low + high - 1) < 1e-9 and 0.47 < low < 0.475
    assert abs(sign_test(600, 600) - 0.5 - comb(1200, 600) / 2**1201) < 1e-9


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_the_exact_test_of_two_rates_counts_the_ways_they_can_fall(trials, others, data):
    """Oracle: every way of dealing that many hits over both."""
    hits, more = data.draw(st.integers(0, trials)), data.draw(st.integers(0, others))
    deals = list(combinations(range(trials + others), hits + more)) if trials + others <= 12 else []
    as_few = sum(sum(place < trials for place in deal) <= hits for deal in deals)
    p = fisher(hits, trials, more, others)
    assert 0 < p <= 1 and (not deals or abs(p - as_few / len(deals)) < 1e-12)


def test_arms_are_compared_in_pairs_only_where_they_were_asked_the_same():
    dense, same = arm("dense", hits=6, trials=6), arm(hits=1, trials=6)
    assert same.worse(dense) == sign_test(5, 0)
    others = arm(hits=1, trials=6)
    others.outcomes = [replace(outcome, expected="11111") for outcome in others.outcomes]
    assert others.worse(dense) == fisher(1, 6, 6, 6)


def test_losing_is_only_called_so_beyond_chance():
    assert sign_test(0, 0) == 1.0 and sign_test(4, 0) == 0.0625 and sign_test(5, 0) < 0.05 < sign_test(5, 1)


def test_recall_off_by_the_users_switch_turns_the_gate_red(phantom):
    config = EngineConfig(model=str(phantom_folder()), retrieve="off")
    context = Context(config, phantom, GateOptions(quick=True), lambda what, share: None)
    report = run_in("multi-needle", context, tokens=9_000)
    assert report.exit_code == 1 and "NINFER_KV_RETRIEVE" in report.reasons[0]
    default = next(arm for arm in report.arms if arm.name == "default")
    assert default.hits <= 1 and default.hidden_pages > 0 and default.pages_selected == 0


def test_reuse_off_by_the_users_switch_turns_the_gate_red(phantom):
    config = EngineConfig(model=str(phantom_folder()), reuse=False)
    report = run_in("reuse", Context(config, phantom, GateOptions(), lambda what, share: None), tokens=1_500)
    assert report.exit_code == 1 and "NINFER_KV_REUSE_HOSTBACKED" in report.reasons[0]
    assert any(check.name == "A, B, A: cached" and not check.ok for check in report.checks)


@pytest.mark.parametrize(("field", "value"), [("retrieve", "off"), ("decode", "window"), ("decode", "exact")])
def test_each_switch_that_blinds_recall_is_named(field, value):
    assert any(f"--{field} {value}" in said for said in blinding(EngineConfig(model="", **{field: value})))
    assert not blinding(EngineConfig(model="")) and not forgetting(EngineConfig(model=""))


@pytest.mark.parametrize("name", ["lossless", "resend", "reuse"])
def test_a_model_too_short_for_a_gate_is_told_so_before_anything_is_computed(name, phantom):
    short = replace(phantom, config=replace(phantom.config, trained_context=2048))
    context = Context(
        EngineConfig(model=str(phantom_folder())), short, GateOptions(quick=True), lambda what, share: None
    )
    with pytest.raises(ConfigError, match=r"needs a context of .* trained on 2,048"):
        run_in(name, context)
