"""The candidates of each route on this hardware. A new one is a line in `FINDERS`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from engine.config import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.model.load import LoadedModel
from engine.ops.gather import as_words, gather_pages
from engine.platform import Platform
from engine.routes import CANDIDATES, COMPILED_IN, Bands
from kvring_cli.calibration import cuda
from kvring_cli.calibration.choose import Way, bands, fastest
from kvring_cli.calibration.standin import CPU_SIZES, stand_in

Finder = Callable[[torch.device, Platform], "Bands | None"]
"""None: the compiled-in way is the fastest, or was chosen by somebody."""
CHUNK = 1024
_PAGES = (1, 4, 16, 64, 256)


def cases(device: torch.device, platform: Platform) -> Iterator[tuple[str, Callable[[], dict[str, Bands]]]]:
    """What is measured, and how: bands by key, as `engine.routes` reads them; none where the compiled-in way stays."""
    for key, find in FINDERS[device.type].items():

        def measure(key: str = key, find: Finder = find) -> dict[str, Bands]:
            best = find(device, platform)
            return {} if best is None else {key: best}

        yield f"candidates of {key}", measure


def _threads(device: torch.device, platform: Platform) -> Bands | None:
    """Threads for a mixed piece of work: a prompt of one chunk and a short answer."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    most = platform.processors()
    counts = sorted({1, *(2**n for n in range(1, most.bit_length())), most})
    counts = [count for count in counts if count <= most]
    with _engine() as engine:

        def way(count: int) -> Way:
            def run() -> torch.Tensor:
                before = torch.get_num_threads()
                torch.set_num_threads(count)
                try:
                    return _answer(engine)
                finally:
                    torch.set_num_threads(before)

            return run

        # Several threads are measured by the wall: one thread's own clock would not see what waiting costs.
        torch.set_num_threads(most)
        best = fastest({count: way(count) for count in counts}, most, device, _close)
        torch.set_num_threads(best)
    return None if best == most else ((1, best),)


def _prefill_chunk(device: torch.device, platform: Platform) -> Bands | None:
    """Tokens of a prefill step; never above the compiled-in size, which every pool that starts has room for."""
    model = stand_in(CPU_SIZES[0], device, torch.float32)
    engines = {chunk: _make(model, chunk) for chunk in (256, 512, CHUNK)}
    try:
        ways = {chunk: (lambda engine=engine: _answer(engine)) for chunk, engine in engines.items()}
        best = fastest(ways, CHUNK, device, _close)
        return None if best == CHUNK else ((1, best),)
    finally:
        for engine in engines.values():
            engine.close()


def _page_gather(device: torch.device, platform: Platform) -> Bands | None:
    size = CPU_SIZES[1]
    pool = torch.randn(280, 2, size.kv_heads, 64, size.head_dim)
    words, order = as_words(pool), np.random.default_rng(0).permutation(280).astype(np.int64)
    compiled_in = COMPILED_IN["page_gather"][0][1]

    def ways(count: int) -> Mapping[str, Way]:
        slots = order[:count]
        return {name: (lambda name=name: gather_pages(pool, words, slots, name)) for name in CANDIDATES["page_gather"]}

    found = bands(_PAGES, [fastest(ways(count), compiled_in, device) for count in _PAGES])
    return None if {schedule for _, schedule in found} == {compiled_in} else found


FINDERS: Mapping[str, Mapping[str, Finder]] = {
    "cpu": {"threads": _threads, "page_gather": _page_gather, "prefill_chunk": _prefill_chunk},
    "cuda": cuda.FINDERS,
}
"""By device: route -> who finds its bands."""


@contextmanager
def _engine() -> Iterator[Engine]:
    engine = _make(stand_in(CPU_SIZES[0], torch.device("cpu"), torch.float32), CHUNK)
    try:
        yield engine
    finally:
        engine.close()


def _make(model: LoadedModel, chunk: int) -> Engine:
    settings = {"max_context": 2048, "kv_capacity": 2048, "reuse": False, "device_profile": "off"}
    return Engine(EngineConfig(model="", prefill_chunk=chunk, **settings), model)


def _answer(engine: Engine) -> torch.Tensor:
    """A chunk of prompt and eight tokens; logits to compare, since equal ways may differ in the last bit."""
    prompt = "the time of work " * 250
    engine.complete(engine.prepare(prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    return engine.logits(range(64))


def _close(ours: torch.Tensor, reference: torch.Tensor) -> bool:
    return torch.allclose(ours, reference, atol=1e-3)
