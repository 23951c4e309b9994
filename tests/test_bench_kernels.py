"""The risk: a table of kernels that times something else than it says, or of pages whose size never changed."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import pytest
import torch

from engine.config import PAGE, EngineConfig
from engine.errors import EngineError
from engine.model.random import random_config
from gates import kernels
from gates.floors import Floors
from gates.kernels import PARTS, Scene, measure
from gates.page_size import measure as measure_pages
from gates.page_size import table_bytes
from tests.models import phantom_folder

CPU = torch.device("cpu")
PAGES, ROWS = 4, 3


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_each_row_counts_the_bytes_and_operations_of_the_work_that_it_timed(monkeypatch, triton):
    if triton:
        pytest.importorskip("triton", reason="triton has no wheel here")
    ran = []
    monkeypatch.setattr(kernels, "median_seconds", lambda work, device, rounds: ran.append(work()) or 2.0)
    config = random_config("random:tiny")
    scene = Scene.of(config, CPU, torch.float32, PAGES)
    scene = replace(scene, triton=triton, shape=replace(scene.shape, layers=2))
    found = {name: rate for name, rate in zip(PARTS, measure(scene, Floors(1e6, 1e6, 1e6), PARTS, ROWS), strict=True)}
    assert len(ran) == len(PARTS)
    page = 2 * config.kv_heads * PAGE * config.head_dim * 4
    code = config.kv_heads * PAGE * (config.head_dim // (2 if triton else 1) + 4)
    assert found["gather"].bytes_per_second == PAGES * page / 2
    assert found["attention"].bytes_per_second == PAGES * page / 2
    assert found["scores"].bytes_per_second == (PAGES - 1) * code / 2
    assert found["chunk"].flops == 4 * config.heads * config.head_dim * ROWS * PAGES * PAGE / 2
    assert found["attention"].floor == found["attention"].bytes_per_second / 1e6
    assert {rate.by for name, rate in found.items() if name != "chunk"} == {"triton" if triton else "torch"}


def test_a_child_really_has_pages_of_the_size_and_finds_what_dense_finds():
    settings = asdict(EngineConfig(model=str(phantom_folder()), kv_capacity=1600, sink=64, prefill_chunk=256))
    settings |= {"tokens": 3072, "budget": 512, "tasks": ["keyed"], "questions": 2}
    (row,) = measure_pages(settings, [32], lambda what, share: None)
    assert row.layer_page_bytes == 2 * 2 * 32 * 64 * 4, "k and v, two KV heads, 32 tokens of 64 channels in float32"
    assert row.hits == row.dense_hits == {"keyed": 2} and row.audited and row.fetched > 0 and row.gather > 0
    assert row.table_bytes == table_bytes(4, 32, 262_144, 1600) == 4 * 4 * (8192 + 2 * 50)


def test_a_child_that_fails_is_named():
    child = [sys.executable, "-c", "import sys; sys.exit('no room for such pages')"]
    with pytest.raises(EngineError, match="pages of 16 tokens failed: no room for such pages"):
        list(measure_pages({}, [16], lambda what, share: None, child))
