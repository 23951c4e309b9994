"""The risk: a faster backend that breaks or lies, and nobody hears of it."""

from __future__ import annotations

import pytest

import engine.engine
from engine.backend import choose_backend
from engine.config import EngineConfig
from engine.engine import Engine
from kvring_cli.app import call
from kvring_cli.server.log import ready_lines


class Faulty:
    """A candidate around the torch runner: fails to build, disagrees, or is fine."""

    name = "triton-sm00"

    def __init__(self, runner, fault):
        self.runner, self.fault = runner, fault

    def build(self):
        if self.fault == "build":
            raise RuntimeError("ptxas exited with -1\nsecond line")
        return self.runner

    def disagreement(self, built):
        if self.fault == "crash":
            raise ValueError("shape")
        return "logits differ by 0.5" if self.fault == "disagree" else ""


def faulty(fault):
    return lambda runner: Faulty(runner, fault)


@pytest.fixture
def served(phantom):
    made = []

    def serve(*faults):
        steps: list[str] = []
        config = EngineConfig(model="", max_context=1024, kv_capacity=2048)
        made.append(Engine(config, phantom, backends=[faulty(fault) for fault in faults], say=steps.append))
        return made[-1], steps

    yield serve
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("build", "ptxas exited with -1"), ("disagree", "logits differ by 0.5"), ("crash", "ValueError: shape")],
)
def test_a_backend_that_breaks_or_disagrees_is_replaced_by_torch_and_said(served, fault, words):
    made, steps = served(fault)
    assert made.backend.name == "torch-cpu" and words in made.backend.degraded
    assert any(words in step for step in steps), "the start-up log"
    assert any("DEGRADED" in line and words in line for line in ready_lines(made, 1.0)), "the banner"
    assert made.stats()["backend"] == "torch-cpu" and words in made.stats()["backend_degraded"]
    result = made.complete(made.prepare("Hello", engine.engine.SamplingParams(max_tokens=2)))
    assert result.usage.generated == 2
    made.audit()


def test_one_that_agrees_serves_and_an_earlier_failure_is_still_named(served):
    made, _ = served("build", "none")
    assert made.backend.name == "triton-sm00" and "ptxas" in made.backend.degraded
    assert served("none")[0].backend.degraded == ""


def test_one_that_does_not_apply_is_no_failure(phantom):
    backend, runner = choose_backend("runner", phantom.transformer.device, [lambda runner: None], lambda line: None)
    assert runner == "runner" and backend.degraded == "" and backend.name == "torch-cpu"


def test_every_step_of_the_start_is_logged(served):
    _, steps = served()
    assert [step.split()[0] for step in steps] == ["device", "kv", "host", "pool", "key", "backend"]


@pytest.mark.parametrize("strict", [True, False])
def test_health_and_metrics_say_it_and_strict_refuses(monkeypatch, capsys, strict, phantom):
    """The whole command, up to the moment when it would serve for ever."""
    import uvicorn
    from fastapi.testclient import TestClient

    original = Engine.load.__func__

    def load(cls, config, model=None, platform=None, **more):
        return original(cls, config, phantom, platform, **{**more, "backends": [faulty("build")]})

    seen = {}

    def run(self, sockets=None):
        import time

        client = TestClient(self.config.app, base_url="http://127.0.0.1")
        for _ in range(200):
            health = client.get("/health")
            if health.json()["status"] != "loading":
                break
            time.sleep(0.05)
        seen["health"] = health.json()
        seen["metrics"] = client.get("/metrics").text if health.status_code == 200 else ""

    monkeypatch.setattr(Engine, "load", classmethod(load))
    monkeypatch.setattr(uvicorn.Server, "run", run)
    code = call(["serve", "phantom", "--port", "0", "--max-context", "1024"] + (["--strict"] if strict else []))
    err = capsys.readouterr().err
    if strict:
        assert code == 1 and "error: --strict: triton-sm00 could not be built" in err
    else:
        assert code == 0 and "DEGRADED: triton-sm00" in err and "start | host store" in err
        assert "ptxas" in seen["health"]["backend_degraded"]
        assert "kvring_backend_degraded 1.0" in seen["metrics"]
