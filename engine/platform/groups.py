"""The memory that Linux's control groups leave this process: a container's limit, or a service's, of either version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Version 2 and version 1, by their folder: the limit, what the group is charged with, what of that can be dropped."""


def limits(read: Callable[[str], str]) -> Iterator[tuple[int, int]]:
    """The limit of each group that this process is in, and what is left of it, in bytes.

    read: the text of a file below /, "" where there is none. A container sees its own group as the root of all.
    """
    groups: dict[str, str] = {}
    for line in read("proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    for controller, (most, charged, dropped) in _FILES.items():
        own = PurePosixPath(groups.get(controller, "/"))
        for group in (own, *own.parents):
            folder = f"sys/fs/cgroup/{controller}{group}"
            limit, used, stat = (read(f"{folder}/{name}") for name in (most, charged, "memory.stat"))
            if limit.isdecimal():
                cache = next((line for line in stat.splitlines() if line.startswith(f"{dropped} ")), "")
                held = max(0, _bytes(used) - _bytes(cache.removeprefix(dropped)))
                yield int(limit), max(0, int(limit) - held)


def _bytes(text: str) -> int:
    """A count in a file; 0 where it says something else."""
    return int(text) if text.strip().isdecimal() else 0
