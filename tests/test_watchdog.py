"""The risk: a chunk of a large model keeps a slow card for two seconds, and the driver resets the screen under it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig, SamplingParams
from engine.device_profile import DeviceProfile, Found
from engine.engine import Engine
from engine.model.random import random_model
from engine.model.sizes import PUBLISHED
from engine.platform import Gpu
from engine.result import Progress
from engine.watchdog import bounded_chunk, largest_chunk, product_rate
from kvring_cli.server.log import ready_lines


@pytest.fixture(scope="module")
def tiny():
    return random_model("random:tiny", torch.device("cpu"), torch.float32)[2]


@given(st.sampled_from(sorted(PUBLISHED)), st.floats(1e11, 1e15))
def test_no_chunk_comes_near_two_seconds(tiny, name, rate):
    size = PUBLISHED[name]
    config = replace(
        tiny,
        layers=size.layers,
        hidden=size.hidden,
        ffn=size.ffn,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
    )
    tokens = largest_chunk(config, rate)
    weights = size.layers * size.hidden * ((2 * size.heads + 2 * size.kv_heads) * size.head_dim + 3 * size.ffn)
    seconds = max(2 * weights, 4 * size.heads * size.head_dim * 16_384) / rate
    assert tokens % 64 == 0 and tokens >= 64
    assert tokens * seconds <= 1.0 or tokens == 64
    assert (tokens + 64) * seconds > 1.0, "and none is smaller than it must be"


@pytest.mark.parametrize(
    ("card", "bound"),
    [
        (None, False),
        (Gpu("NVIDIA H200", driver_model=None, display=False), False),
        (Gpu("NVIDIA RTX A6000", driver_model="TCC", display=False), False),
        (Gpu("NVIDIA GeForce RTX 3060", driver_model="WDDM", display=False), True),
        (Gpu("NVIDIA GeForce RTX 3060", driver_model="WDDM", display=True), True),
        (Gpu("NVIDIA GeForce RTX 3060", display=True), True),
    ],
    ids=str,
)
def test_only_a_card_with_a_desktop_is_held_back_and_says_so(tiny, card, bound):
    asked = []

    def rate() -> float:
        asked.append(1)
        return 1e9

    tokens, note = bounded_chunk(8192, tiny, card, rate)
    assert (tokens < 8192) == bool(note) == bool(asked) == bound
    if bound:
        assert f"{tokens:,} tokens instead of 8,192" in note
    assert bounded_chunk(8192, tiny, card, lambda: 1e15) == (8192, "")


def test_the_rate_is_the_measured_one_and_is_tried_where_nobody_measured():
    row = DeviceProfile("some-card-sm86", 28, "a test", rates={"matmul/bfloat16": ((4096, 2.5e13), (8192, 3e13))})
    assert product_rate(torch.device("cpu"), torch.bfloat16, Found(row, "user")) == 2.5e13


def test_an_engine_under_a_desktop_computes_in_smaller_chunks(phantom, words, monkeypatch):
    card = Gpu("NVIDIA GeForce GTX 1650", driver_model="WDDM")
    monkeypatch.setattr(
        "engine.ring.chunk_for", lambda asked, config, *more: bounded_chunk(asked, config, card, lambda: 2e9)
    )
    engine = Engine(EngineConfig(model="", max_context=2048, kv_capacity=2048, prefill_chunk=1024), phantom)
    try:
        prepared = engine.prepare(words(1500), SamplingParams(max_tokens=1))
        done = [event.done for event in engine.generate(prepared) if isinstance(event, Progress)]
        chunk = largest_chunk(phantom.config, 2e9)
        assert max(later - earlier for earlier, later in pairwise(done)) == chunk == engine.config.prefill_chunk < 1024
        assert any("resets it" in line for line in ready_lines(engine, 1.0))
        engine.audit()
    finally:
        engine.close()
