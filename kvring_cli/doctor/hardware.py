"""The card, what pins, how fast it copies; RAM, page file and disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from engine.platform import Facts, Gpu
from engine.platform.nvidia import NO_DRIVER
from engine.units import GIB, format_bytes
from kvring_cli.cards import PCIE_LANE
from kvring_cli.doctor.judge import judge
from kvring_cli.engines import pick_engine
from kvring_cli.install import Finding

LEAST_RAM = 4 * GIB
LEAST_DISK = 2 * GIB
_SLOW = 0.5  # of the link's own rate
_FALLBACK = (
    "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy > Prefer No Sysmem Fallback; or a lower "
    "--vram-limit"
)
_WINDOWS_PAGE_FILE = (
    "System > About > Advanced system settings > Performance > Virtual memory: let Windows manage the size"
)


def attempt(facts: Facts, trials: Callable[[], Any] | None) -> Any | str:
    """The trials' results, or why there are none."""
    if not facts.gpus:
        return "there is no card"
    if trials is None:
        return "it was not tried"
    if facts.torch.cuda is None or not facts.torch.sees_card:
        return "torch does not reach the card"
    try:
        return trials()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def check(facts: Facts, tried: Any | str) -> Iterator[Finding]:
    """`tried`: as `attempt` gives it."""
    if not facts.gpus and facts.driver.trouble in (None, NO_DRIVER):
        yield Finding("card", "ok", "none")
    elif not facts.gpus:
        yield Finding("card", "unknown", "the driver does not answer", "see `driver`")
    for gpu in facts.gpus:
        yield from _card(gpu, facts)
    if facts.gpu is not None:
        yield from _tried(facts.gpu, facts, tried)
    yield _cpu(facts)
    yield from _memory(facts)
    if facts.disk_free is None:
        yield Finding("disk", "unknown", "free space can't be read", f"check {facts.cache or facts.home}")
    else:
        detail = f"{format_bytes(facts.disk_free)} free at {facts.cache or facts.home}"
        little = facts.disk_free < LEAST_DISK
        yield judge("disk", little, detail, "free some space: models and profiles lie there")


def _card(gpu: Gpu, facts: Facts) -> Iterator[Finding]:
    name = "card" if len(facts.gpus) == 1 else f"card {gpu.index}"
    if gpu.capability is None:
        detail = f"{gpu.name}: its compute capability can't be read"
        yield Finding(name, "unknown", detail, "NINFER_AGENT_CC=8.6 says it by hand")
    else:
        processors = f", {gpu.multiprocessors} SMs" if gpu.multiprocessors else ""
        detail = f"{gpu.name}, compute capability {gpu.capability}{processors}"
        choice = pick_engine(replace(facts, gpus=(gpu,)), {})
        if choice.outcome == "unsupported":
            yield Finding(name, "fail", f"{detail}: {choice.reason}", choice.fix)
        else:
            yield Finding(name, "ok", detail)
    if gpu.free is None:
        yield Finding("device memory", "unknown", "the driver does not say", "nvidia-smi shows it")
    else:
        detail = f"{format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
        if gpu.desktop_bytes:
            detail += f", {format_bytes(gpu.desktop_bytes)} of it left to the desktop"
        full = gpu.free - gpu.desktop_bytes < gpu.total // 4
        yield judge("device memory", full, detail, "close what uses the card (nvidia-smi lists it)")
    if gpu.driver_model == "WDDM":
        detail = "WDDM: pinned memory counts against the card's address space and shrinks as it fills"
        yield Finding("driver model", "ok", detail)
    elif facts.system == "windows" and gpu.driver_model is None:
        yield Finding("driver model", "unknown", "WDDM or TCC: not said", "nvidia-smi -q shows it")
    elif facts.system == "windows":
        yield Finding("driver model", "ok", gpu.driver_model or "")
    if gpu.pcie_generation and gpu.pcie_width:
        detail = f"generation {gpu.pcie_generation}, {gpu.pcie_width} lanes"
        yield judge("pcie", gpu.pcie_width < 8, detail, "move the card to the x16 slot")
    else:
        yield Finding("pcie", "unknown", "generation and width are not said", "nvidia-smi -q shows them")


def _tried(gpu: Gpu, facts: Facts, tried: Any | str) -> Iterator[Finding]:
    budget = gpu.pin_budget(facts.memory) if facts.memory else None
    rule = f"budget by rule: {'unknown' if budget is None else format_bytes(budget)}"
    if isinstance(tried, str):
        fix = "kvring doctor again, once torch reaches the card"
        yield Finding("pinned memory", "unknown", f"{tried}; {rule}", fix)
        yield Finding("bandwidth", "unknown", tried, fix)
        if gpu.driver_model == "WDDM":
            yield Finding("sysmem fallback", "unknown", tried, _FALLBACK)
        return
    fix = "close what uses the card; NINFER_HOST_PAGEABLE=1 does without, slower"
    yield judge("pinned memory", tried.pinned < GIB, f"{format_bytes(tried.pinned)} could be pinned; {rule}", fix)
    link = PCIE_LANE.get(gpu.pcie_generation or 0, 0) * (gpu.pcie_width or 0) * 1e9
    detail = f"{tried.to_device / 1e9:.1f} GB/s to the card, {tried.to_host / 1e9:.1f} back"
    detail += f" of {link / 1e9:.1f}" if link else ""
    slow = min(tried.to_device, tried.to_host) < _SLOW * link
    yield judge("bandwidth", slow, detail, "check slot, riser and BIOS: the link runs below its width")
    if tried.spills:
        detail = "the driver gives RAM when the card is full: no error, but slow"
        yield Finding("sysmem fallback", "warn", detail, _FALLBACK)
    elif gpu.driver_model == "WDDM":
        yield Finding("sysmem fallback", "ok", "off: a full card says so")


def _cpu(facts: Facts) -> Finding:
    cpu = facts.cpu
    quota = "" if cpu.quota is None else f": this container or service has a quota of {cpu.quota:g}"
    return Finding("processors", "ok", f"{cpu.processors} of {cpu.name or 'an unknown processor'} to use{quota}")


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory is None:
        for name in ("ram", "page file"):
            yield Finding(name, "unknown", "the system does not say", "the Task Manager or `free -h` shows it")
        return
    detail = f"{format_bytes(memory.free)} of {format_bytes(memory.total)} free"
    fix = "close other programs, or a smaller --max-context: the host store holds every page"
    yield judge("ram", memory.free < LEAST_RAM, detail, fix)
    if memory.commit_limit is None or memory.commit_free is None:
        yield Finding("page file", "ok", "this system has no commit limit")
        return
    detail = f"{format_bytes(memory.commit_free)} of {format_bytes(memory.commit_limit)} can still be committed"
    short = memory.commit_free < memory.free
    if short:
        detail += f", less than the {format_bytes(memory.free)} of RAM that is free"
    windows = facts.system == "windows"
    yield judge("page file", short, detail, _WINDOWS_PAGE_FILE if windows else "sysctl vm.overcommit_memory=0, or swap")
