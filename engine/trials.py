"""What only trying tells of a card: how much memory pins, how fast copies are, and whether it spills into RAM."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from engine.kv.pinning import CudaRegistrar, most_that_pins
from engine.units import GIB, MIB

PIN_LIMIT = 16 * GIB
APART = (sys.executable, "-m", "engine.trials")
WITHIN = 120
"""Seconds for the trials of a card, torch's import among them."""
_ROUNDS = 5


@dataclass(frozen=True)
class Trials:
    """Results in bytes and bytes a second. `spills`: an allocation larger than the free memory succeeded."""

    pinned: int
    to_device: float
    to_host: float
    spills: bool


def try_card(device: torch.device, limit: int) -> Trials:
    """`limit`: bytes beyond which nothing is pinned. Raises RuntimeError where the card doesn't work at all."""
    down, up = copy_rates(device, 256 * MIB)
    torch.cuda.empty_cache()
    return Trials(most_that_pins(CudaRegistrar(device), min(limit, PIN_LIMIT)), down, up, _spills(device))


def try_apart(limit: int, command: Sequence[str] = APART) -> Trials:
    """`try_card` in a process of its own: the card's memory that torch takes for itself, and what it pinned, would stay
    taken as long as this one lives. RuntimeError with what that process said last.
    """
    done = subprocess.run(
        [*command, str(limit)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=WITHIN,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(said[-1] if said else f"the process that tries it ended with code {done.returncode}")
    return Trials(**json.loads(done.stdout.splitlines()[-1]))


def copy_rates(device: torch.device, size: int, *, pinned: bool = True) -> tuple[float, float]:
    """Bytes a second to the card and back, `size` bytes at a time."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    card = torch.empty(size, dtype=torch.uint8, device=device)
    down = median_seconds(lambda: card.copy_(host, non_blocking=pinned), device)
    up = median_seconds(lambda: host.copy_(card, non_blocking=pinned), device)
    return size / down, size / up


def own_clock(device: torch.device) -> Callable[[], float]:
    """Seconds that this process was given: on a busy machine the rest says nothing of the hardware.

    Only where one thread computes; several threads spin while they wait for each other, so there it is the wall, and
    on a card the wall once all its work is done.
    """
    if device.type == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def wall() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return wall


def quick(times: Sequence[float], parts: int = 4) -> float:
    """The end of the quicker quarter, or other part: what the hardware does while other programs don't evict our
    caches."""
    return sorted(times)[len(times) // parts]


def median_seconds(work: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Of `rounds` runs after a first that doesn't count, each waited for."""
    clock, times = own_clock(device), []
    for _ in range(rounds + 1):
        began = clock()
        work()
        times.append(clock() - began)
    return statistics.median(times[1:])


def _spills(device: torch.device) -> bool:
    """Windows' driver gives RAM for device memory when a card is full (sysmem fallback): slow, and no error."""
    free, _ = torch.cuda.mem_get_info(device)
    try:
        held = torch.empty(free + 512 * MIB, dtype=torch.uint8, device=device)
    except RuntimeError:
        return False
    del held
    torch.cuda.empty_cache()
    return True


def main(limit: int) -> None:
    try:
        print(json.dumps(asdict(try_card(torch.device("cuda"), limit))))
    except Exception as error:  # in one line: torch's own end with hints
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
