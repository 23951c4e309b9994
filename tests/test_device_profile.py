"""The risk: a measured profile that is lost, believed when broken, or changes what is computed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine import device_profile
from engine.config import EngineConfig, SamplingParams
from engine.device import find_profile, hardware, hiding_tokens, measured_settings
from engine.device_profile import SCHEMA, DeviceProfile, Found, built_in, check_kept, look_up, parse, save, user_file
from engine.engine import Engine
from engine.errors import ConfigError
from engine.platform import this_platform
from engine.routes import COMPILED_IN, Routes, pick
from engine.scheduler import Plan, schedule
from kvring_cli.app import call

ROW = DeviceProfile("some-cpu", 4, "a test", {"page_gather": ((4, "take"), (64, "index_select"))}, {"x": ((1, 2.0),)})
CPU = torch.device("cpu")
HEAD = f"schema: {SCHEMA}\nprofiles:\n"


@pytest.fixture
def mine(tmp_path):
    """A user's file for this very machine: pages are taken one way up to 4, the other beyond."""
    name, count = hardware(CPU, this_platform())
    path = tmp_path / "mine.yaml"
    save(replace(ROW, hardware_class=name, multiprocessors=count), path)
    return path


# --- the file ---------------------------------------


def test_what_is_saved_is_found_again(tmp_path):
    save(ROW, tmp_path / "a" / "p.yaml")
    assert look_up("some-cpu", 4, tmp_path / "a" / "p.yaml") == Found(ROW, "user")
    assert look_up("some-cpu", 5, tmp_path / "a" / "p.yaml").source == "none", "another number of processors"
    save(replace(ROW, multiprocessors=0), tmp_path / "a" / "p.yaml")
    assert look_up("some-cpu", 5, tmp_path / "a" / "p.yaml").profile.multiprocessors == 0, "0 is any"
    assert look_up("some-cpu", 4, tmp_path / "a" / "p.yaml").source == "user", "the other row is still there"


def test_routes_measured_anew_keep_the_rates_that_were_not(tmp_path):
    save(ROW, tmp_path / "p.yaml")
    save(replace(ROW, routes={}, rates={}), tmp_path / "p.yaml")
    assert look_up("some-cpu", 4, tmp_path / "p.yaml").profile == replace(ROW, routes={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "schema"),
        ("{", "damaged"),
        ("schema: kvring.device-profiles/2\nprofiles: []\n", "kvring.device-profiles/2"),
        (f"schema: {SCHEMA}\n", "damaged"),
        (f"schema: {SCHEMA}\nprofiles: 7\n", "damaged"),
        (f"schema: {SCHEMA}\nprofiles:\n- {{hardware_class: a}}\n", "damaged"),
        (f"schema: {SCHEMA}\nprofiles:\n- {{hardware_class: a, multiprocessors: -1, origin: x, routes: {{}}}}\n", "-1"),
        (
            f"{HEAD}- {{hardware_class: a, multiprocessors: 1, origin: x, routes: {{k: [[4, a], [4, b]]}}}}\n",
            "do not increase",
        ),
        (
            f"{HEAD}- {{hardware_class: a, multiprocessors: 1, origin: x, routes: {{}}, rates: {{k: [[4, .nan]]}}}}\n",
            "positive",
        ),
        (f"{HEAD}- {{hardware_class: a, multiprocessors: 1, origin: x, routes: {{1: [[4, a]]}}}}\n", "1 is no name"),
        *(
            (f"{HEAD}- {{hardware_class: a, multiprocessors: 4, origin: x, routes: {{{route}}}}}\n", "no machine")
            for route in ("threads: [[1, 5]]", "threads: [[1, true]]", "prefill_chunk: [[1, 0]]")
        ),
        ("!!python/object/apply:os.system ['true']", "damaged"),
        ("\x00\x01", "damaged"),
    ],
)
def test_a_bad_file_is_named_passed_over_and_never_fatal(tmp_path, text, words):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    found = look_up("nothing", 1, path)
    assert found.profile is None and len(found.troubles) == 1
    assert str(path) in found.troubles[0] and words in found.troubles[0]


@given(st.integers(0, 400))
def test_a_half_written_file_is_never_read_as_a_whole_one(cut):
    text = yaml.safe_dump({"schema": SCHEMA, "profiles": [ROW.as_yaml()]}, sort_keys=False)
    try:
        rows = parse(text[: min(cut, len(text) - 1)])
    except ConfigError:
        return
    assert rows in ([], [ROW]) or all(row.hardware_class == "some-cpu" for row in rows)


def test_a_newer_schema_is_not_overwritten_and_a_damaged_file_is_kept(tmp_path):
    path = tmp_path / "p.yaml"
    newer = "schema: kvring.device-profiles/2\nprofiles: []\n"
    path.write_text(newer)
    with pytest.raises(ConfigError, match="another kvring's"):
        save(ROW, path)
    assert path.read_text() == newer
    path.write_text("{")
    save(ROW, path)
    assert look_up("some-cpu", 4, path).profile == ROW
    assert (tmp_path / "p.yaml.damaged").read_text() == "{"
    path.write_text("{", encoding="utf-16")  # as Windows PowerShell's `>` writes it
    save(ROW, path)
    assert (tmp_path / "p.yaml.damaged").read_text(encoding="utf-16") == "{"


def test_a_place_that_cannot_be_written_is_refused_with_the_switch(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        save(ROW, tmp_path / "file" / "p.yaml")
    assert "NINFER_DEVICE_PROFILES" in refused.value.fix
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_kept(tmp_path / "folder.yaml")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is full here")
def test_a_full_disk_is_found_before_the_measuring_and_not_after(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(ConfigError, match="No space left"):
        check_kept(tmp_path / "p.yaml")


def test_a_crash_while_writing_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "p.yaml"
    save(ROW, path)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left"):
        save(replace(ROW, origin="new"), path)
    assert look_up("some-cpu", 4, path).profile == ROW
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.yaml"]


def test_two_that_write_at_once_leave_a_whole_file(tmp_path):
    path = tmp_path / "p.yaml"
    threads = [threading.Thread(target=save, args=(replace(ROW, multiprocessors=n), path)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert parse(path.read_text())


def test_the_switch_names_a_file_or_a_folder():
    assert user_file({"NINFER_DEVICE_PROFILES": ' "/x/a.yaml" '}).as_posix().endswith("/x/a.yaml")
    assert user_file({"NINFER_DEVICE_PROFILES": "/x"}).name == device_profile.FILE
    assert "1" in user_file({}).name, "the schema's version, so that builds don't overwrite each other"


def test_the_rows_that_ship_are_whole_and_say_where_they_are_from():
    for row in built_in():
        assert row.origin and (row.routes or row.rates)


# --- the look-up in an engine -----------------------


def config(**more) -> EngineConfig:
    return EngineConfig(model="", max_context=4096, kv_capacity=2048, prefill_chunk=256, **more)


def logits(phantom, **more) -> torch.Tensor:
    engine = Engine(config(**more), phantom)
    try:
        return engine.logits(range(2100))
    finally:
        engine.close()


def test_off_looks_at_no_file_and_is_the_compiled_in_way_bit_for_bit(phantom, mine, monkeypatch):
    routed = logits(phantom, device_profile_path=str(mine))
    monkeypatch.setattr(device_profile, "_built_in", lambda: f"schema: {SCHEMA}\nprofiles: []\n")
    bare = logits(phantom, device_profile_path=str(mine.parent / "none.yaml"))
    monkeypatch.setattr(device_profile, "_text", lambda *_: pytest.fail("a file was read"))
    off = logits(phantom, device_profile="off", device_profile_path=str(mine))
    assert torch.equal(off, bare) and torch.equal(off, routed)


def test_the_schedule_that_ran_is_the_one_that_the_profile_says(phantom, mine):
    def ran(**more) -> set[str]:
        engine = Engine(config(**more), phantom)
        try:
            engine.complete(engine.prepare("Hello there", SamplingParams(max_tokens=2)))
            engine.logits(range(1500))
            return set(engine.stats()["schedules_ran"])
        finally:
            engine.close()

    assert ran(device_profile_path=str(mine)) == {"page_gather take", "page_gather index_select"}
    assert ran(device_profile="off", device_profile_path=str(mine)) == {"page_gather index_select"}


def test_without_the_users_file_the_built_in_row_serves(mine, monkeypatch, tmp_path):
    monkeypatch.setattr(device_profile, "_built_in", lambda: mine.read_text())
    found = find_profile(config(device_profile_path=str(tmp_path / "gone.yaml")), CPU, this_platform())
    assert found.source == "built-in" and found.profile.origin == "a test"


def test_a_route_that_this_build_does_not_know_is_not_taken():
    routes = Routes({"page_gather": ((8, "from_the_future"),), "threads": ((1, 2),), "other": ((1, "x"),)})
    assert routes.routes == dict(COMPILED_IN) and routes.routed == 0
    assert routes.unknown == ["other", "page_gather"]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True), st.integers(1, 200))
def test_the_first_band_that_reaches_a_length_serves(lasts, length):
    route = tuple((last, last) for last in sorted(lasts))
    assert pick(route, length) == min((last for last in lasts if last >= length), default=max(lasts))


def test_measured_settings_are_defaults_that_flags_and_switches_override(mine, monkeypatch, tmp_path, capsys):
    from kvring_cli.start import settle

    row = parse(mine.read_text())[0]
    save(replace(row, routes={"threads": ((1, 1),), "prefill_chunk": ((1, 512),)}), mine)
    assert measured_settings(Found(parse(mine.read_text())[0], "user")) == {"threads": 1, "prefill_chunk": 512}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("NINFER_DEVICE_PROFILES", str(mine))
    resolved = settle("phantom", {}, False)
    assert (resolved.config.threads, resolved.config.prefill_chunk) == (1, 512)
    assert resolved.sources["threads"].source == "device profile, user"
    assert "prefill-chunk 512 (device profile, user)" in capsys.readouterr().err
    assert settle("phantom", {"prefill_chunk": 256}, False).config.prefill_chunk == 256
    assert settle("phantom", {"device_profile": "off"}, False).config.prefill_chunk == 1024
    assert settle("phantom", {"kv_capacity": "2048"}, False).config.prefill_chunk == 1024, "no room for another chunk"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert settle("phantom", {}, False).config.threads is None


def test_device_profile_calibrate_measures_first_and_uses_what_it_found(monkeypatch, tmp_path, capsys):
    from kvring_cli.calibration import routes
    from kvring_cli.start import settle

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(routes, "FINDERS", {"cpu": {"threads": lambda device, platform: ((1, 1),)}, "cuda": {}})
    flags = {"device_profile": "calibrate", "device_profile_path": str(tmp_path), "device": "cpu"}
    resolved = settle("phantom", flags, False)
    assert resolved.config.threads == 1 and resolved.sources["threads"].source == "device profile, user"
    assert (tmp_path / device_profile.FILE).exists()
    monkeypatch.setattr(routes, "FINDERS", {"cpu": {"threads": lambda *_: pytest.fail("calibrated again")}, "cuda": {}})
    assert settle("phantom", flags | {"device_profile": "auto"}, False).config.threads == 1


def test_a_cards_preset_is_below_flags_and_says_its_name(capsys):
    from kvring_cli.start import settle

    resolved = settle("phantom", {"kv_window": "2048", "device_profile": "off"}, True, "12gb")
    assert (resolved.config.kv_window, resolved.config.device_limit_bytes) == (2048, 11 << 30)
    assert resolved.sources["device_limit_bytes"].source == "profile 12gb"
    shown = capsys.readouterr().err
    assert "profile 12gb" in shown and "--kv-window" in shown
    assert call(["serve", "phantom", "--profile", "13gb"]) == 1
    assert "error: there is no card profile '13gb'" in capsys.readouterr().err


def test_measured_rates_decide_what_auto_attention_calls_a_short_suffix(phantom):
    """design.md: FLOPS over (PCIe bytes a second x query heads per KV head), about 1-2K on consumer cards."""
    rates = {"attend/bfloat16": ((1, 1e13), (2, 1.2e14)), "h2d_pinned": ((1, 2e9), (2, 2.5e10))}
    found = Found(replace(ROW, rates=rates), "user")
    assert hiding_tokens(found, torch.bfloat16, 4) == 1216
    assert (
        hiding_tokens(found, torch.float32, 4) is None and hiding_tokens(Found(None, "none"), torch.bfloat16, 4) is None
    )
    plan = Plan("auto", "recall", False, False)
    modes = [schedule(plan, 4096, 6000, 6096, 32, 256, hiding)[0].mode for hiding in (1024, 4096)]
    assert modes == ["exact", "recall"]
