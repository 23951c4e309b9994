"""The risk: a driver that pins less than it was asked for, or refuses once and is remembered for it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, EngineError
from engine.kv import pinning
from engine.kv.host import HostStore
from engine.kv.page import KVShape
from engine.kv.pinning import Pinning, most_that_pins
from engine.platform import HostMemory, Platform
from engine.units import GIB, MIB

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=64, dtype=torch.float32)


class Driver:
    """Pins until `most` bytes are pinned; refuses the calls in `refuses`; remembers everything."""

    def __init__(self, most: int = GIB, refuses: tuple[int, ...] = ()) -> None:
        self.most, self.refuses, self.calls = most, refuses, 0
        self.held: dict[int, int] = {}
        self.threads: set[str] = set()

    def register(self, address: int, size: int) -> bool:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        assert all(address + size <= start or start + held <= address for start, held in self.held.items())
        if self.calls in self.refuses or sum(self.held.values()) + size > self.most:
            return False
        self.held[address] = size
        return True

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pinning, "PIECE", 4 * SHAPE.page_bytes)


def store(driver: Driver, pages: int = 16, **more: object) -> HostStore:
    made = HostStore(SHAPE, pages, registrar=driver, **more)
    made.pinning.wait()
    return made


def test_a_store_is_pinned_in_pieces_on_a_thread_of_its_own():
    driver = Driver()
    made = store(driver, pages=18)
    assert driver.calls == 5 and made.pinning.pinned.all() and made.pinned_bytes == made.bytes
    assert driver.threads == {"kvring-pin"}, "CUDA's last error belongs to its thread"
    made.close()
    assert not driver.held and made.pinned_bytes == 0


def test_a_failed_pin_never_poisons_a_later_one():
    made = store(Driver(refuses=(1,)))
    assert made.pinning.pinned.tolist() == [False] * 4 + [True] * 12
    assert made.pinning.refused == 1
    made.close()


def test_a_driver_with_no_more_to_give_is_not_asked_for_ever():
    driver = Driver(most=5 * SHAPE.page_bytes)
    made = store(driver, pages=40)
    assert made.pinned_bytes == 4 * SHAPE.page_bytes and made.pinning.refused == 9
    assert driver.calls == 1 + pinning.REFUSALS
    made.close()


@given(pages=st.integers(1, 40), budget=st.integers(0, 50), most=st.integers(0, 50))
def test_pinned_and_pageable_pieces_add_up_and_no_page_lies_in_two(pages, budget, most):
    driver = Driver(most=most * SHAPE.page_bytes)
    made = Pinning(driver, None, 1 << 30, pages, SHAPE.page_bytes, budget * SHAPE.page_bytes)
    made.wait()
    pieces = -(-pages // 4)
    assert len(driver.held) + made.refused + made.over_budget == pieces
    assert made.bytes == sum(driver.held.values()) <= min(budget, most) * SHAPE.page_bytes
    assert all(size % SHAPE.page_bytes == 0 for size in driver.held.values())
    made.close()
    assert not driver.held


def test_memory_stays_until_it_is_unregistered_though_nobody_closes_the_store():
    driver = Driver()
    made = store(driver)
    assert driver.held
    del made
    gc.collect()
    assert not driver.held


def test_the_bytes_are_the_same_pinned_in_part_or_not_at_all():
    plain, mixed = HostStore(SHAPE, 16), store(Driver(refuses=(2,)))
    for each in (plain, mixed):
        pages = each.allocate(16)
        for page in pages:
            each.data[page] = torch.arange(each.data[page].numel()).view_as(each.data[page]) + page
    assert np.array_equal(plain.data.numpy(), mixed.data.numpy())
    mixed.close()


def test_how_much_can_be_pinned_is_found_by_trying():
    driver = Driver(most=96 * MIB)
    assert 96 * MIB - SHAPE.page_bytes < most_that_pins(driver, 200 * MIB) <= 96 * MIB
    assert not driver.held


class LittleMemory(Platform):
    def memory(self) -> HostMemory:
        return HostMemory(4 * GIB, 2 * GIB, 4 * GIB, 64 * MIB)


def test_a_store_beyond_the_commit_limit_is_refused_before_anything_is_touched():
    with pytest.raises(EngineError, match="64 MiB"):
        HostStore(SHAPE, 65 * MIB // SHAPE.page_bytes, LittleMemory())


def test_an_engine_plans_within_the_commit_limit_and_not_the_free_ram(phantom):
    with pytest.raises(ConfigError, match=r"64 MiB of RAM is free"):
        Engine(EngineConfig(model="", max_context=65536), phantom, LittleMemory())


def test_pinned_memory_without_a_card_is_refused_and_not_ignored(phantom):
    with pytest.raises(ConfigError, match="CPU"):
        Engine(EngineConfig(model="", max_context=1024, host_memory="pinned"), phantom)
