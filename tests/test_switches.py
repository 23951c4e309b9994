"""The risk: a setting that is read twice, read wrong, or never read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SCORERS, EngineConfig
from engine.errors import ConfigError
from engine.switches import OTHER_SWITCHES, SETTINGS, resolve

SWITCHES = {setting.switch: setting for setting in SETTINGS if setting.switch}
ANY_VALUE = {  # a value that is not the default, as the flag takes it, and what it becomes
    "max_context": ("256K", 262144),
    "kv_capacity": ("4,032", 4032),
    "kv_window": ("8192", 8192),
    "ring": ("on", "on"),
    "host_memory": ("pageable", "pageable"),
    "host_kv_bytes": ("0.5", 1 << 29),
    "kv_dtype": ("k8v4", "k8v4"),
    "device_limit_bytes": ("12GiB", 12 << 30),
    "ram_limit_bytes": ("32G", 32 << 30),
    "retrieve": ("512", 512),
    "retrieve_share": ("25", 25),
    "sink": ("0", 0),
    "neighbor_pages": ("0", 0),
    "query_tail": ("128", 128),
    "scorer": ("token", "token"),
    "far_heads": ("50%", 50),
    "prefill": ("exact", "exact"),
    "decode": ("window", "window"),
    "positions": ("compact", "compact"),
    "reuse": (False, False),
    "verify_pages": (True, True),
    "device_profile": ("off", "off"),
    "device_profile_path": ("my.yaml", "my.yaml"),
    "device": ("cuda:1", "cuda:1"),
    "dtype": ("bfloat16", "bfloat16"),
    "threads": ("3", 3),
    "cuda_graph": ("off", "off"),
    "weights": ("Q4_0", "q4_0"),
    "prefill_chunk": ("512", 512),
}


def value(environ: dict[str, str], field: str, **flags: object) -> object:
    return getattr(resolve("m", flags, environ).config, field)


def test_the_table_has_every_field_of_the_config_once():
    assert sorted(setting.field for setting in SETTINGS) == sorted(set(EngineConfig.__dataclass_fields__) - {"model"})
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_every_flag_reaches_its_field(setting):
    text, expected = ANY_VALUE[setting.field]
    resolved = resolve("m", {setting.field: text}, {})
    assert getattr(resolved.config, setting.field) == expected != setting.default
    assert resolved.sources[setting.field].source == setting.flag


@pytest.mark.parametrize(
    ("switch", "text", "field", "expected"),
    [
        ("NINFER_KV_RING", "1", "ring", "on"),
        ("NINFER_KV_RING", "0", "ring", "off"),
        ("NINFER_KV_RING", "auto", "ring", "auto"),
        ("NINFER_KV_RING", "", "ring", "auto"),
        ("NINFER_KV_RETRIEVE", "0", "retrieve", "off"),
        ("NINFER_KV_RETRIEVE", "1", "retrieve", "auto"),
        ("NINFER_KV_RETRIEVE", "64", "retrieve", 64),
        ("NINFER_KV_RETRIEVE", "4K", "retrieve", 4096),
        ("NINFER_HOST_PAGEABLE", "1", "host_memory", "pageable"),
        ("NINFER_HOST_PAGEABLE", "0", "host_memory", "auto"),
        ("NINFER_KV_WINDOW", "8192", "kv_window", 8192),
        ("NINFER_KV_SINK", "0", "sink", 0),
        ("NINFER_KV_NEIGHBOR_PAGES", "0", "neighbor_pages", 0),
        ("NINFER_KV_RETRIEVE_SHARE", "100", "retrieve_share", 100),
        ("NINFER_KV_QUERY_TAIL", "32", "query_tail", 32),
        ("NINFER_KV_SCORER", "Token", "scorer", "token"),
        ("NINFER_KV_PREFILL", "window", "prefill", "window"),
        ("NINFER_KV_DECODE", "exact", "decode", "exact"),
        ("NINFER_KV_REUSE_HOSTBACKED", "0", "reuse", False),
        ("NINFER_KV_REUSE_HOSTBACKED", "1", "reuse", True),
        ("NINFER_KV_REUSE_HOSTBACKED", "", "reuse", True),
        ("NINFER_KV_VERIFY", "yes", "verify_pages", True),
        ("NINFER_KV_VERIFY", "0", "verify_pages", False),
    ],
)
def test_every_switch_reaches_its_field(switch, text, field, expected):
    resolved = resolve("m", {}, {switch: text})
    assert getattr(resolved.config, field) == expected
    assert resolved.sources[field].source == (switch if text else "default")


@given(st.sampled_from(sorted(SWITCHES)), st.text(" \t\r\n\"'", max_size=4), st.text(" \t\"'", max_size=4))
def test_spaces_and_quotes_around_a_value_never_count(switch, before, after):
    field = SWITCHES[switch].field
    text = {"reuse": "0", "verify_pages": "1"}.get(field) or ANY_VALUE[field][0]
    assert value({switch: before + text + after}, field) == value({switch: text}, field)


@given(st.sampled_from(["NINFER_KV_REUSE_HOSTBACKED", "NINFER_KV_VERIFY"]), st.text(min_size=1, max_size=5))
def test_a_boolean_is_on_unless_it_is_0(switch, text):
    bare = text.strip(" \t\r\n\x0b\x0c\"'")
    if bare:
        assert value({switch: text}, SWITCHES[switch].field) is (bare != "0")


@given(st.integers(-200, 300))
def test_a_share_outside_1_to_100_is_refused_with_its_range(share):
    environ = {"NINFER_KV_RETRIEVE_SHARE": str(share)}
    if 1 <= share <= 100:
        assert value(environ, "retrieve_share") == share
    else:
        with pytest.raises(ConfigError, match=r"NINFER_KV_RETRIEVE_SHARE.*1 to 100"):
            resolve("m", {}, environ)


@given(st.integers(-10, 200))
def test_a_recall_budget_is_off_automatic_or_at_least_a_page(tokens):
    environ = {"NINFER_KV_RETRIEVE": str(tokens)}
    if tokens in (0, 1) or tokens >= 64:
        assert value(environ, "retrieve") == {0: "off", 1: "auto"}.get(tokens, tokens)
    else:
        with pytest.raises(ConfigError, match="64 tokens"):
            resolve("m", {}, environ)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("kv_capacity", "0"),
        ("kv_capacity", "63"),
        ("max_context", "many"),
        ("query_tail", "0"),
        ("neighbor_pages", "-1"),
        ("sink", "-1"),
        ("scorer", "magic"),
        ("device", "tpu"),
        ("device", "cpu:1"),
        ("threads", "0"),
        ("threads", "9" * 5000),
        ("host_kv_bytes", "0"),
        ("device_limit_bytes", "8"),
        ("ram_limit_bytes", "9" * 400 + "G"),
        ("ring", "maybe"),
        ("positions", ""),
    ],
)
def test_a_value_out_of_its_range_is_refused_and_names_the_flag(field, text):
    setting = next(setting for setting in SETTINGS if setting.field == field)
    with pytest.raises(ConfigError) as refused:
        resolve("m", {field: text}, {})
    assert setting.flag in refused.value.message and setting.values in refused.value.message


def test_flag_beats_environment_beats_profile_beats_default():
    environ, profile = {"NINFER_KV_SINK": "128"}, {"sink": 192}
    assert value({}, "sink") == 256
    assert resolve("m", {}, {}, profile).config.sink == 192
    assert resolve("m", {}, {}, profile).sources["sink"].source == "profile"
    assert resolve("m", {}, environ, profile).config.sink == 128
    assert resolve("m", {"sink": "64"}, environ, profile).config.sink == 64


def test_an_unknown_switch_is_pointed_out_with_the_nearest_known_one():
    (warning,) = resolve("m", {}, {"NINFER_KV_SNIK": "1", "PATH": "x"}).warnings
    assert "NINFER_KV_SNIK" in warning and "NINFER_KV_SINK" in warning
    assert not resolve("m", {}, dict.fromkeys([*SWITCHES, *OTHER_SWITCHES], "")).warnings


def test_a_boolean_that_says_no_but_counts_as_yes_is_pointed_out():
    resolved = resolve("m", {}, {"NINFER_KV_VERIFY": "off", "NINFER_KV_RING": "off"})
    assert resolved.config.verify_pages is True and resolved.config.ring == "off"
    (warning,) = resolved.warnings
    assert "NINFER_KV_VERIFY=0" in warning


def test_the_ranges_in_words_name_what_the_config_knows():
    assert all(scorer in SWITCHES["NINFER_KV_SCORER"].values for scorer in SCORERS)
