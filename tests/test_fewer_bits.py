"""The risk: a line that can't start because the weights don't fit, where fewer bits would; or bits lost for nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import engine.platform
import kvring_cli.fewer_bits
from engine.errors import ConfigError
from engine.units import GIB
from kvring_cli.app import call
from kvring_cli.commands import launch
from kvring_cli.engines import pick_engine
from kvring_cli.fewer_bits import ENOUGH, TYPES, Asked
from tests.machines import RTX_3060, linux_server, windows_pc

BIG = "random:qwen3-8b"


def plan_line(model, facts, line, environ):
    return Asked.of(model, facts, line, environ).plan()


def fewer_bits(model, facts, line, environ):
    asked = Asked.of(model, facts, line, environ)
    return kvring_cli.fewer_bits.fewer_bits(asked, asked.plan())


def pc(gib: int):
    return windows_pc(gpus=(replace(RTX_3060, total=gib * GIB),))


def line_of(facts, model: str) -> list[str]:
    return pick_engine(facts, {}, triton_kernels=True).command(model)[1:]


@pytest.mark.parametrize("gib", [8, 10, 12, 16])
def test_the_most_bits_are_taken_that_leave_room_for_a_context(gib):
    facts = pc(gib)
    line = line_of(facts, BIG)
    assert plan_line(BIG, facts, line, {}).capacity is None
    weights, plan = fewer_bits(BIG, facts, line, {})
    others = {name: plan_line(BIG, facts, [*line, "--weights", name], {}) for name in TYPES}
    more = [others[name].largest for name in TYPES[: TYPES.index(weights)]]
    assert plan == others[weights] and plan.capacity is not None
    assert all(largest < ENOUGH for largest in more) and plan.largest >= max([*more, min(ENOUGH, plan.largest)])


@pytest.mark.parametrize("asks", ["4096", "64K", "128K", "150K"])
def test_a_line_that_asks_for_less_context_keeps_more_bits(asks):
    model, facts = "random:qwen3-14b", pc(16)
    line = [*line_of(facts, model), "--max-context", asks]
    weights, plan = fewer_bits(model, facts, line, {})
    fits = [name for name in TYPES if plan_line(model, facts, [*line, "--weights", name], {}).capacity is not None]
    assert plan.capacity.context >= int(asks.replace("K", "")) and weights in fits
    if asks in ("4096", "64K"):
        assert weights == fits[0] != fewer_bits(model, facts, line[:-2], {})[0]


def test_weights_that_leave_no_room_to_speak_of_are_too_large_too():
    """A folder of Qwen2.5-7B starts on 16 GB with a context of hundreds of tokens."""
    model = "random:qwen2.5-7b"
    facts = windows_pc(gpus=(replace(RTX_3060, total=16 * GIB, used=0),))
    line = line_of(facts, model)
    assert 0 < plan_line(model, facts, line, {}).capacity.context < 4096
    weights, plan = fewer_bits(model, facts, line, {})
    assert weights == "q8_0" and plan.capacity.context >= ENOUGH
    few = [*line, "--max-context", "256"]
    assert plan_line(model, facts, few, {}).capacity is not None and fewer_bits(model, facts, few, {}) is None


def test_a_larger_card_never_gets_fewer_bits():
    taken = [fewer_bits(BIG, pc(gib), line_of(pc(gib), BIG), {})[0] for gib in (8, 10, 12, 16)]
    assert [TYPES.index(name) for name in taken] == sorted((TYPES.index(name) for name in taken), reverse=True)


@pytest.mark.parametrize(
    ("model", "facts", "more"),
    [
        (BIG, linux_server(), []),  # it fits as it is
        (BIG, pc(12), ["--weights", "dense"]),  # somebody chose
        (BIG, pc(12), ["--weights=dense"]),
        (BIG, pc(4), []),  # nothing would do
    ],
)
def test_else_the_line_stays_as_it_is(model, facts, more):
    assert fewer_bits(model, facts, [*line_of(facts, model), *more], {}) is None


def test_pick_engine_says_so_and_its_line_fits(monkeypatch, capsys):
    facts = pc(12)
    monkeypatch.setattr(engine.platform, "gather", lambda: facts)
    assert call(["pick-engine", BIG, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["serve"][1:]
    assert line[-2] == "--weights" and plan_line(BIG, facts, line, {}).capacity is not None
    assert call(["pick-engine", BIG]) == 0
    out = capsys.readouterr().out
    assert f"--weights {line[-1]}" in out and "they don't fit" in out
    assert call(["pick-engine", "not here"]) == 0
    told = capsys.readouterr()
    assert "--weights" not in told.out and "warning: " in told.err and "not here" in told.err
    assert call(["pick-engine"]) == 0 and not capsys.readouterr().err


def test_launch_says_so_plans_with_them_and_serves_with_them(capsys):
    facts = pc(12)
    line = line_of(facts, BIG)
    more = launch._plan(BIG, facts, line)
    said = capsys.readouterr().err
    assert more == ["--weights", fewer_bits(BIG, facts, line, {})[0]] and f"weights| {more[1]}" in said
    assert "plan   | context" in said and launch._plan(BIG, facts, [*line, *more]) == []
    with pytest.raises(ConfigError, match=r"^plan: "):
        launch._plan(BIG, pc(4), line_of(pc(4), BIG))
