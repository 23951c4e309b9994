"""The risk: a plan's time that nothing was measured for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device import hardware
from engine.device_profile import DeviceProfile, built_in, save
from engine.errors import ConfigError
from engine.platform import this_platform
from engine.units import GIB
from kvring_cli import forecast as forecasts
from kvring_cli.app import call
from kvring_cli.cards import find_card
from kvring_cli.planning import card_place, plan_for
from kvring_cli.predict import Work, predict, seconds
from kvring_cli.shapes import PUBLISHED
from tests.machines import linux_server

WORK = Work(4, 256, 768, 4, 2, 64, 8192, "float32", "float32", 4, 4, 4)
RATES = {
    kind: ((1_000_000, 1e9), (10_000_000, 2e9))
    for kind in ("layer/float32", "attend/float32", "row/float32", "head/float32", "attend_row/float32")
} | {"score_row/float32": ((1_000_000, 1e9),), "turn/float32": ((1_000_000, 1e8),)}


def prediction(rates=RATES, **more):
    return predict(
        WORK, rates, **{"context": 16384, "pool": 4032, "window": 3776, "selection": 1984, "chunk": 1024, **more}
    )


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e6, 1e12)), min_size=1, max_size=5, unique_by=lambda p: p[0])
)
def test_time_is_positive_and_exact_at_what_was_measured(points):
    bands = tuple(sorted(points))
    for size, rate in bands:
        assert seconds(bands, size) == pytest.approx(size / rate, rel=1e-3)
    for amount in (1, 10**3, 10**6, 10**10):
        assert seconds(bands, amount) > 0


def test_more_context_takes_longer_and_a_prompt_within_the_pool_is_not_scored():
    short, long = prediction(context=8192), prediction(context=32768)
    assert long.prefill_seconds > 4 * short.prefill_seconds, "exact prefill grows with the square"
    assert long.decode_rate < short.decode_rate and long.second_turn_seconds > short.second_turn_seconds
    dense = {kind: bands for kind, bands in RATES.items() if not kind.startswith(("score_row", "turn"))}
    assert prediction(dense, context=2048).decode_rate > long.decode_rate


def test_packed_weights_take_what_was_measured_of_their_own_type():
    """A plain layer's 10 MB of products take 1 ms; those of the packed bytes take 1 + 1, and as long to unpack."""
    plain = replace(WORK, weight_bytes=10e6 / WORK.layer_weights)
    packed = replace(plain, packed=(("q4_k", 3e6), ("q6_k", 1e6)), packed_head="q6_k", head_bytes=1)
    products = {"product/q4_k": ((3_000_000, 3e9),), "product/q6_k": ((1_000_000, 1e9),)}
    unpacked = {kind.replace("product", "unpack"): bands for kind, bands in products.items()}
    rates = RATES | products | unpacked | {"product/float32": ((10_000_000, 1e10),)}
    sizes = {"context": 2048, "pool": 4032, "window": 3776, "selection": 1984, "chunk": 1024}
    before, after = predict(plain, rates, **sizes), predict(packed, rates, **sizes)
    head = packed.head_size / 1e9 - seconds(RATES["head/float32"], plain.head_size)
    assert 1 / after.decode_rate - 1 / before.decode_rate == pytest.approx(4 * (0.002 - 0.001) + head)
    assert after.prefill_seconds - before.prefill_seconds == pytest.approx(2 * 4 * 0.002), "unpacked in each chunk"
    with pytest.raises(ConfigError, match="q4_k"):
        predict(packed, RATES, **sizes)


def test_a_type_that_was_not_measured_takes_the_nearest_ones_rate_and_says_so():
    card = card_place(find_card("12gb"), 32 * GIB)
    measured = ["bfloat16", "q4_k", "q6_k", "q8_0"]
    for weights, bits, nearest in (("q4_0", 4.5, "q4_k"), ("auto", 2.1, "q4_k"), ("q8_0", 8.5, "")):
        work, note = forecasts.work_of(PUBLISHED["qwen3-8b"], card, bits, weights, measured)
        assert dict(work.packed).keys() == {nearest or weights}
        assert note.endswith(f"are taken at the rate measured in {nearest}") if nearest else not note


def test_what_a_step_costs_beside_its_layers_is_paid_once():
    dense = {kind: bands for kind, bands in RATES.items() if not kind.startswith(("score_row", "turn"))}
    fixed = {"step/float32": ((2048, 2048 / 0.5),), "turn_start/float32": ((2048, 2048 / 0.25),)}
    without, found = prediction(dense, context=2048), prediction(dense | fixed, context=2048)
    assert 1 / found.decode_rate == pytest.approx(1 / without.decode_rate + 0.5)
    assert found.second_turn_seconds == pytest.approx(without.second_turn_seconds + 0.25)


def test_cold_pages_come_no_faster_than_the_link():
    slow = RATES | {"h2d_pinned": ((1 << 20, 1e5),)}
    assert prediction(slow).prefill_seconds > prediction().prefill_seconds


def test_a_rate_that_was_not_measured_is_missed_and_not_invented():
    with pytest.raises(ConfigError, match="score_row"):
        prediction({kind: bands for kind, bands in RATES.items() if kind != "score_row/float32"})
    plan, config, found = plan_for("qwen3-4b", "12gb", None, 4.5, flags={}, environ={})
    nothing = forecasts.forecast(plan, config, {}, "nothing measured")
    assert nothing.prediction is None and nothing.origin == "nothing measured"
    assert found.origin


def test_a_card_that_nobody_measured_is_scaled_by_datasheets_and_says_so(monkeypatch):
    rates = {kind.replace("float32", "bfloat16"): bands for kind, bands in RATES.items()}
    measured = DeviceProfile(
        "nvidia-h200-sm90", 132, "kvring calibrate, that day", {}, rates | {"h2d_pinned": ((1, 5e10),)}
    )
    monkeypatch.setattr(forecasts, "built_in", lambda: [measured])
    card = find_card("3060-12gb")
    scaled, origin = forecasts.rates_of_card(card)
    assert "nobody ran" in origin and "that day" in origin and "nvidia-h200-sm90" in origin
    assert scaled["turn/bfloat16"][0][1] == pytest.approx(1e8 * 360 / 4800)
    assert scaled["h2d_pinned"][0][1] == pytest.approx(5e10 / 2, rel=0.01), "PCIe 4 x16 beside PCIe 5 x16"
    (small, large), before = (seconds(scaled["layer/bfloat16"], n * 10**6) for n in (1, 10)), RATES["layer/float32"]
    grown = seconds(before, 10**7) - seconds(before, 10**6)
    assert large - small == pytest.approx(grown * 989 / 25.5, rel=1e-3)
    _, _, found = plan_for("qwen3-4b", "12gb", None, 4.5, flags={}, environ={})
    assert found.prediction is None and "no rate 'unpack/4.5 bits'" in found.origin, "not measured packed"
    products = {f"{what}/{kind}": ((1, 1e10),) for what in ("product", "unpack") for kind in ("bfloat16", "q4_k")}
    monkeypatch.setattr(forecasts, "built_in", lambda: [replace(measured, rates=measured.rates | products)])
    _, _, found = plan_for("qwen3-4b", "12gb", None, 4.5, flags={}, environ={})
    assert found.prediction and found.prediction.decode_rate > 0
    assert "weights in 4.5 bits are taken at the rate measured in q4_k" in found.origin
    _, _, coded = plan_for("qwen3-4b", "12gb", None, 4.5, flags={"kv_dtype": "k8v4"}, environ={})
    assert coded.prediction and "pages in k8v4" in coded.origin and "pages in" not in found.origin
    _, _, sliding = plan_for("gemma-3-4b", "12gb", None, 4.5, flags={}, environ={})
    assert sliding.prediction is None and "slide" in sliding.origin


@given(st.floats(0, 1e-4), st.floats(1e9, 1e13), st.floats(0.01, 1), st.integers(1, 4))
def test_a_slower_card_takes_no_longer_to_launch(launch, rate, ratio, count):
    """Where a call takes a launch and so much a byte, only the bytes take longer; of one size nobody can tell."""
    sizes = [10**6 * 4**n for n in range(count)]
    scaled = forecasts.slower(tuple((size, size / (launch + size / rate)) for size in sizes), ratio)
    for size in sizes:
        fixed = launch if count > 1 else launch / ratio
        assert seconds(scaled, size) == pytest.approx(fixed + size / rate / ratio, rel=1e-6)


def test_a_first_start_that_kept_routes_only_leaves_the_built_in_rates_in_force(tmp_path):
    facts, mine = linux_server(), tmp_path / "mine.yaml"
    before, _ = forecasts.rates_here(facts, mine, cpu=False)
    save(DeviceProfile("nvidia-h200-sm90", 132, "routes", {"page_scores": ((64, 8),)}), mine)
    rates, origin = forecasts.rates_here(facts, mine, cpu=False)
    assert rates == before and rates and "built-in" in origin


@pytest.mark.parametrize("how", ["flag", "switch"])
def test_a_plan_predicts_from_the_row_that_it_was_pointed_to(tmp_path, how):
    """The flag was taken and not read: the file in the cache, or the row that ships, spoke in its place."""
    facts, mine = linux_server(), str(tmp_path / "mine.yaml")
    row = next(row for row in built_in() if row.hardware_class == "nvidia-h200-sm90")
    slow = {kind: tuple((size, rate / 10) for size, rate in bands) for kind, bands in row.rates.items()}
    save(DeviceProfile("nvidia-h200-sm90", 132, "ten times as slow", {}, slow), tmp_path / "mine.yaml")
    flags = {"device_profile_path": mine} if how == "flag" else {}
    environ = {"NINFER_DEVICE_PROFILES": mine} if how == "switch" else {}
    usual = plan_for(
        "qwen3-8b", None, None, None, flags={}, environ={"NINFER_DEVICE_PROFILES": mine + "x"}, facts=facts
    )
    found = plan_for("qwen3-8b", None, None, None, flags=flags, environ=environ, facts=facts)[2]
    assert "ten times as slow" in found.origin
    assert found.prediction.prefill_seconds == pytest.approx(10 * usual[2].prediction.prefill_seconds, rel=1e-3)


def test_what_was_measured_is_held_against_a_prediction_of_its_own_length(tmp_path, capsys, monkeypatch):
    """It was held against one for the whole context, of which turns and answers leave the prompt a part: 4,096 tokens'
    prefill beside 3,464 measured, an error of 1.28 where there was none.
    """
    name, count = hardware(torch.device("cpu"), this_platform())
    save(DeviceProfile(name, count, "a test", {}, RATES), tmp_path / "mine.yaml")
    plan = ["plan", "phantom", "--device", "cpu", "--device-profile-path", str(tmp_path / "mine.yaml"), "--json"]

    def planned(*more):
        assert call([*plan, *more]) == 0
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr("kvring_cli.measured._ENOUGH", 0.0)
    found = planned("--max-context", "1024", "--measure")
    measured, whole = found["measured"], found["forecast"]["prediction"]
    told, prompt, conversation = (measured[key] for key in ("prediction", "prompt", "conversation"))
    assert 512 < prompt < conversation < 1024 and min(measured[key] for key in told if key in measured) > 0
    alone = planned("--max-context", str(prompt))["forecast"]["prediction"]
    assert (told["prefill_seconds"], told["decode_rate"]) == (alone["prefill_seconds"], alone["decode_rate"])
    longer = planned("--max-context", str(conversation))["forecast"]["prediction"]
    assert told["second_turn_seconds"] == longer["second_turn_seconds"] != whole["second_turn_seconds"]


def test_a_card_that_is_here_and_was_never_measured_is_told_what_its_datasheet_promises(tmp_path):
    mine = tmp_path / "none.yaml"
    card = find_card("3060-12gb")
    here = replace(linux_server(), gpus=(replace(card.gpu, total=12 * 2**30, used=0),))
    rates, origin = forecasts.rates_here(here, mine, cpu=False)
    assert rates == forecasts.rates_of_card(card)[0] and "nobody ran" in origin and "kvring calibrate" in origin
    unknown = replace(here, gpus=(replace(card.gpu, name="NVIDIA GeForce RTX 3060 Laptop GPU"),))
    rates, origin = forecasts.rates_here(unknown, mine, cpu=False)
    assert not rates and "kvring calibrate measures them" in origin


def test_without_a_measured_card_there_are_no_times(monkeypatch):
    monkeypatch.setattr(forecasts, "built_in", list)
    assert plan_for("qwen3-4b", "12gb", None, 4.5, flags={}, environ={})[2].prediction is None


@pytest.mark.parametrize(
    ("context", "chunk", "prefill", "decode", "second"),
    [(32_770, 4096, 21_702, 163, 0.032), (131_098, 8192, 9931, 145, 0.058), (262_144, 8192, None, 129.4, None)],
)
def test_the_h200s_row_predicts_what_was_measured_there(context, chunk, prefill, decode, second):
    """`kvring plan random:qwen3-8b --measure`, in the call that made the row; the longest by `bench rates`, earlier."""
    row = next(row for row in built_in() if row.hardware_class == "nvidia-h200-sm90")
    work = Work.of(PUBLISHED["qwen3-8b"], torch.bfloat16, four_bit=False)
    told = predict(work, row.rates, context=context, pool=17_920, window=17_664, selection=8960, chunk=chunk)
    assert prefill is None or told.prefill_rate == pytest.approx(prefill, rel=0.2)
    assert told.decode_rate == pytest.approx(decode, rel=0.2)
    assert second is None or told.second_turn_seconds == pytest.approx(second, rel=0.2)
