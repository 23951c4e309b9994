"""The risk: a machine unlike ours. Every Windows path is driven with recorded facts, here."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from platform import libc_ver
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.platform import WSL2, Linux, Windows, gather, this_platform
from engine.platform.facts import HostMemory, parse_capability, slug
from engine.platform.nvidia import NO_DRIVER, read_cards
from engine.units import GIB, KIB, MIB
from tests.machines import A4000_TCC, RTX_3060

ROOT = Path(__file__).parent.parent


class Kernel32:
    """Windows' memory and code page: 16 GiB of RAM, 3 GiB free, a page file that leaves 2 GiB to commit."""

    total, free, limit, left, code_page = 16 * GIB, 3 * GIB, 18 * GIB, 2 * GIB, 936

    def GlobalMemoryStatusEx(self, pointer) -> int:
        fields = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64 * 8)).contents
        assert fields[0] & 0xFFFFFFFF == 64, "dwLength is the size of the struct, or the call fails"
        fields[1], fields[2], fields[3], fields[4] = self.total, self.free, self.limit, self.left
        return 1

    def GetConsoleOutputCP(self) -> int:
        return self.code_page


class NVMLError(Exception):
    pass


def nvml(**answers):
    """A stand-in for pynvml: a 3060 under WDDM, unless an answer is changed. An exception is raised."""
    table = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": b"576.52",
        "nvmlSystemGetCudaDriverVersion": 12090,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": "handle",
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 3060",
        "nvmlDeviceGetCudaComputeCapability": (8, 6),
        "nvmlDeviceGetNumGpuCores": 3584,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=12 * GIB, used=GIB, free=11 * GIB),
        "nvmlDeviceGetCurrentDriverModel": 0,
        "nvmlDeviceGetDisplayActive": 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        **answers,
    }

    def function(value):
        def call(*_):
            if isinstance(value, Exception):
                raise value
            return value

        return call

    return SimpleNamespace(NVMLError=NVMLError, **{name: function(value) for name, value in table.items()})


def smi(stdout: str = "", code: int = 0):
    return lambda command: subprocess.CompletedProcess(command, code, stdout, "")


def no_smi(command):
    raise FileNotFoundError(command[0])


# --- the cards --------------------------------------


def test_nvml_is_read_as_it_is():
    assert read_cards(nvml(), no_smi)[0] == (RTX_3060,)
    tcc = read_cards(nvml(nvmlDeviceGetCurrentDriverModel=1), no_smi)[0][0]
    assert tcc.driver_model == "TCC"


def test_what_one_card_does_not_answer_is_unknown_and_the_rest_is_read():
    unsupported = NVMLError("Not Supported")
    (card,), driver = read_cards(
        nvml(nvmlDeviceGetCurrentDriverModel=unsupported, nvmlDeviceGetCudaComputeCapability=unsupported), no_smi
    )
    assert (card.driver_model, card.capability, card.multiprocessors) == (None, None, None)
    assert card.total == 12 * GIB and driver.cuda == "12.9"


def test_without_nvml_the_table_of_nvidia_smi_serves():
    row = "0, NVIDIA GeForce RTX 3060, 8.6, 12288, 1024, 4, 16, Enabled, WDDM, 576.52\n"
    for module in (None, nvml(nvmlInit=NVMLError("NVML Shared Library Not Found"))):
        (card,), driver = read_cards(module, smi(row))
        assert (card.name, card.capability, card.total, card.display) == (RTX_3060.name, "8.6", 12 * GIB, True)
        assert driver.version == "576.52"


def test_no_driver_at_all_is_no_card_and_not_a_fault():
    cards, driver = read_cards(nvml(nvmlInit=NVMLError("NVML Shared Library Not Found")), no_smi)
    assert cards == () and driver.trouble == NO_DRIVER
    assert read_cards(None, no_smi)[1].trouble == NO_DRIVER


def test_a_folder_of_the_path_that_is_shut_is_no_broken_driver(tmp_path, monkeypatch):
    """Starting a program that is nowhere says "permission denied" where such a folder was searched."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    assert read_cards(None)[1].trouble == NO_DRIVER


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9),
        ('Field "compute_cap" is not a valid field to query.', 2),
        ("Unable to determine the device handle for GPU0: Unknown Error", 0),
        ("", 0),
    ],
)
def test_an_error_text_of_nvidia_smi_is_trouble_and_never_a_card(text, code):
    cards, driver = read_cards(nvml(nvmlInit=NVMLError("Driver/library version mismatch")), smi(text, code))
    assert cards == () and "version mismatch" in driver.trouble and driver.trouble != NO_DRIVER


def test_an_error_in_one_field_is_unknown():
    row = "0, NVIDIA T400, [N/A], [Not Supported], 100, 3, 16, [N/A], [N/A], Unknown Error"
    (card,), driver = read_cards(None, smi(row))
    assert (card.capability, card.total, card.display, card.driver_model) == (None, None, None, None)
    assert driver.version is None


@given(st.text(max_size=12))
def test_only_a_capability_is_parsed_as_one(text):
    found = parse_capability(text)
    assert found is None or (found.split(".")[0].isdigit() and float(found) < 100)


def test_names_become_rows_of_the_profiles():
    assert RTX_3060.hardware_class == "nvidia-geforce-rtx-3060-sm86"
    assert slug("Intel(R) Core(TM) i7 ") == "intel-r-core-tm-i7"


# --- memory -----------------------------------------


@pytest.mark.parametrize(("used", "budget"), [(17, 6.5), (22, 1.5), (24, 0)])
def test_under_wddm_the_pin_budget_shrinks_as_the_card_fills(used, budget):
    card = replace(RTX_3060, total=24 * GIB, used=used * GIB)
    assert card.pin_budget(HostMemory(64 * GIB, 50 * GIB)) == budget * GIB


def test_under_tcc_and_on_linux_the_ram_is_the_pin_budget():
    assert A4000_TCC.pin_budget(HostMemory(32 * GIB, 20 * GIB)) == 19 * GIB
    assert RTX_3060.pin_budget(HostMemory(8 * GIB, 8 * GIB)) == 4 * GIB, "WDDM: half of the RAM at most"


def test_a_display_card_leaves_the_desktop_its_memory():
    assert RTX_3060.desktop_bytes == GIB
    assert A4000_TCC.desktop_bytes == 0


def test_windows_counts_the_commit_limit_and_not_the_free_ram_alone():
    memory = Windows(Kernel32()).memory()
    assert memory == HostMemory(16 * GIB, 3 * GIB, 18 * GIB, 2 * GIB)
    assert memory.usable == 2 * GIB


def test_a_page_file_too_small_is_refused_with_the_place_where_it_is_set():
    with pytest.raises(EngineError) as refused:
        Windows(Kernel32()).commit(5 * GIB // 2)
    assert "2.5 GiB" in refused.value.message and "2 GiB" in refused.value.message
    assert "page file" in refused.value.fix


def test_what_was_committed_is_really_there(monkeypatch):
    import psutil

    before = psutil.Process().memory_info().rss
    held = this_platform().commit(256 * MIB)
    assert psutil.Process().memory_info().rss - before > 200 * MIB
    assert held[:3] == b"\0\0\0" and len(held) == 256 * MIB


def test_a_containers_limit_and_a_forbidden_overcommit_count(tmp_path):
    for name, text in {
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(3 * GIB),
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
        "proc/sys/vm/overcommit_memory": "2",
        "proc/meminfo": "MemTotal: 1 kB\nCommitLimit: 2097152 kB\nCommitted_AS: 1048576 kB\n",
        "proc/cpuinfo": "processor: 0\nmodel name\t: AMD EPYC 9B14\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    memory = Linux(str(tmp_path)).memory()
    assert memory == HostMemory(4 * GIB, 2 * GIB, 2 * GIB, 1 * GIB)
    assert Linux(str(tmp_path)).cpu().name == "AMD EPYC 9B14"
    with pytest.raises(EngineError, match=r"wslconfig"):
        WSL2(str(tmp_path)).commit(3 * GIB)


# --- the rest of Windows ----------------------------


def test_each_system_gets_its_own_probes():
    assert type(this_platform("Windows", "11")) is Windows
    assert type(this_platform("Linux", "5.15.167.4-microsoft-standard-WSL2")) is WSL2
    assert type(this_platform("Linux", "6.8.0")) is Linux
    assert this_platform("Darwin", "24").name == "darwin"


def test_wsl2_follows_wddm_though_nvml_cannot_say_so():
    assert [card.driver_model for card in WSL2().cards((A4000_TCC,))] == ["WDDM"]


def test_windows_facts_without_symlinks_registry_or_windll(monkeypatch):
    """What a locked-down PC leaves: each probe that fails is unknown, and the look goes on."""
    import os

    def refuse(*_, **__):
        raise OSError("A required privilege is not held by the client")

    monkeypatch.setattr(os, "symlink", refuse)
    registry = SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=refuse)
    facts = gather(Windows(Kernel32(), registry), import_torch=False, nvml=nvml())
    assert (facts.system, facts.symlinks, facts.console.code_page) == ("windows", False, 936)
    assert facts.gpu == RTX_3060 and facts.memory.commit_free == 2 * GIB
    bare = gather(Windows(), import_torch=False, nvml=nvml())  # no windll here at all
    assert bare.memory is None and bare.console.encoding is None


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
        [sys.executable, "-c", f"{_LEASH}\n{code}"],
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


_LEASH = "import threading\nfrom gates.leash import _watch\nthreading.Thread(target=_watch, daemon=True).start()"


# --- what an engine makes of a card -----------------


@pytest.mark.parametrize(
    ("card", "free", "usable"),
    [(RTX_3060, 11 * GIB, int(9.9 * GIB)), (RTX_3060, 6 * GIB, 5 * GIB), (A4000_TCC, 6 * GIB, int(5.4 * GIB))],
    ids=["a tenth is more than the desktop's", "the desktop's GiB is more", "no desktop"],
)
def test_an_engine_leaves_the_desktop_its_memory_and_pins_within_the_budget(monkeypatch, card, free, usable):
    import torch

    from engine import device

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, card.total))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card.name)
    other = replace(card, name="another card", display=False, driver_model="TCC")
    now = replace(card, used=card.total - free)
    monkeypatch.setattr(device, "gather", lambda platform, import_torch: SimpleNamespace(gpus=(other, now)))
    roomy = Windows(Kernel32())
    monkeypatch.setattr(Kernel32, "free", 12 * GIB)
    monkeypatch.setattr(Kernel32, "left", 10 * GIB)
    memory = device.free_memory(torch.device("cuda"), roomy, 0)
    assert memory.device == usable and memory.ram == 10 * GIB, "the commit limit, not the free RAM"
    held, unused = 4 * GIB, GIB // 2  # by the model's weights; by torch, which has no use for it
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - held - unused, card.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held + unused)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    assert device.free_memory(torch.device("cuda"), roomy, held).device == usable, "weights are in the plan: not twice"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, card.total))
    budget = device.pin_budget(torch.device("cuda"), roomy)
    assert budget == (min(free - GIB // 2, 8 * GIB) if card.driver_model == "WDDM" else 11 * GIB)


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


@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_what_was_freed_goes_back_to_the_system():
    def resident() -> int:
        return psutil.Process().memory_info().rss

    small = [bytearray(64 * KIB) for _ in range(1600)]  # below what malloc maps by itself
    last = small.pop()  # lies above the others, which malloc therefore keeps
    del small
    before = resident()
    this_platform().trim()
    assert before - resident() > 50 * MIB and len(last) == 64 * KIB
