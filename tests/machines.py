"""Recorded facts of machines that the tests don't run on, and stand-ins for what answers there."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from engine.platform import Console, Cpu, Driver, Facts, Gpu, HostMemory, Package, TorchBuild
from engine.units import GIB

RTX_3060 = Gpu(
    name="NVIDIA GeForce RTX 3060",
    capability="8.6",
    multiprocessors=28,
    total=12 * GIB,
    used=1 * GIB,
    driver_model="WDDM",
    display=True,
    pcie_generation=4,
    pcie_width=16,
)
A4000_TCC = replace(
    RTX_3060, name="NVIDIA RTX A4000", multiprocessors=48, total=16 * GIB, driver_model="TCC", display=False
)
H200 = Gpu("NVIDIA H200", capability="9.0", multiprocessors=132, total=141 * GIB, used=0, display=False)


def windows_pc(**changes: Any) -> Facts:
    """A gamer's PC: 32 GiB of RAM, an RTX 3060 under WDDM, everything installed."""
    facts = Facts(
        system="windows",
        release="11",
        python="3.12.4",
        executable=r"C:\Users\Ann\kvring\Scripts\python.exe",
        home=r"C:\Users\Ann",
        cpu=Cpu("AMD Ryzen 5 5600X 6-Core Processor", 12),
        memory=HostMemory(32 * GIB, 24 * GIB, 40 * GIB, 30 * GIB),
        gpus=(RTX_3060,),
        driver=Driver("576.52", "12.9"),
        torch=TorchBuild("2.8.0+cu128", "12.8", True, None),
        triton=Package("triton-windows", "3.4.0.post20"),
        console=Console("utf-8", 65001),
        disk_free=200 * GIB,
        symlinks=False,
    )
    return replace(facts, **changes)


def linux_server(**changes: Any) -> Facts:
    """One H200, as rented."""
    facts = Facts(
        system="linux",
        release="6.8.0",
        python="3.11.7",
        executable="/opt/venv/bin/python",
        home="/root",
        cpu=Cpu("Intel(R) Xeon(R) Platinum 8468", 16),
        memory=HostMemory(128 * GIB, 120 * GIB),
        gpus=(H200,),
        driver=Driver("580.65.06", "13.0"),
        torch=TorchBuild("2.11.0+cu128", "12.8", True, "3.6.0"),
        triton=Package("triton", "3.6.0"),
        console=Console("utf-8"),
        disk_free=50 * GIB,
        symlinks=True,
    )
    return replace(facts, **changes)


def laptop(**changes: Any) -> Facts:
    """No card at all."""
    return replace(
        linux_server(),
        **{"gpus": (), "driver": Driver(trouble="no NVIDIA driver answers here"), "triton": None}
        | {"torch": TorchBuild("2.13.0+cpu"), "memory": HostMemory(16 * GIB, 12 * GIB), **changes},
    )


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
