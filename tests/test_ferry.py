"""The risk: where kernels can't read the host store, the host brings other bytes, too few, or into another's slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton has no wheel here")

from engine import ferry  # noqa: E402
from engine.kv.dtype import KV  # noqa: E402
from engine.kv.host import HostStore  # noqa: E402
from engine.kv.page import KVShape  # noqa: E402
from engine.kv.pool import DevicePool  # noqa: E402
from engine.kv.transfer import TransferStats  # noqa: E402
from engine.ops.triton_slots import Misses  # noqa: E402
from engine.step_graph import StepGraph  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYERS, SLOTS, PAGES = 3, 9, 20


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv", ["bf16", "k8v4"])
def test_every_miss_is_in_its_slot_and_no_other_slot_is_touched(monkeypatch, kv, graphs):
    """Two places: layers without a miss, with as many as there are places, and with more."""
    if graphs and not CUDA:
        pytest.skip("there are no graphs without a card")
    shape = KVShape(LAYERS, 1, 16, torch.bfloat16, KV[kv])
    monkeypatch.setattr(ferry, "STAGING", 2 * shape.layer_page_bytes)
    pool, host = DevicePool(shape, SLOTS, PAGES, DEVICE), HostStore(shape, PAGES)
    misses, stats = Misses.empty(LAYERS, SLOTS, DEVICE), TransferStats()
    random = np.random.default_rng(3)
    host.data.view(torch.uint8).numpy()[...] = random.integers(0, 120, host.data.view(torch.uint8).shape)  # no NaN
    made = ferry.Ferry(pool, host, misses, stats, units=2)

    def step(between) -> None:
        for layer in range(LAYERS):
            made.fetch(layer, between)

    graph = StepGraph() if graphs else None
    step(lambda work: work())  # a graph's kernels are compiled before
    if graphs:
        graph.capture(lambda: step(graph.cut))
    assert stats.fetch_seconds == 0
    for counts in ((0, 1, 2), (9, 0, 0), (5, 4, 3), (0, 0, 0), (1, 9, 1)):
        wanted = pool.data.cpu().clone()
        for layer, count in enumerate(counts):
            pages, slots = random.permutation(PAGES)[:count], random.permutation(SLOTS)[:count]
            misses.told[layer, 0] = count
            misses.pages[layer, :count] = torch.from_numpy(pages)
            misses.places[layer, :count] = torch.from_numpy(slots)
            wanted[layer, slots] = host.data[pages, layer]
        graph.replay() if graphs else step(lambda work: work())
        assert torch.equal(pool.data.cpu(), wanted), counts
    assert stats.fetch_seconds > 0
