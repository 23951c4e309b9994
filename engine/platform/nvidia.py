"""The cards, from NVML, else from nvidia-smi's table. Each value is checked for being one: both print errors."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from engine.platform.facts import Driver, Gpu, parse_capability
from engine.units import MIB

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
Read = tuple[tuple[Gpu, ...], Driver]
NO_DRIVER = "no NVIDIA driver answers here"

_CORES_PER_SM = {"6.0": 64, "7.0": 64, "7.5": 64, "8.0": 64}  # 128 in every later one
_FIELDS = (
    "index",
    "name",
    "compute_cap",
    "memory.total",
    "memory.used",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "display_active",
    "driver_model.current",
    "driver_version",
)
_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}


def run_quietly(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """OSError where there is no such program; a hung driver ends in TimeoutExpired."""
    if shutil.which(command[0]) is None:  # to start it says "permission denied" where a folder of PATH is shut
        raise FileNotFoundError(command[0])
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)


def read_cards(nvml: Any | None, run: Run = run_quietly, smi: str = "nvidia-smi") -> Read:
    """Cards and driver. `nvml`: the module pynvml, or None where it isn't installed."""
    trouble = "nvidia-ml-py is not installed"
    if nvml is not None:
        try:
            return _from_nvml(nvml)
        except nvml.NVMLError as error:
            trouble = str(error)
    try:
        return _from_smi(run, smi)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        absent = missing and ("not found" in trouble.lower() or nvml is None)
        said = "nvidia-smi is not there" if missing else f"nvidia-smi: {' '.join(str(error).split())[:200]}"
        return (), Driver(trouble=NO_DRIVER if absent else f"{trouble}; {said}")


def _from_nvml(nvml: Any) -> Read:
    nvml.nvmlInit()
    try:
        cuda = _attempt(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        driver = Driver(
            version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
        return tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())), driver
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *more: Any) -> Any:
        function = getattr(nvml, name, None)
        return _attempt(nvml, function, handle, *more) if function else None

    pair, memory = ask("nvmlDeviceGetCudaComputeCapability"), ask("nvmlDeviceGetMemoryInfo")
    capability = parse_capability(f"{pair[0]}.{pair[1]}") if pair else None
    cores, model = ask("nvmlDeviceGetNumGpuCores"), ask("nvmlDeviceGetCurrentDriverModel")
    active = ask("nvmlDeviceGetDisplayActive")
    return Gpu(
        name=_text(ask("nvmlDeviceGetName") or "NVIDIA card"),
        index=index,
        capability=capability,
        multiprocessors=cores // _CORES_PER_SM.get(capability, 128) if cores and capability else None,
        total=memory.total if memory else None,
        used=memory.used if memory else None,
        driver_model=_MODELS.get(model) if isinstance(model, int) else None,
        display=None if active is None else bool(active),
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _attempt(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """None where this driver or card doesn't answer that."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _from_smi(run: Run, smi: str) -> Read:
    done = run([smi, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    if done.returncode:
        raise ValueError((done.stdout or done.stderr or f"exit {done.returncode}").strip())
    rows = [dict(zip(_FIELDS, map(str.strip, line.split(",")), strict=False)) for line in done.stdout.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS) and row["index"].isdigit()]
    if not rows:
        raise ValueError(done.stdout.strip() or "it printed nothing")
    version = rows[0]["driver_version"]
    return tuple(_row(row) for row in rows), Driver(version if re.fullmatch(r"[\d.]+", version) else None)


def _row(row: dict[str, str]) -> Gpu:
    def number(name: str) -> int | None:
        return int(row[name]) if row[name].isdigit() else None

    total, used = number("memory.total"), number("memory.used")
    display = {"Enabled": True, "Disabled": False}.get(row["display_active"])
    model = row["driver_model.current"]
    return Gpu(
        name=row["name"],
        index=int(row["index"]),
        capability=parse_capability(row["compute_cap"]),
        total=None if total is None else total * MIB,
        used=None if used is None else used * MIB,
        driver_model=model if model in _MODELS.values() else None,
        display=display,
        pcie_generation=number("pcie.link.gen.max"),
        pcie_width=number("pcie.link.width.max"),
    )
