"""Where the systems differ: memory and its commit limit, the CPU's name, links, the console, ending a process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import subprocess
import sys
import tempfile
from math import ceil
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.platform import groups
from engine.platform.facts import Console, Cpu, Gpu, HostMemory
from engine.units import KIB, format_bytes

_TOUCH = 4 * KIB  # a page of every system here, or a part of one


class Platform:
    """What every system can say. A subclass overrides what is its own."""

    name = "other"

    def memory(self) -> HostMemory:
        import psutil

        memory = psutil.virtual_memory()
        return HostMemory(memory.total, memory.available)

    def cpu(self) -> Cpu:
        name, kind = self._cpu()
        return Cpu(name or platform.machine(), self.processors(), self.quota(), kind)

    def processors(self) -> int:
        """Processors that this process can keep busy. More threads than its quota pays for would all be stopped in the
        middle of their work, and each waits for the others."""
        quota = self.quota()
        return self._allowed() if quota is None else max(1, ceil(quota))

    def quota(self) -> float | None:
        """Processors' worth of time that it may use, where that is less than those that it may run on; else None."""
        return None

    def console(self) -> Console:
        return Console(getattr(sys.stdout, "encoding", None))

    def cards(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        """What NVML said of the cards, with what only the system knows."""
        return gpus

    def can_symlink(self, folder: str | None = None) -> bool:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            try:
                os.symlink("nowhere", os.path.join(scratch, "link"))
            except (OSError, NotImplementedError, AttributeError):
                return False
        return True

    def commit(self, size: int) -> mmap.mmap:
        """`size` bytes of zeros that are really there, or an EngineError now instead of a crash later."""
        limit = self.memory().usable
        if size > limit:
            raise EngineError(
                f"{format_bytes(size)} of host memory can't be committed: {format_bytes(limit)} can be "
                f"({self._limited_by()})",
                "lower --max-context, free memory, or " + self._more_memory(),
            )
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{format_bytes(size)} of host memory can't be reserved: {error}",
                "lower --max-context, or " + self._more_memory(),
            ) from error
        self._touch(memory, size)
        return memory

    def trim(self) -> None:
        """Give the system back what this process has freed, where its allocator would keep it."""

    def ask_to_stop(self, process: subprocess.Popen[Any]) -> None:
        """Ask a child that `gates.leash` holds to end itself."""
        process.terminate()

    def _allowed(self) -> int:
        """Processors that this process may run on."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def _cpu(self) -> tuple[str, str]:
        """Its name, and its kind where that is known."""
        return platform.processor(), ""

    def _touch(self, memory: mmap.mmap, size: int) -> None:
        import numpy as np

        np.frombuffer(memory, dtype=np.uint8)[::_TOUCH] = 0

    def _limited_by(self) -> str:
        return "free RAM"

    def _more_memory(self) -> str:
        return "add RAM"


class Other(Platform):
    """A system that nobody tested."""

    def __init__(self, name: str) -> None:
        self.name = name


class Linux(Platform):
    """`root` stands for / in tests."""

    name = "linux"

    def __init__(self, root: str = "/") -> None:
        self.root = Path(root)

    def memory(self) -> HostMemory:
        """A container's or service's own limit counts; a commit limit exists only where overcommitting is forbidden."""
        import psutil

        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
        for limit, left in groups.limits(self._read):
            total, free = min(total, limit), min(free, left)
        if self._read("proc/sys/vm/overcommit_memory") != "2":
            return HostMemory(total, free)
        table = dict(line.split(":", 1) for line in self._read("proc/meminfo").splitlines() if ":" in line)
        sizes = {name: int(table[name].split()[0]) * KIB for name in ("CommitLimit", "Committed_AS") if name in table}
        if len(sizes) < 2:
            return HostMemory(total, free)
        return HostMemory(total, free, sizes["CommitLimit"], max(0, sizes["CommitLimit"] - sizes["Committed_AS"]))

    def quota(self) -> float | None:
        least = min(groups.quotas(self._read), default=None)
        return None if least is None or least >= self._allowed() else least

    def trim(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)

    def _cpu(self) -> tuple[str, str]:
        first = self._read("proc/cpuinfo").partition("\n\n")[0]
        of = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
        kind = f"family {of['cpu family']} model {of['model']}" if {"cpu family", "model"} <= of.keys() else ""
        return of.get("model name") or platform.processor(), kind

    def _read(self, path: str) -> str:
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


class WSL2(Linux):
    """Linux over Windows' driver: WDDM's rules for pinned memory, and half of the RAM unless .wslconfig says more."""

    name = "wsl2"

    def cards(self, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        from dataclasses import replace

        return tuple(replace(gpu, driver_model="WDDM") for gpu in gpus)

    def _limited_by(self) -> str:
        return "what .wslconfig gives WSL2"

    def _more_memory(self) -> str:
        return "raise memory= in %UserProfile%\\.wslconfig and run wsl --shutdown"


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX; PageFile means the commit limit there."""

    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


class Windows(Platform):
    """`kernel32` and `registry` (winreg) are Windows' own, or stand-ins in tests."""

    name = "windows"

    def __init__(self, kernel32: Any = None, registry: Any = None) -> None:
        self._kernel32 = kernel32
        self._registry = registry

    @property
    def kernel32(self) -> Any:
        return self._kernel32 or ctypes.windll.kernel32  # type: ignore[attr-defined]

    def memory(self) -> HostMemory:
        status = _MemoryStatus()
        status.dwLength = ctypes.sizeof(status)
        if not self.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return super().memory()
        return HostMemory(status.ullTotalPhys, status.ullAvailPhys, status.ullTotalPageFile, status.ullAvailPageFile)

    def console(self) -> Console:
        page = self.kernel32.GetConsoleOutputCP()
        return Console(getattr(sys.stdout, "encoding", None), page or None)

    def ask_to_stop(self, process: subprocess.Popen[Any]) -> None:
        """terminate() kills at once here; closing the leash's pipe lets the child end itself."""
        if process.stdin is None:
            process.terminate()
        else:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _cpu(self) -> tuple[str, str]:
        key = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        try:
            if self._registry is None:
                import winreg

                self._registry = winreg
            registry = self._registry
            with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, key) as opened:
                name, identifier = (self._said(opened, value) for value in ("ProcessorNameString", "Identifier"))
        except (ImportError, OSError):
            return platform.processor(), ""
        kind = re.search(r"Family \w+ Model \w+", identifier)
        return name or platform.processor(), kind[0].lower() if kind else ""

    def _said(self, key: Any, value: str) -> str:
        try:
            return str(self._registry.QueryValueEx(key, value)[0]).strip()
        except OSError:
            return ""

    def _limited_by(self) -> str:
        return "free RAM, or the commit limit: RAM plus page file"

    def _more_memory(self) -> str:
        return "enlarge the page file (System > About > Advanced system settings > Performance > Virtual memory)"


def this_platform(system: str | None = None, release: str | None = None) -> Platform:
    """The platform that Python says this is, or the one named."""
    system, release = system or platform.system(), release or platform.release()
    if system == "Windows":
        return Windows()
    if system == "Linux":
        return WSL2() if "microsoft" in release.lower() else Linux()
    return Other(system.lower())
