"""Which device and dtype to compute with, and how much memory is free there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import PAGE, EngineConfig
from engine.device_profile import Found, look_up, user_file
from engine.errors import ConfigError, OutOfMemoryError
from engine.kv.budget import Memory
from engine.platform import Gpu, Platform, gather, this_platform
from engine.platform.facts import slug
from engine.routes import SETTINGS, Routes, pick
from engine.weights.gguf import is_gguf

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICE_SHARE = 0.90
"""Of the free device memory; the driver and other programs want the rest."""
THREADS_PER_PROCESSOR = 4
"""Above that torch only gets slower, and a few thousand threads end the process."""


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"'{name}' is not a device", "--device auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device, or this torch build is for the CPU", "--device cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{name}' is not supported", "--device cpu or cuda")
    return device


def resolve_dtype(name: str, device: torch.device, model: str = "") -> torch.dtype:
    """`auto`: bfloat16 on CUDA, and for a GGUF file where the CPU multiplies it in hardware; else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else cpu_dtype(is_gguf(model))
    if name not in DTYPES:
        raise ConfigError(f"dtype '{name}' is not known", f"one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def cpu_dtype(gguf: bool) -> torch.dtype:
    """What a CPU computes a model in, a GGUF file or not, where nobody asks for else."""
    return torch.bfloat16 if gguf and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.backends.cpu.get_cpu_capability() if hasattr(torch.backends.cpu, "get_cpu_capability") else ""
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return "AVX512" in capabilities and any(check() for check in checks if check is not None)


def explain_compute(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Device, dtype and threads as they were resolved, each with where it comes from."""
    shown = str(dtype).removeprefix("torch.")
    if config.dtype != "auto":
        why = "--dtype"
    elif dtype == torch.float32:
        why = "auto: the CPU is exact and no slower so"
    elif device.type == "cuda":
        why = "auto: what the card multiplies fast"
    else:
        why = "auto: a GGUF file on a CPU that multiplies it in hardware; --dtype float32 is exacter"
    if config.threads is not None:
        threads = "--threads"
    else:
        threads = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in os.environ else "auto: all that this process may use"
    where = "--device" if config.device != "auto" else f"auto: {'a' if device.type == 'cuda' else 'no'} CUDA device"
    return f"{device} ({where}) | {shown} ({why}) | threads {torch.get_num_threads()} ({threads})"


def set_threads(threads: int | None, platform: Platform | None = None) -> None:
    if threads is not None:
        most = THREADS_PER_PROCESSOR * (platform or this_platform()).processors()
        if not 1 <= threads <= most:
            raise ConfigError(
                f"{threads:,} threads on {most // THREADS_PER_PROCESSOR} processors would stand in each other's way",
                f"--threads from 1 to {most}, or leave it out for all processors",
            )
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads((platform or this_platform()).processors())


def free_memory(device: torch.device, platform: Platform, weights: int) -> Memory:
    """Bytes that are free for this model: of RAM beside its weights, of a card with them.

    weights: bytes that it takes there already. On a card with a desktop, what that needs is left out.
    """
    ram = platform.memory().usable
    if device.type != "cuda":
        return Memory(ram)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch holds it for its own
    free = torch.cuda.mem_get_info(device)[0] + unused + weights
    card = card_of(device, platform)
    return Memory(ram, max(0, min(int(free * DEVICE_SHARE), free - (card.desktop_bytes if card else 0))))


def is_out_of_memory(error: BaseException) -> bool:
    """Of the card, or of RAM."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Memory that runs out while a model is read, or room is made beside it, as an error with a fix."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(
            f"memory ran out while {model} was loaded: {str(error).splitlines()[0] if str(error) else 'no detail'}",
            f"kvring plan {model} says what fits; a file in fewer bits (GGUF; --weights q4_k for a folder), a smaller "
            "--kv-capacity, or --device cpu",
        ) from error


def use_device(device: torch.device) -> None:
    """Make a card that was asked for by its number this thread's own: kernels launch there, wherever their data are."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def limit_memory(device: torch.device, limit: int | None) -> None:
    """Let torch allocate no more than `limit` bytes of this card in this process; None: as much as there is.

    What is asked for beyond it is out of memory, as on a card of that size.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        _, total = torch.cuda.mem_get_info(index)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0, index)


def card_of(device: torch.device, platform: Platform) -> Gpu | None:
    """What the driver says of the card that torch computes on; torch may number the cards otherwise."""
    name = torch.cuda.get_device_name(device)
    return next((card for card in gather(platform, import_torch=False).gpus if card.name == name), None)


def pin_budget(device: torch.device, platform: Platform) -> int | None:
    """Bytes of host memory that may be pinned for this card; None: nobody knows before it is tried."""
    card, memory = card_of(device, platform), platform.memory()
    return card.pin_budget(memory) if card else None


def hardware(device: torch.device, platform: Platform) -> tuple[str, int]:
    """The class and the multiprocessors by which the device's profile is found."""
    if device.type == "cpu":
        cpu = platform.cpu()
        return cpu.hardware_class, cpu.processors
    card = torch.cuda.get_device_properties(device)
    return f"{slug(card.name)}-sm{card.major}{card.minor}", card.multi_processor_count


def measured_settings(found: Found) -> dict[str, int]:
    """Engine settings that a profile measured: defaults, which flags and switches override."""
    routes = found.profile.routes if found.profile else {}
    return {key: pick(routes[key], 1) for key in SETTINGS if key in routes and isinstance(pick(routes[key], 1), int)}


def find_profile(config: EngineConfig, device: torch.device, platform: Platform) -> Found:
    """This hardware's row; `off` looks at no file at all."""
    if config.device_profile == "off":
        return Found(None, "off")
    return look_up(*hardware(device, platform), user_file(path=config.device_profile_path))


def hiding_tokens(found: Found, dtype: torch.dtype, group: int, share: float = 1) -> int | None:
    """Tokens of a chunk whose attention takes as long as the stream of cold pages, from the rates measured here.

    FLOP/s over (bytes/s of the link x query heads per KV head), for 2-byte K and V; `share`: a stored page's bytes over
    those of its numbers. None where nobody measured.
    """
    rates = found.profile.rates if found.profile else {}
    flops, link = rates.get(f"attend/{str(dtype).removeprefix('torch.')}"), rates.get("h2d_pinned")
    if not flops or not link:
        return None
    tokens = max(rate for _, rate in flops) / (max(rate for _, rate in link) * group)
    return min(8192, max(PAGE, -(-int(tokens * share * dtype.itemsize / 2) // PAGE) * PAGE))


def load_routes(config: EngineConfig, device: torch.device, platform: Platform) -> tuple[Found, Routes]:
    """The profile of this hardware and the routes that it gives."""
    found = find_profile(config, device, platform)
    if found.profile is None:
        return found, Routes()
    return found, Routes(found.profile.routes, found.source)
