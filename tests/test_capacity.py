"""The risk: a start that memory cannot hold begins, or is refused with advice that does not start either."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import PAGE, EngineConfig
from engine.errors import ConfigError, TooLittleMemory
from engine.kv.budget import Memory
from engine.kv.longest import plan_within
from engine.kv.page import KVShape
from engine.units import GIB, MIB

SHAPE = KVShape(layers=36, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # Qwen3-8B
BASE = EngineConfig(model="", max_context=262_144)


def plan(config=BASE, ram=64 * GIB, device=24 * GIB, weights=5 * GIB, digest=0, trained=262_144, token=0):
    return plan_within(
        config,
        SHAPE,
        trained,
        Memory(ram, device),
        weight_bytes=weights,
        digest_token_bytes=digest,
        staging_pages=64,
        token_bytes=token,
    )


@given(st.integers(5, 12), st.sampled_from([256, 1024, 4096, 8192]), st.sampled_from([0, 9216, 18_432]))
def test_a_pool_that_is_advised_is_one_that_starts(memory, chunk, digest):
    """ "4416 is the largest pool that fits" met "too small: 4672 or more", and that the first one again."""
    config = replace(BASE, prefill_chunk=chunk, max_context=131_072)
    sizes = {"device": memory * GIB, "digest": digest, "token": 192 * 1024}
    try:
        plan(config, **sizes)
    except TooLittleMemory as error:
        told = dict(re.findall(r"--(kv-capacity|prefill-chunk) (\d+)", error.fix))
        assert "kv-capacity" in told or "smaller model" in error.fix or "--max-context " in error.fix
        if "kv-capacity" in told:
            tokens, chunk = int(told["kv-capacity"]), int(told.get("prefill-chunk", chunk))
            fits = replace(config, kv_capacity=tokens, prefill_chunk=chunk)
            assert plan(fits, **sizes).pool_pages * PAGE == tokens
            with pytest.raises(TooLittleMemory):
                plan(replace(fits, kv_capacity=tokens + PAGE), **sizes)


@given(
    st.integers(2, 12),
    st.sampled_from([None, 4, 5]),
    st.sampled_from([None, 4032, 20_032]),
    st.sampled_from(["auto", "off"]),
    st.sampled_from([None, "auto", 8 * GIB]),
    st.sampled_from(["auto", 8192]),
)
def test_what_a_refusal_for_memory_advises_starts(ram, device, pool, ring, host, retrieve):
    """On a CPU "--max-context N is the largest that fits" met the same error with another N, again and again."""
    config = replace(BASE, max_context=40_960, kv_capacity=pool, ring=ring, host_kv_bytes=host, retrieve=retrieve)
    sizes = {"ram": ram * GIB, "device": device and device * GIB, "weights": GIB if device else 0, "digest": 9216}
    try:
        plan(config, **sizes)
    except TooLittleMemory as error:
        told = {name.replace("-", "_"): int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", error.fix)}
        if "leave --host-kv-gib out" in error.fix:
            told["host_kv_bytes"] = None
        if not told:
            assert error.fix.startswith("free memory")
            return
        plan(replace(config, **told), **sizes)
        if "is the largest that fits" in error.fix:
            with pytest.raises(ConfigError):
                plan(replace(config, max_context=told["max_context"] + PAGE), **sizes)
    except ConfigError:
        pass  # a setting is in the way, not memory


@given(st.integers(1, 4096))
def test_a_host_store_that_is_advised_holds_the_context(pages):
    """Rounded to the nearest hundredth it was a page short, and said the same again."""
    config = replace(BASE, max_context=pages * PAGE, host_kv_bytes=1)
    with pytest.raises(ConfigError) as error:
        plan(config)
    gib = float(re.search(r"--host-kv-gib ([\d.]+)", error.value.fix)[1])
    assert plan(replace(config, host_kv_bytes=int(gib * GIB))).logical_pages == pages


def test_where_digests_are_too_large_the_context_that_fits_is_named():
    """It said "a smaller --max-context", without the number."""
    config = replace(BASE, max_context=131_072, kv_window=2048)
    sizes = {"weight_bytes": 5 * GIB, "digest_token_bytes": 18_432}
    with pytest.raises(TooLittleMemory) as error:
        plan_within(config, SHAPE, 131_072, Memory(64 * GIB, 7 * GIB), staging_pages=64, **sizes)
    tokens = int(re.search(r"--max-context (\d+) is the largest", error.value.fix)[1])
    assert plan(replace(config, max_context=tokens), device=7 * GIB, digest=18_432).context == tokens


def test_the_arithmetic_of_the_capacity_table():
    capacity = plan()
    assert SHAPE.token_bytes == 144 * 1024 and SHAPE.page_bytes == 9 * MIB
    assert capacity.pool_pages == 280 and capacity.pool_pages * 64 == 17_920
    assert capacity.host_bytes == 36 * GIB and capacity.logical_pages == 4096
    assert plan(replace(BASE, kv_window=8192)).pool_pages == 152


@pytest.mark.parametrize(
    ("change", "memory", "says", "mends"),
    [
        ({"kv_capacity": 24 * 64}, {}, "sink 4 + open 1 + chunk 16 + working 4 = 25 pages", "--kv-capacity 1600"),
        ({"kv_capacity": 63}, {}, "holds no page", "--kv-capacity"),
        ({"ring": "off", "kv_capacity": 4032}, {}, "the ring is off and a pool of 63 pages", "--ring auto"),
        (
            {},
            {"ram": 20 * GIB},
            "the host store for 262,144 tokens needs 36 GiB",
            "--max-context 138304 is the largest",
        ),
        ({"ram_limit_bytes": 20 * GIB}, {}, "the host store for 262,144 tokens needs 36 GiB", "--max-context 138304"),
        ({"host_kv_bytes": 18 * GIB}, {}, "holds 2048 pages", "--host-kv-gib 36.00"),
        ({}, {"device": 6 * GIB}, "exceed the device's 6 GiB", "--kv-capacity"),
        ({"device_limit_bytes": 6 * GIB}, {}, "exceed the device's 6 GiB", "--kv-capacity"),
        ({}, {"device": 4 * GIB}, "exceed the device's 4 GiB", "--weights q4_k, if"),  # no context or pool would help
        ({}, {"trained": 131_072}, "beyond the 131,072 that the model was trained on", "--positions compact"),
        ({"max_context": 0}, {}, "holds nothing", "--max-context"),
        ({"positions": "compact", "kv_capacity": 16_384}, {"trained": 8192}, "beyond the 8,192", "--kv-capacity 8192"),
        ({"retrieve": 17_900}, {}, "the pool of 280 has room for", "--retrieve"),
    ],
)
def test_a_start_that_cannot_work_is_refused_with_numbers_and_the_knob(change, memory, says, mends):
    with pytest.raises(ConfigError) as caught:
        plan(replace(BASE, **change), **memory)
    assert says in caught.value.message
    assert mends in caught.value.fix


def test_the_context_that_a_refusal_offers_is_accepted():
    assert plan(replace(BASE, max_context=138_304), ram=20 * GIB).context == 138_304


def test_the_pool_that_a_refusal_offers_is_accepted():
    config = replace(BASE, max_context=16_384, kv_capacity=16_384)
    with pytest.raises(ConfigError) as caught:
        plan(config, device=7 * GIB, digest=36 * 8 * 68)
    offered = int(caught.value.fix.split()[1])
    assert plan(replace(config, kv_capacity=offered), device=7 * GIB, digest=36 * 8 * 68).pool_pages == offered // 64


def test_where_no_context_fits_none_is_offered():
    sizes = {"weight_bytes": 5 * GIB, "digest_token_bytes": 36 * 8 * 68, "staging_pages": 64}
    for context in (None, 65_536):
        with pytest.raises(TooLittleMemory) as refused:
            plan_within(replace(BASE, max_context=context), SHAPE, 262_144, Memory(64 * GIB, 5 * GIB + MIB), **sizes)
        assert "a smaller model" in refused.value.fix and "--max-context" not in refused.value.fix


def test_without_a_wish_the_context_shrinks_to_what_the_host_holds_and_says_so():
    capacity = plan(replace(BASE, max_context=None), ram=20 * GIB)
    assert capacity.context == 138_304 and "host memory holds no more" in capacity.notes[0]


def test_without_a_wish_the_context_shrinks_to_what_the_device_holds_and_says_so():
    """A 27B at 2 bits on a card of 12 GB: the digests of all that it was trained for outgrow it."""
    sizes = {"weight_bytes": 5 * GIB, "digest_token_bytes": 36 * 8 * 68, "staging_pages": 64}
    capacity = plan_within(replace(BASE, max_context=None), SHAPE, 262_144, Memory(64 * GIB, 9 * GIB), **sizes)
    assert 0 < capacity.context < 262_144 and "memory holds no more" in capacity.notes[0]
    assert capacity.device_bytes <= 9 * GIB < capacity.device_bytes + 64 * 36 * 8 * 68
    with pytest.raises(TooLittleMemory):  # who asks for it hears what is short
        plan_within(BASE, SHAPE, 262_144, Memory(64 * GIB, 9 * GIB), **sizes)
    with pytest.raises(TooLittleMemory, match="exceed the device's 4 GiB"):
        plan_within(replace(BASE, max_context=None), SHAPE, 262_144, Memory(64 * GIB, 4 * GIB), **sizes)


@pytest.mark.parametrize("ram", [3, 6, 8, 16])
def test_the_automatic_context_is_never_refused_where_the_device_is_the_host(ram):
    config = replace(BASE, max_context=None, kv_capacity=4032)
    capacity = plan(config, ram=ram * GIB, device=None, weights=0, digest=36 * 8 * 132)
    assert 0 < capacity.context < 262_144 and capacity.notes


@given(st.integers(3, 200), st.integers(1, 262_144), st.sampled_from([None, 6, 12, 24]), st.integers(0, 40_000))
def test_an_automatic_host_store_holds_a_context_and_never_more_than_memory_may_spare(ram, context, device, digest):
    config = replace(BASE, max_context=context, kv_capacity=4032, host_kv_bytes="auto")
    weights = GIB if device else 0
    sizes = {"ram": ram * GIB, "device": device and device * GIB, "weights": weights, "digest": digest}
    try:
        one = plan(replace(config, host_kv_bytes=None), **sizes)
    except ConfigError:
        with pytest.raises(ConfigError):
            plan(config, **sizes)
        return
    auto = plan(config, **sizes)
    assert one.host_pages <= auto.host_pages <= max(one.host_pages, min(4 * one.host_pages, 4096))
    assert auto.context == one.context
    if auto.host_pages > one.host_pages:
        assert auto.host_bytes + (0 if device else auto.digest_bytes) <= (ram - 1) * GIB / 2
    assert device is None or auto.device_bytes <= device * GIB
    assert auto.host_reason.startswith("auto: ") and one.host_reason == "what the longest context needs"


@pytest.mark.parametrize("more", range(0, 101, 20))
def test_an_automatic_host_store_refuses_no_start_that_fits_with_one_context(more):
    config, sizes = replace(BASE, max_context=131_072), {"digest": 2304, "token": 192 * 1024}
    device = plan(config, **sizes).device_bytes + more * MIB
    auto = plan(replace(config, host_kv_bytes="auto"), device=device, **sizes)
    assert auto.host_pages >= auto.logical_pages and auto.device_bytes <= device


def test_a_compact_window_stays_within_what_the_model_was_trained_on():
    assert plan(replace(BASE, positions="compact"), trained=8192).pool_pages == 128


def test_a_pool_larger_than_the_context_is_a_dense_engine():
    capacity = plan(replace(BASE, max_context=8192))
    assert not capacity.ring and capacity.pool_pages == 128 and capacity.digest_bytes == 0
    window = capacity.window
    assert window.sink + window.selection + window.recent + window.free == window.pool
