"""The risk: a plan that promises what the engine then refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model.load import load_model
from engine.platform import HostMemory, Platform
from engine.units import GIB, MIB
from kvring_cli import forecast as forecasts
from kvring_cli.app import call
from kvring_cli.cards import cards, find_card, preset_for, presets
from kvring_cli.planning import card_place, here, make_plan, overview, plan_for
from kvring_cli.shapes import PUBLISHED, shape_of
from tests.gguf_models import save_gguf
from tests.machines import H200, RTX_3060, laptop, linux_server
from tests.models import tiny_model


@pytest.mark.parametrize(
    ("name", "kib", "billions"),
    [
        ("qwen3-4b", 144, 4.02),
        ("qwen3-8b", 144, 8.19),
        ("llama-3.1-8b", 128, 8.03),
        ("qwen2.5-7b", 56, 7.62),
        ("qwen2.5-1.5b", 28, 1.54),
    ],
)
def test_published_sizes_give_the_published_bytes(name, kib, billions):
    """capacity.md's bytes a token, and the parameter counts on the models' own pages."""
    plan = make_plan(PUBLISHED[name], card_place(find_card("24gb"), 64 * GIB), EngineConfig(model=""), weight_bits=4)
    assert plan.kv.token_bytes == kib * 1024
    assert PUBLISHED[name].parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert PUBLISHED["27b-2.1bit"].parameters / 1e9 == pytest.approx(27, abs=0.1)


def test_what_was_published_in_16_bits_takes_32_where_float32_computes():
    config = EngineConfig(model="", device="cpu", dtype="float32")
    shape = PUBLISHED["qwen3-8b"]
    plan = make_plan(shape, here(laptop(memory=HostMemory(64 * GIB, 60 * GIB)), config), config)
    assert plan.weight_bytes == 4 * shape.parameters and plan.capacity is not None
    assert make_plan(shape, here(laptop(memory=HostMemory(32 * GIB, 28 * GIB)), config), config).capacity is None


def test_every_card_and_model_is_in_the_table_as_it_is_published_and_quantised():
    rows = overview(None, None, None, flags={}, environ={})
    assert {row["card"] for row in rows} == {preset.typical for preset in presets().values()}
    assert {(row["model"], row["weight_bits"]) for row in rows} == {
        (name, bits) for name in PUBLISHED for bits in (16.0, 2.1 if name == "27b-2.1bit" else 4.5)
    }
    for row in rows:
        assert row["fits"] == (row["largest_context"] > 0)


def test_no_flag_of_the_table_is_passed_over(capsys):
    def rows(*words):
        assert call(["plan", "--card", "12gb", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    plain = rows()
    for words in (["--kv-dtype", "int4"], ["--kv-window", "2048"], ["--weights", "q8_0"], ["--max-context", "8K"]):
        assert rows(*words) != plain, words
    assert {row["kv_dtype"] for row in rows("--kv-dtype", "int4")} == {"int4"}
    assert {row["pool_tokens"] for row in rows("--kv-window", "2048") if row["fits"]} == {2048 + 1024 + 512}
    for words in (["--measure"], ["--compute-capability", "8.6"]):
        assert call(["plan", "--card", "12gb", *words]) == 2 and "give MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("model", sorted(PUBLISHED))
@pytest.mark.parametrize("card", ["8gb", "12gb", "24gb"])
def test_the_largest_context_fits_and_a_page_more_does_not(model, card):
    place, shape = card_place(find_card(card), presets()[card].ram), PUBLISHED[model]
    config = EngineConfig(model="", **presets()[card].settings)
    plan = make_plan(shape, place, config, weight_bits=shape.weight_bits if shape.weight_bits < 16 else 4.5)
    if (card, model) == ("8gb", "gemma-3-12b"):  # its weights alone are 6.2 of 7 GiB
        assert plan.largest == 0 and plan.capacity is None and "weights" in plan.refusal
        return
    assert plan.largest > 0
    fits = make_plan(shape, place, replace(config, max_context=plan.largest), weight_bits=plan.weight_bits)
    assert fits.capacity is not None and fits.capacity.context == plan.largest
    assert fits.capacity.device_bytes <= place.device
    more = make_plan(shape, place, replace(config, max_context=plan.largest + 64), weight_bits=plan.weight_bits)
    assert more.capacity is None and more.refusal and more.fix


class Machine(Platform):
    def __init__(self, ram: int) -> None:
        self.ram = ram

    def memory(self) -> HostMemory:
        return HostMemory(self.ram, self.ram)


@pytest.mark.parametrize("ram", [1300 * MIB, 1600 * MIB, 3 * GIB])
def test_a_plan_for_the_cpu_is_what_the_engine_then_builds(phantom, ram):
    """Weights are in RAM by the time the engine looks; the plan counts them first."""
    shape, weights = shape_of("phantom"), phantom.transformer.weight_bytes
    config = EngineConfig(model="", kv_capacity=4032, device="cpu", device_profile="off")
    planned = make_plan(shape, here(laptop(memory=HostMemory(ram, ram)), config), config).capacity
    built = Engine(config, phantom, Machine(ram - weights))
    try:
        assert abs(planned.context - built.capacity.context) <= 256
        assert planned.pool_pages == built.capacity.pool_pages
        assert planned.host_bytes == pytest.approx(built.capacity.host_bytes, rel=0.01)
        assert planned.weight_bytes == pytest.approx(weights, rel=0.01)
    finally:
        built.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"device_limit_bytes": 150 * MIB, "kv_capacity": 4032},  # digests of the trained context alone are 136 MiB
        {"sink": 20_000},
        {"positions": "compact"},
        {"ring": "off", "kv_capacity": 8192},
    ],
)
def test_a_plan_where_no_context_is_asked_for_is_what_serve_does_with_the_same_settings(phantom, settings):
    """It planned for a context that would fit where a start takes the trained one, and is refused."""
    config = EngineConfig(model="", device="cpu", device_profile="off", dtype="float32", **settings)
    planned = make_plan(shape_of("phantom"), here(laptop(memory=HostMemory(8 * GIB, 8 * GIB)), config), config)
    try:
        built = Engine(config, phantom, Machine(8 * GIB))
    except ConfigError as error:
        assert planned.capacity is None and (planned.refusal, planned.fix) == (error.message, error.fix)
        return
    built.close()
    assert planned.capacity.context == built.capacity.context and planned.capacity.kv == built.capacity.kv
    assert (built.capacity.context < 262_144) == bool(built.capacity.notes) == ("device_limit_bytes" in settings)


def test_a_quantised_file_is_planned_for_as_it_is_loaded(tmp_path):
    path = save_gguf(tiny_model("llama", hidden_size=256, intermediate_size=512), tmp_path / "m.gguf", "Q4_0")
    shape, card = shape_of(str(path)), card_place(find_card("12gb"), 32 * GIB)
    packed, dense = (make_plan(shape, card, EngineConfig(model="", weights=form)) for form in ("auto", "dense"))
    file = sum(shape.source.source.bytes_of(name) for name in shape.source.source.shapes)
    assert packed.weight_bytes <= 1.03 * file and dense.weight_bytes > 3 * file
    on_cpu = replace(card, device=None)
    planned = make_plan(shape, on_cpu, EngineConfig(model="")).weight_bytes
    assert planned == pytest.approx(load_model(path, dtype=torch.bfloat16).transformer.weight_bytes, rel=0.03)
    work, note = forecasts.work_of(shape, card, packed.weight_bits, "auto", ["q4_0", "q8_0"])
    assert dict(work.packed).keys() == {"q4_0"} and not note
    assert work.packed[0][1] == pytest.approx(shape.layer_weights * 4.5 / 8)
    plain, _ = forecasts.work_of(shape, card, 16, "dense")
    assert (plain.packed, plain.packed_head) == ((), "")


def test_on_the_cpu_it_is_said_when_the_weights_alone_outgrow_the_ram_or_nobody_knows_of_it():
    tight, config = HostMemory(8 * GIB, 2 * GIB), EngineConfig(model="", device="cpu")
    plan = make_plan(PUBLISHED["qwen3-4b"], here(laptop(memory=tight), config), config, weight_bits=4.5)
    assert plan.capacity is None and plan.largest == 0
    assert plan.refusal == "weights 2.11 GiB exceed the 2 GiB of RAM that is free"
    with pytest.raises(ConfigError, match="does not say") as refused:
        here(laptop(memory=None), config)
    assert "--ram" in refused.value.fix and here(laptop(memory=None), config, ram=GIB).ram == GIB


def test_ram_is_an_input_and_halves_what_it_holds():
    def plan(ram, kv_dtype):
        flags = {"max_context": "128K", "kv_dtype": kv_dtype}
        return plan_for("llama-3.1-8b", "24gb", ram * GIB, 4.5, flags=flags, environ={})[0]

    wide, tight, small = plan(64, "bf16"), plan(16, "bf16"), plan(16, "auto")
    assert wide.capacity is not None and tight.capacity is None
    assert "RAM" in tight.refusal and tight.largest < 100_000
    assert plan(0, "auto").place.ram == 0, "0 is none, and not the preset's"
    assert plan(64, "auto").capacity.kv == "bf16" and small.capacity.kv == "k8v4"
    assert small.capacity.host_bytes == 0.39453125 * wide.capacity.host_bytes and "16 GiB" in small.capacity.kv_reason


@pytest.mark.parametrize(("card", "plain", "coded"), [("8gb", 85_000, 105_000), ("12gb", 190_000, 300_000)])
def test_a_preset_serves_8b_at_4_bits_as_far_as_it_was_trained_and_farther_in_codes(card, plain, coded):
    def plan(**flags):
        return plan_for("qwen3-8b", card, 32 * GIB, None, flags={"weights": "q4_k", **flags}, environ={})[0]

    trained, far = plan(), {"positions": "compact"}
    assert trained.capacity.context == 40960 and trained.capacity.kv == "bf16" and not trained.hypothetical
    by = {kv_dtype: plan(**far, kv_dtype=kv_dtype) for kv_dtype in ("bf16", "k8v4", "auto")}
    assert plain < by["bf16"].largest and coded < by["k8v4"].largest == by["auto"].largest
    assert by["auto"].capacity.context == 40960 and by["auto"].capacity.kv == "bf16"  # as serve does unasked
    assert plan(**far, max_context=by["auto"].largest).capacity.kv == "k8v4"
    assert all(one.capacity.device_bytes <= one.place.device for one in (trained, *by.values()))


def test_a_flag_overrides_the_cards_preset():
    _, preset, _ = plan_for("qwen3-4b", "12gb", None, 4.5, flags={}, environ={})
    _, flagged, _ = plan_for("qwen3-4b", "12gb", None, 4.5, flags={"kv_window": "4096"}, environ={})
    assert (preset.kv_window, flagged.kv_window) == (8192, 4096)
    assert preset.device_limit_bytes == flagged.device_limit_bytes == 11 * GIB


def test_presets_are_whole_and_marked_as_datasheet_facts():
    from importlib import resources

    for name, preset in presets().items():
        text = (resources.files("profiles") / "cards" / f"{name}.yaml").read_text()
        assert "origin: datasheet" in text and preset.typical in cards()
        assert preset.settings["device_limit_bytes"] == preset.memory - GIB
    assert sorted(presets()) == sorted(["8gb", "10gb", "12gb", "16gb", "24gb"])
    assert preset_for(RTX_3060).name == "12gb" and preset_for(H200).name == "24gb"
    assert preset_for(replace(RTX_3060, total=12 * GIB - 200 * MIB)).name == "12gb", "12 GB cards report less"
    assert preset_for(replace(RTX_3060, total=4 * GIB)) is None


def test_plan_prints_its_arithmetic(capsys):
    assert call(["plan", "qwen3-8b", "--card", "3060-12gb", "--weight-bits", "4.5", "--ram", "32GiB"]) == 0
    out = capsys.readouterr().out
    for words in (
        "8.19 billion x 4.5 bits / 8 = 4.29 GiB",
        "2 x 36 layers x 8 heads x 128 x 2 bytes = 144 KiB a token, 9 MiB a page",
        "8192/64 + 1024/64 + 8 = 152 pages = 9,728 tokens",
        "this one takes 16",
        "largest that fits",
    ):
        assert words in out, words


def test_plan_speaks_json_and_refuses_with_the_knob(capsys):
    assert call(["plan", "phantom", "--json", "--max-context", "8K", "--device", "cpu"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["fits"] and body["capacity"]["context"] == 8192 and body["place"]["dtype"] == "float32"
    assert call(["plan", "phantom", "--json", "--device", "cpu", "--compute-capability", "7.5"]) == 0
    assert body["engine"] != json.loads(capsys.readouterr().out)["engine"]
    for dtype in ("int4", "k8v4"):
        assert call(["plan", "phantom", "--kv-dtype", dtype, "--device", "cpu"]) == 0
        assert ("experimental" in capsys.readouterr().out) == (dtype == "int4")
    assert call(["plan", "phantom", "--compute-capability", "N/A"]) == 1
    assert call(["plan", "qwen3-8b", "--card", "8gb"]) == 1
    err = capsys.readouterr().err
    assert "error: weights 15.26 GiB" in err and "fix: " in err
    assert call(["plan", "qwen4-9b"]) == 1 and "qwen3-8b" in capsys.readouterr().err
    assert call(["plan", "qwen3-8b", "--card", "3060-13gb"]) == 1 and "3060-12gb" in capsys.readouterr().err
    assert call(["plan", "qwen3-8b", "--card", "12gb", "--measure"]) == 2
    assert call(["plan", "phantom", "--device", "cpu", "--measure", "--max-context", "700"]) == 1
    assert "fix: --max-context 874 or more" in capsys.readouterr().err
    for bits in ("0", "nan", "33"):
        assert call(["plan", "qwen3-8b", "--card", "12gb", "--weight-bits", bits]) == 1
    assert "are no quantisation" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert call(["plan", "phantom", "--device", "cuda"]) == 1
        assert "--card" in capsys.readouterr().err


def test_plan_points_out_a_switch_that_is_none_and_two_that_contradict_each_other(monkeypatch, capsys):
    monkeypatch.setenv("NINFER_KV_SNIK", "64")
    assert call(["plan", "qwen3-4b", "--card", "12gb", "--retrieve", "off", "--scorer", "token"]) == 0
    said = capsys.readouterr().err
    assert "did you mean NINFER_KV_SINK?" in said and "scorer is not read" in said


@pytest.mark.parametrize("ram", ["32", "0", "-3GiB", "much"])
def test_ram_without_a_unit_is_bad_usage_and_not_that_many_bytes(ram, capsys):
    for words in (["phantom"], ["--card", "12gb"], ["qwen3-8b", "--card", "12gb"]):
        assert call(["plan", *words, "--ram", ram]) == 2
        said = capsys.readouterr()
        assert "error: --ram is" in said.err and "with its unit" in said.err and not said.out


def test_the_table_is_markdown(capsys):
    assert call(["plan", "--card", "12gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| card | model |") and sum("3060-12gb" in line for line in lines) == 2 * len(PUBLISHED)


def test_this_machines_card_is_planned_for_in_bfloat16():
    place = here(linux_server(), EngineConfig(model=""))
    assert place.dtype is torch.bfloat16 and place.device == int(141 * GIB * 0.9)
    assert here(linux_server(), EngineConfig(model="", device="cpu", dtype="float16")).dtype is torch.float16
    assert here(linux_server(), EngineConfig(model="", device="cpu")).device is None
