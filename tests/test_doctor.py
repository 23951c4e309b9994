"""The risk: a machine that is wrong and called right."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.platform import Console, Driver, HostMemory, Package, TorchBuild
from engine.trials import Trials, try_apart
from engine.units import GIB
from kvring_cli.app import call
from kvring_cli.doctor import examine, exit_code, software
from kvring_cli.models import CATALOGUE, Published, resolve
from tests.gguf_models import save_gguf
from tests.machines import A4000_TCC, RTX_3060, laptop, linux_server, windows_pc
from tests.models import tiny_model

TRIED = SimpleNamespace(pinned=6 * GIB, to_device=24e9, to_host=25e9, spills=False)


def checks(facts, trials=lambda: TRIED, environ=None, **more):
    found = examine(facts, environ=environ or {}, port=1, trials=trials, **more)
    assert all(finding.status in ("ok", "warn", "fail", "unknown") for finding in found)
    assert all(finding.fix for finding in found if finding.status != "ok"), "each has a fix"
    return found


def named(name, found):
    (finding,) = [finding for finding in found if finding.name == name]
    return finding


@pytest.mark.parametrize("machine", [windows_pc, linux_server, laptop])
def test_a_healthy_machine_passes(machine):
    found = checks(machine())
    assert exit_code(found) == 0
    assert {finding.name for finding in found if finding.status == "unknown"} <= {"pcie"}


def test_what_the_server_needs_is_imported_and_not_only_looked_for(tmp_path):
    """fastapi was there and lacked a package of its own: the server ended and pointed to doctor, who found nothing."""
    (tmp_path / "fastapi").mkdir()
    (tmp_path / "fastapi" / "__init__.py").write_text("import a_package_that_nobody_has")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "kvring_cli.app", "doctor", "--port", "1", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    (found,) = [one for one in json.loads(done.stdout)["checks"] if one["name"] == "packages"]
    assert done.returncode == 1 and found["status"] == "fail" and "a_package_that_nobody_has" in found["detail"]
    assert found["fix"] == "pip install --force-reinstall fastapi"


def test_every_package_that_is_declared_is_tried():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
    declared = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line)[0] for line in declared}
    assert set(software.PACKAGES) == names - {"torch", "triton-windows"}, "those have findings of their own"


def test_wddm_and_tcc_are_told_apart():
    wddm, tcc = checks(windows_pc()), checks(windows_pc(gpus=(A4000_TCC,)))
    assert "shrinks" in named("driver model", wddm).detail and named("driver model", tcc).detail == "TCC"
    assert "left to the desktop" in named("device memory", wddm).detail
    assert "left to the desktop" not in named("device memory", tcc).detail
    silent = checks(windows_pc(gpus=(replace(RTX_3060, driver_model=None),)))
    assert named("driver model", silent).status == "unknown"


def test_torch_without_cuda_beside_a_card_fails_with_the_line_that_mends_it():
    found = checks(windows_pc(torch=TorchBuild("2.8.0+cpu")))
    torch = named("torch", found)
    assert torch.status == "fail" and "PyPI's torch is the CPU build" in torch.detail
    assert "--index-url https://download.pytorch.org/whl/cu128" in torch.fix
    assert named("pinned memory", found).status == "unknown", "what could not be tried is not ok"
    assert exit_code(found) == 1


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("ModuleNotFoundError(\"No module named 'torch'\", name='torch')", "No module named 'torch'"),
        ("OSError('[WinError 126] The specified module could not be found. Error loading fbgemm.dll')", "WinError 126"),
    ],
)
def test_without_a_torch_that_loads_doctor_still_says_so_and_every_command_points_to_it(tmp_path, raised, words):
    """The first thing that goes wrong on Windows, and what doctor is for."""
    (tmp_path / "torch.py").write_text(f"raise {raised}\n")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    lines = (["doctor", "--model", "phantom"], ["pick-engine"], ["run", "phantom", "Hello"], ["serve", "phantom"])
    code = f"from kvring_cli.app import call\nfor line in {lines!r}: print('#', call(line), flush=True)"
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", "KVRING_RECORD": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", env=environ)
    said = done.stdout + done.stderr
    assert re.findall(r"^# (\d+)$", done.stdout, re.M) == ["1", "4", "1", "1"], said
    assert re.search(rf"^fail +torch .*can't be imported: .*{words}", done.stdout, re.M), said
    assert re.search(r"^unknown +model ", done.stdout, re.M) and re.search(r"^ok +ram ", done.stdout, re.M), said
    assert "Traceback" not in said and "kvring doctor says which" in done.stderr


def test_a_torch_that_windows_cannot_load_is_mended_by_its_runtime():
    trouble = "OSError: [WinError 126] The specified module could not be found. Error loading c10.dll"
    found = named("torch", checks(windows_pc(torch=TorchBuild("2.8.0+cu128", trouble=trouble))))
    assert found.status == "fail" and "vc_redist.x64.exe" in found.fix and "--index-url" in found.fix


@pytest.mark.parametrize(
    ("system", "version", "cuda", "status"),
    [
        ("windows", "511.65", "12.8", "fail"),
        ("windows", "528.33", "12.8", "warn"),
        ("windows", "576.52", "13.0", "fail"),
        ("wsl2", "528.33", "12.8", "warn"),
        ("linux", "525.60.13", "12.8", "warn"),
        ("linux", "470.82.01", "12.8", "fail"),
        ("linux", "580.65.06", "13.0", "ok"),
        ("linux", "580.65.06", "15.0", "unknown"),
    ],
)
def test_a_driver_older_than_torchs_cuda_needs_fails(system, version, cuda, status):
    newest = {"511.65": "11.6", "528.33": "12.0", "576.52": "12.9", "525.60.13": "12.0", "470.82.01": "11.4"}
    facts = windows_pc(
        system=system, driver=Driver(version, newest.get(version, "13.0")), torch=TorchBuild("2.9.0", cuda, True)
    )
    assert named("driver", checks(facts)).status == status


@pytest.mark.parametrize(
    ("torch", "triton", "status"),
    [
        (TorchBuild("2.8.0+cu128", "12.8", True), Package("triton-windows", "3.4.0.post20"), "ok"),
        (TorchBuild("2.8.0+cu128", "12.8", True), Package("triton-windows", "3.2.0"), "warn"),
        (TorchBuild("2.11.0+cu128", "12.8", True), Package("triton-windows", "3.6.0.post25"), "ok"),
        (TorchBuild("2.11.0+cu128", "12.8", True), Package("triton-windows", "3.7.1"), "warn"),
        (TorchBuild("2.99.0", "12.8", True), Package("triton-windows", "3.4.0"), "warn"),
        (TorchBuild("2.99.0", "12.8", True, wants="3.4.0"), Package("triton", "3.4.1"), "ok"),
        (TorchBuild("2.8.0+cu128", "12.8", True), None, "warn"),
    ],
)
def test_an_unknown_pair_of_torch_and_triton_is_warned_of(torch, triton, status):
    assert named("triton", checks(windows_pc(torch=torch, triton=triton))).status == status


def test_a_driver_that_prints_an_error_is_a_failure_and_the_card_unknown():
    facts = windows_pc(gpus=(), driver=Driver(trouble="Driver/library version mismatch; nvidia-smi: exit 9"))
    found = checks(facts)
    assert named("driver", found).status == "fail" and named("card", found).status == "unknown"
    card = named("card", checks(windows_pc(gpus=(replace(RTX_3060, capability=None),))))
    assert card.status == "unknown" and "NINFER_AGENT_CC" in card.fix


def test_a_first_pin_that_fails_is_a_warning_and_the_pageable_way_is_named():
    found = checks(windows_pc(), trials=lambda: SimpleNamespace(**{**vars(TRIED), "pinned": 784 << 20}))
    pinned = named("pinned memory", found)
    assert pinned.status == "warn" and "784 MiB" in pinned.detail and "NINFER_HOST_PAGEABLE" in pinned.fix


def test_trials_that_crash_are_unknown_and_never_ok():
    def crash():
        raise RuntimeError("CUDA error: an illegal memory access\nmore")

    found = checks(windows_pc(), trials=crash)
    for name in ("pinned memory", "bandwidth", "sysmem fallback"):
        assert named(name, found).status == "unknown" and "illegal memory access" in named(name, found).detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the card can be tried")
def test_a_card_is_tried_in_a_process_that_gives_it_back():
    """launch tries a server next, which would find the card's memory taken by what tried it."""
    said = (
        """print("a library's own words"); print('{"pinned": 5, "to_device": 1e9, "to_host": 2e9, "spills": true}')"""
    )
    assert try_apart(1 << 30, [sys.executable, "-c", said]) == Trials(5, 1e9, 2e9, True)
    with pytest.raises(RuntimeError, match="ended with code 3"):
        try_apart(1 << 30, [sys.executable, "-c", "import os; os._exit(3)"])
    with pytest.raises(RuntimeError, match=r"^\w+Error: ."):
        try_apart(1 << 30)
    assert not torch.cuda.is_initialized()


def test_the_sysmem_fallback_is_found_out():
    found = checks(windows_pc(), trials=lambda: SimpleNamespace(**{**vars(TRIED), "spills": True}))
    assert (
        named("sysmem fallback", found).status == "warn"
        and "Sysmem Fallback Policy" in named("sysmem fallback", found).fix
    )
    assert named("sysmem fallback", checks(windows_pc())).status == "ok"


def test_a_link_below_its_width_is_warned_of():
    found = checks(windows_pc(), trials=lambda: SimpleNamespace(**{**vars(TRIED), "to_device": 3e9}))
    assert named("bandwidth", found).status == "warn" and "3.0 GB/s" in named("bandwidth", found).detail


def test_a_page_file_too_small_is_named_with_its_place_in_windows():
    found = checks(windows_pc(memory=HostMemory(32 * GIB, 20 * GIB, 33 * GIB, 3 * GIB)))
    assert named("page file", found).status == "warn" and "Virtual memory" in named("page file", found).fix


def test_a_console_that_is_not_utf8_is_named():
    found = checks(windows_pc(console=Console("gbk", 936)))
    assert named("console", found).status == "warn" and "chcp 65001" in named("console", found).fix
    assert named("console", checks(windows_pc(console=Console(None)))).status == "unknown"


def test_spaces_are_no_trouble_and_other_characters_are_named_on_windows():
    assert named("path", checks(windows_pc(home=r"C:\Users\Ann Lee"))).status == "ok"
    odd = named("path", checks(windows_pc(home=r"C:\用户\安")))
    assert odd.status == "warn" and "TRITON_CACHE_DIR" in odd.fix
    assert named("path", checks(linux_server(home="/home/安"))).status == "ok"


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = examine(laptop(), environ={}, port=server.getsockname()[1])
    assert named("port", found).status == "warn"


def test_what_is_not_known_is_never_ok():
    facts = windows_pc(memory=None, disk_free=None, symlinks=None, driver=Driver())
    found = checks(facts)
    for name in ("ram", "page file", "disk", "symlinks", "driver"):
        assert named(name, found).status == "unknown"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NINFER_KV_WINDOW": "4096", "NINFER_KV_SNIK": "1"}, "NINFER_KV_SINK"),
        ({"NINFER_KV_RETRIEVE": "0", "NINFER_KV_DECODE": "recall"}, "runs as window"),
        ({"NINFER_KV_RETRIEVE": "0", "NINFER_KV_SCORER": "token"}, "scorer is not read"),
        ({"NINFER_KV_RING": "0", "NINFER_KV_WINDOW": "8192"}, "kv-window is not read"),
        ({"NINFER_KV_RING": "0", "NINFER_KV_RETRIEVE": "1"}, "nothing is ever cold"),
        ({"NINFER_KV_RETRIEVE": "512", "NINFER_KV_RETRIEVE_SHARE": "20"}, "retrieve-share is not read"),
        ({"NINFER_KV_RING": "0", "NINFER_KV_SCORER": "token"}, "scorer is not read"),
        ({"NINFER_KV_RING": "0", "NINFER_KV_NEIGHBOR_PAGES": "2"}, "neighbor-pages is not read"),
    ],
)
def test_contradictions_among_the_switches_are_named(environ, words):
    found = [finding for finding in checks(laptop(), environ=environ) if finding.name == "settings"]
    assert any(finding.status == "warn" and words in finding.detail for finding in found)
    assert all(switch in found[0].detail for switch in environ if switch != "NINFER_KV_SNIK"), "with their sources"


def test_a_pretended_capability_is_listed_and_one_that_is_none_fails():
    for text, status in (("8.9", "ok"), ('"8.6" ', "ok"), ("x", "fail"), ("8", "fail")):
        found = [one for one in checks(laptop(), environ={"NINFER_AGENT_CC": text}) if "NINFER_AGENT_CC" in one.detail]
        assert [one.status for one in found] == [status], text


def test_a_switch_out_of_its_range_fails():
    finding = named("settings", checks(laptop(), environ={"NINFER_KV_RETRIEVE_SHARE": "101"}))
    assert finding.status == "fail" and "1 to 100" in finding.detail


def test_doctor_speaks_json_and_checks_a_model(capsys):
    assert call(["doctor", "--json", "--model", "phantom", "--port", "1"]) == 0
    body = json.loads(capsys.readouterr().out)
    found = {check["name"]: check for check in body["checks"]}
    assert body["ok"] and body["facts"]["system"]
    assert body["settings"]["sink"] == {"value": 256, "source": "default"}
    assert found["model"]["status"] == found["model tensors"]["status"] == found["model fits"]["status"] == "ok"


def test_doctor_lists_every_setting_with_its_source_when_asked(capsys):
    assert call(["doctor", "-v", "--sink", "128", "--port", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  sink +128 +--sink$", out, re.M) and re.search(r"^  threads +auto +default$", out, re.M)


def test_doctor_fails_on_a_model_that_is_not_whole(tmp_path, capsys):
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\0\0\0")
    assert call(["doctor", "--model", str(tmp_path / "half.gguf"), "--port", "1"]) == 1
    assert "fail    model" in capsys.readouterr().out


def test_a_model_that_does_not_fit_fails_with_what_would(capsys):
    assert call(["doctor", "--model", "phantom", "--ram-limit", "1200MiB", "--max-context", "256K", "--port", "1"]) == 1
    out = capsys.readouterr().out
    assert "fail    model fits" in out and "--max-context" in out


def test_a_models_own_tables_are_read_where_its_folder_has_a_published_name(tmp_path, monkeypatch):
    """`qwen3-8b` here is the test object, which was trained for 262,144 tokens and not for 40,960."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(resolve("phantom"), "qwen3-8b", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    own, phantom = (checks(laptop(), model_name=name) for name in ("qwen3-8b", "phantom"))
    assert named("model fits", own) == named("model fits", phantom)
    assert "context 262,144 tokens" in named("model fits", own).detail
    assert "b552d1221938" in named("model hash", phantom).detail
    assert "nothing is published" in named("model hash", own).detail


def test_a_shape_without_a_file_is_told_so_and_planned_for():
    found = checks(laptop(), model_name="random:tiny")
    assert named("model", found).status == named("model fits", found).status == "ok"
    assert not [finding for finding in found if finding.name == "model hash"]
    assert "kvring plan qwen3-8b" in named("model", checks(laptop(), model_name="Qwen3 8B")).fix


def test_a_published_file_is_known_wherever_it_lies_and_a_damaged_copy_fails(tmp_path, monkeypatch):
    """It was looked up by the name that was typed: a path had nothing published to hold it against."""
    file = save_gguf(tiny_model("llama"), tmp_path / "published.gguf")
    whole = file.read_bytes()
    published = Published((), file.name, hashlib.sha256(whole).hexdigest(), len(whole))
    monkeypatch.setitem(CATALOGUE, "small", published)

    def found(path):
        return named("model hash", checks(laptop(), model_name=str(path)))

    other = tmp_path / "mine.gguf"
    assert found(file) == found(file.rename(other))
    assert found(other).detail == f"SHA-256 {published.sha256}, as published for small"
    other.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert found(other).status == "ok" and "nothing is published" in found(other).detail  # as large by chance
    other.rename(file)
    assert found(file).status == "fail" and found(file).fix == f"delete {file}, then kvring pull small"
