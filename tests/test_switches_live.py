"""The risk: a switch that is accepted and does nothing, or a combination that starts and answers wrongly in silence."""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, RecallParams, SamplingParams
from engine.device import set_threads
from engine.engine import Engine
from engine.errors import ConfigError, EngineError, KVRingError
from engine.faults import damage_checkpoint
from engine.result import Progress
from engine.switches import OTHER_SWITCHES, SETTINGS, resolve
from tests.models import phantom_folder

COMMANDS = Path(__file__).parent.parent / "kvring_cli" / "commands"
TOKENS = 1500  # over a pool of 16 pages, within 64
VALUES = (None, "", "0", "1", "0 ", "512", "rubbish")
RING = {None: "auto", "": "auto", "0": "off", "0 ": "off", "1": "on", "512": "on", "rubbish": "on"}
RETRIEVE = {None: "auto", "": "auto", "0": "off", "0 ": "off", "1": "auto", "512": 512, "rubbish": None}
PAGEABLE = {
    None: "auto",
    "": "auto",
    "0": "auto",
    "0 ": "auto",
    "1": "pageable",
    "512": "pageable",
    "rubbish": "pageable",
}
SMALL = {"max_context": 2048, "kv_capacity": 1600, "sink": 64, "prefill_chunk": 256, "device_profile": "off"}


@pytest.fixture(scope="module")
def ask(phantom, words):
    """ask(ring, retrieve, host_memory): how an over-pool question ends, as the person who asked sees it."""
    text = words(2 * TOKENS)
    prompt = phantom.tokenizer.decode(phantom.tokenizer.encode(text)[: TOKENS + 300])

    @cache
    def end(ring: str, retrieve: str | int, host_memory: str) -> str:
        config = EngineConfig(model="", ring=ring, retrieve=retrieve, host_memory=host_memory, **SMALL)
        try:
            engine = Engine(config, phantom)
        except ConfigError as error:
            assert error.fix
            return f"refused: {error.message}"
        try:
            result = engine.complete(engine.prepare(prompt, SamplingParams(max_tokens=2)))
            engine.audit()
            assert result.recall.over_pool and result.recall.hidden_pages > 0
            return f"warned: {result.warnings[0]}" if result.recall.blind else "answered"
        finally:
            engine.close()

    return end


@pytest.mark.parametrize("ring", VALUES)
def test_every_combination_of_the_main_switches_starts_or_is_refused_with_a_reason(ask, ring):
    for retrieve, pageable in itertools.product(VALUES, VALUES):
        environ = {
            name: value
            for name, value in (
                ("NINFER_KV_RING", ring),
                ("NINFER_KV_RETRIEVE", retrieve),
                ("NINFER_HOST_PAGEABLE", pageable),
            )
            if value is not None
        }
        if RETRIEVE[retrieve] is None:
            with pytest.raises(ConfigError, match="NINFER_KV_RETRIEVE is 'rubbish'"):
                resolve("m", {}, environ)
            continue
        config = resolve("m", {}, environ).config
        assert (config.ring, config.retrieve, config.host_memory) == (
            RING[ring],
            RETRIEVE[retrieve],
            PAGEABLE[pageable],
        ), environ
        ended = ask(config.ring, config.retrieve, config.host_memory)
        if config.ring == "off":
            assert ended.startswith("refused: the ring is off and a pool of 25 pages"), environ
        elif config.retrieve == "off":
            assert ended.startswith("warned: recall was off"), environ
        else:
            assert ended == "answered", environ


# --- every setting changes something ----------------


class Seen:
    """An engine under some settings, and what can be seen of it."""

    def __init__(self, phantom, words, **settings):
        self.refused = ""
        base = {"max_context": 4096, "kv_capacity": 2048, "prefill_chunk": 256, "device_profile": "off"}
        self.text = words(2600, seed=3)
        # None takes a base setting back to its default
        merged = {field: value for field, value in (base | settings).items() if value is not None}
        try:
            self.engine = Engine.load(EngineConfig(model="", **merged), phantom)
        except KVRingError as error:
            self.engine, self.refused = None, str(error)

    def answer(self, **more):
        engine, sampling = self.engine, SamplingParams(max_tokens=2)
        return engine.complete(engine.prepare(f"{self.text} Where?", sampling, RecallParams(explain=True, **more)))

    def reasons(self) -> set[str]:
        return {reason for page in self.answer().pages for reason in page.steps}

    def steps(self) -> int:
        events = self.engine.generate(self.engine.prepare(self.text, SamplingParams(max_tokens=1)))
        return sum(isinstance(event, Progress) for event in events)

    def damaged(self) -> str:
        self.answer()
        page = damage_checkpoint(self.engine)
        try:
            self.answer()
            return ""
        except EngineError as error:
            return error.message
        finally:
            damage_checkpoint(self.engine, page)

    def cached(self) -> int:
        self.answer()
        return self.answer().usage.cached

    def logits(self):
        return self.engine.logits(range(2500), RecallParams(prefill="recall")).double().sum().item()

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


OBSERVED = {
    "max_context": ({"max_context": 3072}, lambda seen: seen.engine.capacity.context),
    "kv_capacity": ({"kv_capacity": 3072}, lambda seen: seen.engine.capacity.pool_pages),
    "kv_window": ({"kv_window": 1024, "kv_capacity": None}, lambda seen: seen.engine.capacity.pool_pages),
    "ring": ({"ring": "off"}, lambda seen: seen.refused),
    "host_memory": ({"host_memory": "pinned"}, lambda seen: seen.refused),
    "host_kv_bytes": ({"host_kv_bytes": 64 << 20}, lambda seen: seen.engine.capacity.host_pages),
    "kv_dtype": ({"kv_dtype": "k8v4"}, lambda seen: (seen.engine.stats()["kv_dtype"], seen.engine.capacity.host_bytes)),
    "device_limit_bytes": ({"device_limit_bytes": 1 << 20}, lambda seen: seen.refused),
    "ram_limit_bytes": ({"ram_limit_bytes": 1 << 20}, lambda seen: seen.refused),
    "retrieve": ({"retrieve": 256}, lambda seen: seen.engine.capacity.window.selection),
    "retrieve_share": ({"retrieve_share": 10}, lambda seen: seen.engine.capacity.window.selection),
    "sink": ({"sink": 512}, lambda seen: seen.engine.capacity.window.sink),
    "neighbor_pages": ({"neighbor_pages": 0}, lambda seen: "neighbor" in seen.reasons()),
    "query_tail": ({"query_tail": 128}, lambda seen: seen.engine.prepare(seen.text).query),
    "scorer": ({"scorer": "mean"}, lambda seen: seen.answer().recall.scorer),
    "far_heads": ({"far_heads": 50}, lambda seen: seen.refused),
    "prefill": ({"prefill": "window"}, lambda seen: seen.answer().recall.prefill_modes),
    "decode": ({"decode": "window"}, lambda seen: seen.answer().recall.decode_mode),
    "positions": ({"positions": "compact"}, lambda seen: seen.logits()),
    "reuse": ({"reuse": False}, lambda seen: seen.cached()),
    "verify_pages": ({"verify_pages": True}, lambda seen: seen.damaged()),
    "device": ({"device": "cuda"}, lambda seen: seen.refused or seen.engine.model.transformer.device.type),
    "threads": ({"threads": 1}, lambda seen: torch.get_num_threads()),
    "device_profile": ({"device_profile": "auto"}, lambda seen: seen.engine.profile.source),
    "prefill_chunk": ({"prefill_chunk": 512}, lambda seen: seen.steps()),
}
ELSEWHERE = {
    "weights": "tests/test_quantise.py: a folder is quantised while it is loaded",
    "dtype": "test_the_dtype_is_what_the_weights_are_loaded_in",
    "cuda_graph": "tests/test_triton_runner.py: the same work and tokens without graphs, and said",
    "device_profile_path": "tests/test_device_profile.py: the schedule that ran is the one that the profile says",
}


def test_every_setting_is_observed():
    assert set(OBSERVED) | set(ELSEWHERE) == {setting.field for setting in SETTINGS}


def test_what_is_observed_elsewhere_is_there():
    root = Path(__file__).parent.parent
    for where in ELSEWHERE.values():
        file, _, test = where.partition(":")
        assert (root / file).is_file() if test else file in globals(), where


@pytest.mark.parametrize("path", sorted(COMMANDS.glob("*.py")), ids=lambda path: path.stem)
def test_no_command_takes_a_flag_that_it_does_not_read(path):
    for command in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(command, ast.FunctionDef) and not command.name.startswith("_"):
            taken = {one.arg for one in (*command.args.args, *command.args.kwonlyargs)}
            read = {name.id for line in command.body for name in ast.walk(line) if isinstance(name, ast.Name)}
            assert taken <= read, command.name


@pytest.mark.parametrize("field", sorted(OBSERVED))
def test_a_setting_changes_something_that_can_be_seen(phantom, words, field, monkeypatch):
    changed, look = OBSERVED[field]
    if field == "device" and torch.cuda.is_available():
        pytest.skip("there is a card: the device is not refused")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    base = {"kv_capacity": None, "kv_window": 2048} if field == "kv_window" else {}
    seen = []
    try:
        for settings in (base, changed):
            made = Seen(phantom, words, **settings)
            try:
                seen.append(look(made))
            finally:
                made.close()
    finally:
        set_threads(None)
    assert seen[0] != seen[1], f"{field}: {seen}"


def test_the_dtype_is_what_the_weights_are_loaded_in():
    engines = [
        Engine.load(replace(EngineConfig(model=str(phantom_folder()), max_context=512, device="cpu"), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    ]
    assert [engine.model.transformer.dtype for engine in engines] == [torch.float32, torch.bfloat16]
    for engine in engines:
        engine.close()


def test_the_readme_documents_every_switch_and_no_other():
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"NINFER_[A-Z_]*[A-Z]", readme))
    known = {setting.switch for setting in SETTINGS if setting.switch} | set(OTHER_SWITCHES)
    short = {"NINFER_KV_PREFILL", "NINFER_KV_DECODE"}  # one row, `_DECODE` for the second
    assert documented | short == known
