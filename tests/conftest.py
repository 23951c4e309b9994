"""One loaded phantom and one tiny Gemma for the whole run, and engine makers that audit what they made at the end."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # kernels run under Triton's interpreter; read when triton is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings as hypothesis_settings

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.load import LoadedModel, load_model
from tests.models import phantom_folder, save_folder
from tests.sliding import oracle

os.environ["KVRING_RECORD"] = "0"  # tests start servers by the hundred; none is for a receipt
hypothesis_settings.register_profile("shared", deadline=None)  # a thread that had to wait for a core is no fault
hypothesis_settings.load_profile("shared")


@pytest.fixture(scope="session")
def phantom() -> LoadedModel:
    return load_model(phantom_folder())


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_folder(oracle(), tmp_path_factory.mktemp("gemma")))


def rings(model: LoadedModel, **usual: object) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**settings: object) -> Engine:
        made.append(Engine(EngineConfig(model="", **{**usual, **settings}), model))
        return made[-1]

    yield make
    for engine in made:
        engine.audit(deep=True)
        engine.close()


@pytest.fixture
def make_engine(phantom: LoadedModel) -> Iterator[Callable[..., Engine]]:
    """make_engine(kv_capacity=..., ...): a small ring over the phantom."""
    yield from rings(phantom, max_context=4096, kv_capacity=32 * 64, prefill_chunk=256)


@pytest.fixture
def make_gemma(gemma: LoadedModel) -> Iterator[Callable[..., Engine]]:
    """make_gemma(kv_capacity=..., ...): a small ring over the tiny Gemma."""
    yield from rings(gemma, max_context=2048, kv_capacity=12 * 64, prefill_chunk=192, sink=64)


@pytest.fixture(scope="session")
def words(phantom: LoadedModel) -> Callable[..., str]:
    """words(tokens, seed): plain text of about so many tokens, the same each time."""
    from random import Random

    vocabulary = "river stone garden letter market window bridge valley engine village walked under".split()  # noqa: SIM905

    def make(tokens: int, seed: int = 0) -> str:
        rng = Random(seed)
        text = " ".join(rng.choice(vocabulary) for _ in range(tokens))
        return phantom.tokenizer.decode(phantom.tokenizer.encode(text)[:tokens])

    return make
