"""One look at the machine. A probe that fails leaves None; it never ends the look."""

from __future__ import annotations

import os
import platform as python_platform
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from engine.files import cache_folder
from engine.platform.facts import Console, Cpu, Driver, Facts, Package, TorchBuild
from engine.platform.nvidia import read_cards, run_quietly
from engine.platform.systems import Platform, this_platform

T = TypeVar("T")
TRITON = ("triton", "triton-windows", "pytorch-triton")


def gather(platform: Platform | None = None, *, import_torch: bool = True, nvml: Any = ...) -> Facts:
    """`import_torch` False is quick and leaves out what only torch knows (its CUDA, whether it sees the card)."""
    platform = platform or this_platform()
    cache = _try(cache_folder)
    gpus, driver = _try(lambda: read_cards(_nvml() if nvml is ... else nvml, run_quietly)) or ((), Driver())
    return Facts(
        system=platform.name,
        release=python_platform.release(),
        python=python_platform.python_version(),
        executable=sys.executable,
        home=os.path.expanduser("~"),
        cpu=_try(platform.cpu) or Cpu("", os.cpu_count() or 1),
        memory=_try(platform.memory),
        gpus=platform.cards(gpus),
        driver=driver,
        torch=_torch(import_torch),
        triton=next(filter(None, map(package, TRITON)), None),
        console=_try(platform.console) or Console(),
        cache=str(cache or ""),
        disk_free=_try(lambda: shutil.disk_usage(_nearest(cache)).free) if cache else None,
        symlinks=_try(platform.can_symlink),
    )


def _nearest(folder: Path) -> Path:
    """`folder`, or the closest one around it that is there already."""
    return next(one for one in (folder, *folder.parents) if one.exists())


def package(name: str) -> Package | None:
    """An installed distribution, or None."""
    try:
        return Package(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _try(probe: Callable[[], T]) -> T | None:
    try:
        return probe()
    except Exception:
        return None


def _nvml() -> Any | None:
    try:
        import pynvml
    except Exception:  # a foreign module of that name, or a broken install
        return None
    return pynvml


def _torch(imported: bool) -> TorchBuild:
    found = package("torch")
    if found is None:
        return TorchBuild(trouble="torch is not installed")
    wants = _triton_of_torch()
    if not imported:
        return TorchBuild(found.version, wants=wants)
    try:
        import torch

        return TorchBuild(torch.__version__, torch.version.cuda, torch.cuda.is_available(), wants)
    except Exception as error:  # a missing DLL, an old CPU
        return TorchBuild(found.version, wants=wants, trouble=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _triton_of_torch() -> str | None:
    """The triton that this torch names in its own requirements."""
    for line in metadata.requires("torch") or ():
        match = re.match(r"triton\s*\(?==\s*([\d.]+)", line)
        if match:
            return match.group(1)
    return None
