"""What Linux's control groups leave this process: a container's limits, or a service's, of either version.

`read` gives the text of a file below /, "" where there is none. A container sees its own group as the root of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

Read = Callable[[str], str]
_MEMORY = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Version 2 and version 1, by their folder: the limit, what the group is charged with, what of that can be dropped."""
_CPU = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""Likewise: microseconds of processors' time, and the period in which they may be used; "max" or -1 is no quota."""


def limits(read: Read) -> Iterator[tuple[int, int]]:
    """The memory limit of each group that this process is in, and what is left of it, in bytes."""
    for controller, (most, charged, dropped) in _MEMORY.items():
        for folder in _around(read, controller):
            limit, used, stat = (read(f"{folder}/{name}") for name in (most, charged, "memory.stat"))
            if limit.isdecimal():
                cache = next((line for line in stat.splitlines() if line.startswith(f"{dropped} ")), "")
                held = max(0, _count(used) - _count(cache.removeprefix(dropped)))
                yield int(limit), max(0, int(limit) - held)


def quotas(read: Read) -> Iterator[float]:
    """The processors' worth of time that each group around this process may use, where it has a quota."""
    for controller, names in _CPU.items():
        for folder in _around(read, controller):
            words = " ".join(read(f"{folder}/{name}") for name in names).split()
            if len(words) == 2 and (quota := _count(words[0])) and (period := _count(words[1])):
                yield quota / period


def _around(read: Read, controller: str) -> Iterator[str]:
    """The folders of this process's group and of every one that it is in."""
    groups: dict[str, tuple[str, list[str]]] = {}
    for line in read("proc/self/cgroup").splitlines():
        joint, _, path = line.partition(":")[2].partition(":")
        controllers = joint.split(",")
        groups |= dict.fromkeys(controllers, (path, controllers))
    path, joint = groups.get(controller, ("/", [controller]))
    own = PurePosixPath(path)
    # Version 1 may mount some together, in whatever order, and not every system links their single names to that.
    for mount in {controller, ",".join(joint), ",".join(sorted(joint)), ",".join(reversed(joint))}:
        for group in (own, *own.parents):
            yield f"sys/fs/cgroup/{mount}{group}"


def _count(text: str) -> int:
    """A count in a file; 0 where it says something else."""
    return int(text) if text.strip().isdecimal() else 0
