"""Facts of one machine at one moment, frozen: what is not known is None, never a guess. Sizes are bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from engine.units import GIB

WDDM_SLACK = GIB // 2
"""Of a WDDM card's address space, what pinned memory can't have: 24 GiB with 17 in use pinned 6.5, with 22 1.5."""
DESKTOP = GIB
"""Device memory that stays with a card's display: Windows doesn't refuse an over-full card, it turns slow."""
_CAPABILITY = re.compile(r"\d{1,2}\.\d")


def parse_capability(text: str | None) -> str | None:
    """`8.9` if that is what the text is. An error text is not a compute capability."""
    text = (text or "").strip()
    return text if _CAPABILITY.fullmatch(text) else None


def slug(name: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200`: lower case, runs of anything but letters and digits become one dash."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA card."""

    name: str
    index: int = 0
    capability: str | None = None  # like 8.9
    multiprocessors: int | None = None
    total: int | None = None
    used: int | None = None
    driver_model: str | None = None  # WDDM | TCC | MCDM on Windows, WDDM under WSL2, None elsewhere
    display: bool | None = None  # a screen is attached
    pcie_generation: int | None = None
    pcie_width: int | None = None

    @property
    def free(self) -> int | None:
        return None if self.total is None or self.used is None else max(0, self.total - self.used)

    @property
    def hardware_class(self) -> str | None:
        """`nvidia-h200-sm90`, the name of a row of the device profiles."""
        return f"{slug(self.name)}-sm{self.capability.replace('.', '')}" if self.capability else None

    @property
    def desktop_bytes(self) -> int:
        """What is left alone of the free memory because a desktop lives there."""
        return DESKTOP if self.display or self.driver_model == "WDDM" else 0

    def pin_budget(self, memory: HostMemory) -> int | None:
        """Bytes that can be pinned for this card, by what is known before trying; None where nothing is.

        Under WDDM pinned memory is charged to the card's address space and to half of the RAM, so it shrinks as
        the card fills. Elsewhere the RAM is the limit.
        """
        if memory.free is None:
            return None
        room = max(0, memory.free - GIB)
        if self.driver_model != "WDDM":
            return room
        if self.free is None:
            return None
        return max(0, min(room, memory.total // 2, self.free - WDDM_SLACK))


@dataclass(frozen=True)
class HostMemory:
    """RAM, and what the system lets processes commit: on Windows that ends at RAM plus page file."""

    total: int
    free: int
    commit_limit: int | None = None
    commit_free: int | None = None

    @property
    def usable(self) -> int:
        """What a process can commit and keep in RAM."""
        return self.free if self.commit_free is None else min(self.free, self.commit_free)


@dataclass(frozen=True)
class Cpu:
    """`processors`: how many this process may use; `quota`: their time that a container or service leaves it, where
    that is less than the processors it may run on. `kind`: its family and model, which tell processors apart that a
    virtual machine gives one name ("AMD EPYC")."""

    name: str
    processors: int
    quota: float | None = None
    kind: str = ""

    @property
    def hardware_class(self) -> str:
        """`amd-epyc-family-25-model-1-cpu`, the name of a row of the device profiles."""
        return f"{slug(f'{self.name} {self.kind}') or 'unknown'}-cpu"


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver; `trouble` is why the cards, or all of it, could not be read."""

    version: str | None = None
    cuda: str | None = None  # newest CUDA that it runs, like 12.8
    trouble: str | None = None


@dataclass(frozen=True)
class Package:
    """An installed distribution."""

    name: str
    version: str


@dataclass(frozen=True)
class TorchBuild:
    """`cuda` None: built for the CPU. `sees_card`: torch.cuda finds one. `wants`: the triton that it was built with."""

    version: str | None = None
    cuda: str | None = None
    sees_card: bool = False
    wants: str | None = None
    trouble: str | None = None


@dataclass(frozen=True)
class Console:
    """What stdout can say; `code_page` is Windows' own number."""

    encoding: str | None = None
    code_page: int | None = None


@dataclass(frozen=True)
class Facts:
    """All of it."""

    system: str  # linux | windows | wsl2 | another name
    release: str
    python: str
    executable: str
    home: str
    cpu: Cpu
    memory: HostMemory | None
    gpus: tuple[Gpu, ...] = ()
    driver: Driver = field(default_factory=Driver)
    torch: TorchBuild = field(default_factory=TorchBuild)
    triton: Package | None = None
    console: Console = field(default_factory=Console)
    cache: str = ""  # the user's folder for models, profiles and kernels; empty: it has none
    disk_free: int | None = None  # there
    symlinks: bool | None = None

    @property
    def gpu(self) -> Gpu | None:
        """The card that `--device auto` takes."""
        return self.gpus[0] if self.gpus else None
