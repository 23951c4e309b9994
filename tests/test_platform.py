"""The risk: a machine unlike ours. Every Windows path is driven with recorded facts, here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.platform import WSL2, Linux, Windows, gather, this_platform
from engine.units import GIB
from tests.machines import A4000_TCC, RTX_3060, Kernel32, nvml

ROOT = Path(__file__).parent.parent
LEASH = "import threading\nfrom gates.leash import _watch\nthreading.Thread(target=_watch, daemon=True).start()"


def test_each_system_gets_its_own_probes():
    assert type(this_platform("Windows", "11")) is Windows
    assert type(this_platform("Linux", "5.15.167.4-microsoft-standard-WSL2")) is WSL2
    assert type(this_platform("Linux", "6.8.0")) is Linux
    assert this_platform("Darwin", "24").name == "darwin"


def test_the_disk_is_looked_at_where_the_cache_lies_and_not_at_home(tmp_path, monkeypatch):
    asked, real = [], shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(Path(folder)) or real(folder))
    monkeypatch.setattr(sys.modules["engine.platform.gather"], "cache_folder", lambda: tmp_path / "not" / "there yet")
    facts = gather(Linux(), import_torch=False, nvml=None)
    assert asked == [tmp_path] and facts.disk_free and facts.cache.endswith("there yet")


def test_wsl2_follows_wddm_though_nvml_cannot_say_so():
    assert [card.driver_model for card in WSL2().cards((A4000_TCC,))] == ["WDDM"]


def test_windows_facts_without_symlinks_registry_or_windll(monkeypatch):
    """What a locked-down PC leaves: each probe that fails is unknown, and the look goes on."""

    def refuse(*_, **__):
        raise OSError("A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    registry = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=refuse)
    facts = gather(Windows(Kernel32(), registry), import_torch=False, nvml=nvml())
    assert (facts.system, facts.symlinks, facts.console.code_page) == ("windows", False, 936)
    assert facts.gpu == RTX_3060 and facts.memory.commit_free == 2 * GIB
    bare = gather(Windows(), import_torch=False, nvml=nvml())  # no windll here at all
    assert bare.memory is None and bare.console.encoding is None


def test_processors_that_a_virtual_machine_gives_one_name_have_rows_of_their_own(tmp_path):
    """A row measured on one AMD EPYC was taken for another's, which doesn't multiply the same types."""
    (tmp_path / "proc").mkdir()
    block = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"
    classes = []
    for model in (1, 17):
        (tmp_path / "proc/cpuinfo").write_text("".join(block.format(number, model) for number in range(2)))
        classes.append(Linux(tmp_path).cpu().hardware_class)
    assert classes == ["amd-epyc-family-25-model-1-cpu", "amd-epyc-family-25-model-17-cpu"]

    says = {"ProcessorNameString": "AMD EPYC  ", "Identifier": "AMD64 Family 25 Model 17 Stepping 1"}

    def value(key, name):
        if name not in key:
            raise FileNotFoundError(2, "The system cannot find the file specified")
        return key[name], 1

    registry = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=lambda *_: nullcontext(says), QueryValueEx=value)
    assert Windows(Kernel32(), registry).cpu().hardware_class == classes[1], "Windows' number of it is the same"
    says["Identifier"] = "something else"
    assert Windows(Kernel32(), registry).cpu().hardware_class == "amd-epyc-cpu"
    del says["Identifier"]
    assert Windows(Kernel32(), registry).cpu().name == "AMD EPYC", "a name is kept where the other value is missing"
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\nmodel name\t: Cortex-A76\n\n")
    assert Linux(tmp_path).cpu().hardware_class == "cortex-a76-cpu"


@pytest.mark.parametrize("encoding", ["gbk", "ascii"])
def test_a_console_that_is_not_utf8_and_paths_with_spaces_and_chinese_are_no_trouble(tmp_path, encoding):
    """What the console lacks is shown as ?; the files behind such names are found all the same."""
    import shutil

    from tests.models import phantom_folder

    folder = tmp_path / "我的 模型 & more"
    shutil.copytree(phantom_folder(), folder, ignore=lambda _, names: [n for n in names if n.endswith(".py")])
    environment = {
        **os.environ,
        "PYTHONIOENCODING": f"{encoding}:strict",
        "PYTHONUTF8": "0",
        "XDG_CACHE_HOME": str(tmp_path / "缓存 folder"),
        "NINFER_DEVICE_PROFILES": str(tmp_path / "配置"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvring_cli.app", "doctor", "--model", str(folder), "--port", "1"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
    )
    out = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    assert ("我的 模型" if encoding == "gbk" else "?? ??") in out and "warn    console" in out


@pytest.mark.parametrize("platform", [Windows(Kernel32()), Linux()], ids=["windows", "linux"])
def test_a_server_that_is_asked_to_stop_ends_itself(platform):
    """On Windows terminate() would cut it; there the leash's pipe is closed instead."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('farewell', flush=True), sys.exit(7)))\n"
        "print('up', flush=True)\n[time.sleep(0.1) for _ in range(300)]\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{LEASH}\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout.readline() == "up\n"
        platform.ask_to_stop(process)
        assert process.wait(10) == 7 and process.stdout.readline() == "farewell\n"
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.parametrize("answer", [RuntimeError("could not determine the home directory"), Path("~/.cache/kvring")])
def test_a_user_without_a_home_is_told_which_folder_to_name(monkeypatch, capsys, answer):
    """As a container has that was started with `--user 1234`; some versions of platformdirs leave the ~ in place."""
    import platformdirs

    from kvring_cli.app import call

    def user_cache_path(_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.delenv("NINFER_DEVICE_PROFILES", raising=False)
    monkeypatch.setattr(platformdirs, "user_cache_path", user_cache_path)
    assert call(["doctor", "--port", "1"]) == 1
    assert "fail    device profile   this user has no home folder" in capsys.readouterr().out
    for line in (["run", "phantom", "Hello"], ["receipt"], ["calibrate", "--routes-only"], ["inspect", "smollm2-135m"]):
        assert call(line) == 1, line
        assert capsys.readouterr().err.endswith("fix: XDG_CACHE_HOME=a folder that can be written, or HOME\n"), line
