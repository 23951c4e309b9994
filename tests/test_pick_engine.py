"""The risk: a card gets the wrong engine, or none and no word why."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

import engine.device
import engine.platform
from engine.config import EngineConfig
from engine.engine import Engine
from engine.platform import Driver, TorchBuild
from engine.units import GIB
from kvring_cli import engines
from kvring_cli.app import call
from kvring_cli.engines import pick_engine, torch_line
from tests.gguf_models import save_gguf
from tests.machines import H200, RTX_3060, laptop, linux_server, windows_pc
from tests.models import phantom_folder, tiny_model


@pytest.mark.parametrize(
    ("capability", "engine"),
    [
        ("8.0", "triton-sm80"),
        ("8.6", "triton-sm86"),
        ("8.9", "triton-sm89"),
        ("9.0", "triton-sm90"),
        ("12.0", "triton-sm120"),
        ("10.0", "triton-sm100"),
        ("7.5", "torch-cuda"),
    ],
)
def test_each_capability_gets_its_engine(capability, engine):
    facts = windows_pc(gpus=(replace(RTX_3060, capability=capability),))
    choice = pick_engine(facts, {}, triton_kernels=True)
    assert (choice.engine, choice.exit_code) == (engine, 0)
    assert choice.kv_dtype == ("fp16" if capability == "7.5" else "bf16")
    assert choice.command("m")[:5] == ["kvring", "serve", "m", "--device", "cuda"]


def test_a_build_without_kernels_never_claims_them():
    choice = pick_engine(linux_server(), {}, triton_kernels=False)
    assert choice.engine == "torch-cuda" and "no Triton kernels" in choice.reason
    assert engines.has_triton_kernels() in (True, False)


@pytest.mark.parametrize(
    ("facts", "environ", "code"),
    [
        (windows_pc(gpus=(replace(RTX_3060, capability=None),)), {}, 3),
        (windows_pc(gpus=(), driver=Driver(trouble="nvidia-smi: Unknown Error")), {}, 3),
        (laptop(), {"NINFER_AGENT_CC": "Field is not valid"}, 3),
        (windows_pc(torch=TorchBuild("2.8.0+cpu")), {}, 4),
        (windows_pc(torch=TorchBuild()), {}, 4),
        (laptop(torch=TorchBuild()), {}, 4),
        (windows_pc(triton=None), {}, 4),
        (windows_pc(gpus=(replace(RTX_3060, capability="6.1"),)), {}, 5),
        (laptop(), {"NINFER_AGENT_CC": ' "5.2" '}, 5),
        (laptop(), {}, 0),
        (laptop(), {"NINFER_AGENT_CC": "8.9 "}, 0),
        (linux_server(), {"NINFER_AGENT_CC": ""}, 0),
    ],
)
def test_pick_engine_says_by_its_exit_code_what_is_wrong(facts, environ, code):
    choice = pick_engine(facts, environ, triton_kernels=True)
    assert choice.exit_code == code and choice.reason
    assert bool(choice.fix) == bool(code)


def test_the_window_follows_the_cards_memory():
    small = pick_engine(windows_pc(), {}, triton_kernels=True)
    large = pick_engine(linux_server(), {}, triton_kernels=True)
    assert dict(small.settings)["--profile"] == "12gb" and small.window_tokens == 8192
    assert small.pool_tokens == (8192 // 64 + 1024 // 64 + 8) * 64
    assert dict(large.settings) == {"--device": "cuda", "--profile": "24gb", "--vram-limit": "141GiB"}
    tiny = pick_engine(windows_pc(gpus=(replace(RTX_3060, total=6 * GIB),)), {}, triton_kernels=True)
    assert dict(tiny.settings) == {"--device": "cuda", "--kv-window": "4096", "--prefill-chunk": "512"}


def test_the_command_prints_the_line_to_serve_with(capsys, monkeypatch):
    assert call(["pick-engine", "phantom", "--compute-capability", "8.6"]) == 0
    assert "kvring serve phantom --device cuda" in capsys.readouterr().out
    monkeypatch.setattr(engine.platform, "gather", windows_pc)
    assert call(["pick-engine", r"C:\my models\x.gguf"]) == 0
    assert r'kvring serve "C:\my models\x.gguf" --device cuda --profile 12gb' in capsys.readouterr().out
    assert call(["pick-engine", "--compute-capability", "N/A"]) == 3
    assert "error: the compute capability is given as 'N/A'" in capsys.readouterr().err
    assert call(["pick-engine", "--json", "--compute-capability", "3.5"]) == 5
    assert json.loads(capsys.readouterr().out)["outcome"] == "unsupported"


def test_the_torch_line_has_pytorchs_index_and_a_cuda_that_the_driver_runs():
    assert torch_line(windows_pc()).endswith("cu128")
    assert torch_line(linux_server(driver=Driver("580", "13.0"))).endswith("cu130")
    assert H200.hardware_class == "nvidia-h200-sm90"


@pytest.mark.parametrize("fast", [True, False])
def test_a_cpus_dtype_is_the_one_that_serve_takes(fast, monkeypatch, capsys, tmp_path):
    """It said fp32 of a GGUF file that this CPU computes in bf16."""
    monkeypatch.setattr(engine.device, "cpu_multiplies_bfloat16", lambda: fast)
    monkeypatch.setattr(engine.platform, "gather", laptop)
    file = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    for path in (file, shutil.copy(file, tmp_path / "named otherwise"), phantom_folder()):
        assert call(["pick-engine", str(path), "--json"]) == 0
        picked = json.loads(capsys.readouterr().out)
        assert picked["serve"][1:] == ["serve", str(path), "--device", "cpu"]
        served = Engine.load(EngineConfig(model=str(path), device="cpu", max_context=256))
        assert picked["kv_dtype"] == served.capacity.kv == ("bf16" if fast and path != phantom_folder() else "fp32")
        served.close()
    assert call(["pick-engine"]) == 0
    assert ("fp32, bf16 of a GGUF file" in capsys.readouterr().out) == fast
