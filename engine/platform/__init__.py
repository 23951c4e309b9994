"""What this machine is: one interface, with real probes for Linux, Windows and WSL2, and the facts they gather.

Everything that differs between the systems is asked for here and nowhere else, so that each path can be driven with
recorded facts on any machine.
"""

from engine.platform.facts import Console, Cpu, Driver, Facts, Gpu, HostMemory, Package, TorchBuild
from engine.platform.gather import gather
from engine.platform.systems import WSL2, Linux, Other, Platform, Windows, this_platform

__all__ = [
    "WSL2",
    "Console",
    "Cpu",
    "Driver",
    "Facts",
    "Gpu",
    "HostMemory",
    "Linux",
    "Other",
    "Package",
    "Platform",
    "TorchBuild",
    "Windows",
    "gather",
    "this_platform",
]
