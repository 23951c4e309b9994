"""The risk: memory, or processors, are counted on that the machine, its desktop or a container's limit don't leave."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from platform import libc_ver
from types import SimpleNamespace

import psutil
import pytest

from engine.errors import EngineError
from engine.platform import WSL2, Linux, Windows, this_platform
from engine.platform.facts import HostMemory
from engine.units import GIB, KIB, MIB
from kvring_cli.doctor import hardware
from tests.machines import A4000_TCC, RTX_3060, Kernel32, laptop


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


def test_what_was_committed_is_really_there():
    before = psutil.Process().memory_info().rss
    held = this_platform().commit(256 * MIB)
    assert psutil.Process().memory_info().rss - before > 200 * MIB
    assert held[:3] == b"\0\0\0" and len(held) == 256 * MIB


def machine(root: Path, files: dict[str, object]) -> str:
    """A folder that stands for /."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return str(root)


def group(folder: str, limit: object, used: int, cache: int) -> dict[str, object]:
    """A control group of version 1 or 2, by its folder."""
    if folder.startswith("memory"):
        # As read on a machine of version 1: what the groups below use is in the totals alone.
        most, charged, stat = "memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 0\ntotal_inactive_file"
    else:
        most, charged, stat = "memory.max", "memory.current", "anon 1\ninactive_file"
    files = {most: limit, charged: used, "memory.stat": f"{stat} {cache}"}
    return {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()}


def test_a_containers_limit_and_a_forbidden_overcommit_count(tmp_path):
    files = group("", 4 * GIB, 3 * GIB, GIB) | {
        "proc/sys/vm/overcommit_memory": "2",
        "proc/meminfo": "MemTotal: 1 kB\nCommitLimit: 2097152 kB\nCommitted_AS: 1048576 kB",
        "proc/cpuinfo": "processor: 0\nmodel name\t: AMD EPYC 9B14",
    }
    root = machine(tmp_path, files)
    assert Linux(root).memory() == HostMemory(4 * GIB, 2 * GIB, 2 * GIB, 1 * GIB)
    assert Linux(root).cpu().name == "AMD EPYC 9B14"
    with pytest.raises(EngineError, match=r"wslconfig"):
        WSL2(root).commit(3 * GIB)


UNLIMITED = {"memory": 9223372036854771712, "": "max"}
HYBRID = "9:name=systemd:/a\n4:memory:{}\n2:cpuacct:/\n0::/a"


@pytest.mark.parametrize(
    ("within", "version", "groups"),
    [
        (None, "memory", {"": (4, 3, 1)}),
        (HYBRID.format("/docker/0a1b"), "memory", {"": (4, 3, 1)}),  # whose group is the container's root
        (HYBRID.format("/jobs/7"), "memory", {"/jobs/7": (4, 3, 1), "/jobs": (6, 3, 0), "": (None, 9, 5)}),
        (HYBRID.format("/jobs/7"), "memory", {"/jobs/7": (None, 1, 0), "/jobs": (4, 3, 1)}),
        ("4:cpu,memory:/jobs/7\nno group at all", "memory", {"/jobs/7": (4, 3, 1)}),
        ("0::/system.slice/kvring.service", "", {"/system.slice/kvring.service": (4, 3, 1)}),
        ("0::/user.slice/a", "", {"/user.slice/a": (5, 1, 0), "/user.slice": (4, 2, 0), "/other": (1, 1, 0)}),
    ],
)
def test_the_limit_of_every_control_group_around_counts(tmp_path, within, version, groups, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    files = {} if within is None else {"proc/self/cgroup": within}
    for folder, (limit, used, cache) in groups.items():
        most = UNLIMITED[version] if limit is None else limit * GIB
        files |= group(version + folder, most, used * GIB, cache * GIB)
    assert Linux(machine(tmp_path, files)).memory() == HostMemory(4 * GIB, 2 * GIB)


@pytest.mark.parametrize(
    ("used", "cache", "left"),
    [("max", "1", 4), ("", "", 4), (3 * GIB, "x", 1), (3 * GIB, 5 * GIB, 4), (9 * GIB, 0, 0)],
    ids=["no count", "empty files", "no cache that is a count", "more cache than use", "more use than the limit"],
)
def test_odd_counts_of_a_group_end_nothing_and_give_no_more_than_its_limit(tmp_path, used, cache, left, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    assert Linux(machine(tmp_path, group("", 4 * GIB, used, cache))).memory() == HostMemory(4 * GIB, left * GIB)


@pytest.mark.parametrize("version", UNLIMITED)
def test_a_group_without_a_limit_leaves_the_machines_memory(tmp_path, version, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    root = machine(tmp_path, group(version, UNLIMITED[version], 30 * GIB, 0))
    assert Linux(root).memory() == HostMemory(64 * GIB, 60 * GIB)


@pytest.mark.parametrize(
    ("within", "files", "quota", "processors"),
    [
        ("0::/", {}, None, 16),
        ("0::/", {"cpu.max": "max 100000"}, None, 16),
        ("0::/", {"cpu.max": "200000 100000"}, 2, 2),
        ("0::/", {"cpu.max": "1600000 100000"}, None, 16),  # as much as there is
        ("0::/", {"cpu.max": "50000 100000"}, 0.5, 1),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5, 2),
        ("0::/", {"cpu.max": "200000"}, None, 16),
        ("0::/", {"cpu.max": "100000 0"}, None, 16),
        ("0::/system.slice/a.service", {"system.slice/cpu.max": "300000 100000"}, 3, 3),
        (
            "0::/pods/a",
            {"pods/a/cpu.max": "800000 100000", "pods/cpu.max": "400000 100000", "pods/b/cpu.max": "1 1000"},
            4,
            4,
        ),
        (
            "4:cpu,cpuacct:/jobs/7",
            {"cpu/jobs/7/cpu.cfs_quota_us": "-1", "cpu/jobs/7/cpu.cfs_period_us": "100000"},
            None,
            16,
        ),
        ("4:cpu,cpuacct:/docker/1", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "50000"}, 5, 5),
        (
            "4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            3,
            3,
        ),
        (
            "4:cpuacct,cpu:/a",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,
            3,
        ),
        ("4:cpu:/jobs/7", {"cpu/jobs/cpu.cfs_quota_us": "200000", "cpu/jobs/cpu.cfs_period_us": "100000"}, 2, 2),
    ],
)
def test_threads_keep_within_the_quota_of_every_group_around(tmp_path, within, files, quota, processors, monkeypatch):
    """Sixteen threads in a quota of two were stopped for most of every period."""
    import torch

    from engine import device

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    recorded = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": within}
    linux, threads = Linux(machine(tmp_path, recorded)), []
    assert (linux.quota(), linux.processors()) == (quota, processors)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    device.set_threads(None, linux)
    assert threads == [processors]
    (said,) = [found for found in hardware.check(replace(laptop(), cpu=linux.cpu()), "") if found.name == "processors"]
    assert said.detail.startswith(f"{processors} of ") and ("quota" in said.detail) == (quota is not None)
    assert quota is None or said.detail.endswith(f"quota of {quota:g}")


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
