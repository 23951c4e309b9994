"""Which engine suits the card: backend, dtype of the KV, pool and window, and the `serve` line that starts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.config import PAGE, SLACK
from engine.platform import Driver, Facts, Gpu
from engine.platform.facts import parse_capability
from engine.platform.nvidia import NO_DRIVER
from engine.units import GIB
from kvring_cli.cards import preset_for

MADE_FOR = ("8.0", "8.6", "8.9", "9.0", "12.0")
"""Capabilities that the kernels were made for. They run on every other from FIRST_TRITON on, too."""
FIRST_TRITON = 8.0
OLDEST = 7.5
EXITS = {"chosen": 0, "unreadable": 3, "missing": 4, "unsupported": 5}
_SMALLEST = 4096  # tokens of window on a card below every preset


@dataclass(frozen=True)
class Choice:
    """`outcome`: a key of EXITS. `settings`: flags of `serve` and their values."""

    outcome: str
    engine: str | None
    card: str
    capability: str | None
    reason: str
    fix: str = ""
    kv_dtype: str | None = None
    window_tokens: int | None = None
    pool_tokens: int | None = None
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def exit_code(self) -> int:
        return EXITS[self.outcome]

    def command(self, model: str = "MODEL") -> list[str]:
        """The `serve` line, word by word."""
        return ["kvring", "serve", model, *(word for pair in self.settings for word in pair)]

    def with_setting(self, flag: str, value: str) -> Choice:
        return replace(self, settings=(*self.settings, (flag, value)))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "settings": dict(self.settings), "exit_code": self.exit_code, "serve": self.command()}


def pick_engine(facts: Facts, environ: Mapping[str, str], *, triton_kernels: bool | None = None) -> Choice:
    """The engine for this machine, or for the card that `NINFER_AGENT_CC` pretends.

    `triton_kernels`: whether this build has them; None: look.
    """
    pretended = pretends(environ)
    gpu = facts.gpu
    if pretended:
        if parse_capability(pretended) is None:
            reason = f"the compute capability is given as '{pretended[:80]}', which is not like 8.9"
            return _unreadable("a pretended card", reason)
        gpu = Gpu(
            f"a card of capability {pretended}, pretended",
            capability=pretended,
            total=gpu.total if gpu else None,
            display=gpu.display if gpu else None,
        )
    elif gpu is None:
        trouble = facts.driver.trouble
        if trouble and trouble != NO_DRIVER:
            return _unreadable("unknown", f"the driver could not be asked: {trouble}")
        return _cpu(facts, "no NVIDIA card is here")
    if gpu.capability is None:
        return _unreadable(gpu.name, "the driver does not say its compute capability")
    return _for_card(facts, gpu, has_triton_kernels() if triton_kernels is None else triton_kernels, bool(pretended))


def pretends(environ: Mapping[str, str]) -> str:
    """The capability that `NINFER_AGENT_CC` says a card has, as it stands there; empty: it says none."""
    return environ.get("NINFER_AGENT_CC", "").strip(" \t\r\n\"'")


def without_cards(facts: Facts) -> Facts:
    """As `--device cpu` takes a machine: its cards are none of its business, nor is a driver that doesn't answer."""
    return replace(facts, gpus=(), driver=Driver(trouble=NO_DRIVER))


def has_triton_kernels() -> bool:
    """Whether the engine of this build runs on kernels of its own; where torch is broken that is what will be said."""
    try:
        from engine.backend import FACTORIES
    except (ImportError, OSError):
        return True
    return bool(FACTORIES)


def _for_card(facts: Facts, gpu: Gpu, kernels: bool, pretended: bool) -> Choice:
    if float(gpu.capability) < OLDEST:
        return Choice(
            "unsupported",
            None,
            gpu.name,
            gpu.capability,
            f"compute capability {gpu.capability} is below {OLDEST}",
            f"supported: {', '.join(MADE_FOR)} with kernels made for them, others from {OLDEST} untuned or on torch's; "
            "kvring serve MODEL --device cpu runs without the card",
        )
    runs = kernels and float(gpu.capability) >= FIRST_TRITON
    engine = f"triton-sm{gpu.capability.replace('.', '')}" if runs else "torch-cuda"
    if not pretended:
        missing = _missing(facts, engine)
        if missing:
            return Choice("missing", engine, gpu.name, gpu.capability, *missing)
    if runs:
        made = gpu.capability in MADE_FOR
        why = f"the kernels are made for capability {gpu.capability}" if made else "the kernels run on it, untuned"
    else:
        lacks = "this build has no Triton kernels" if not kernels else f"the kernels need {FIRST_TRITON} or newer"
        why = f"{lacks}, torch's own serve"
    dtype = "bf16" if float(gpu.capability) >= 8 else "fp16"
    preset = preset_for(gpu)
    settings = [("--device", "cuda")]
    if dtype == "fp16":
        settings.append(("--dtype", "float16"))
    window, chunk = _SMALLEST, 512
    if preset is not None:
        window, chunk = preset.settings["kv_window"], preset.settings["prefill_chunk"]
        dtype = preset.settings.get("kv_dtype", dtype)
        settings.append(("--profile", preset.name))
        if gpu.total and preset.memory + 2 * GIB <= gpu.total:  # larger than its preset: don't leave the rest unused
            settings.append(("--vram-limit", f"{(gpu.total - gpu.desktop_bytes) // GIB}GiB"))
        why += f"; the window of a {preset.name} card"
    else:
        settings += [("--kv-window", str(window)), ("--prefill-chunk", str(chunk))]
    return _chosen(engine, gpu.name, gpu.capability, why, dtype, window, chunk, settings)


def kv_on_cpu(gguf: bool) -> str:
    """What pages of a model, a GGUF file or not, hold on this CPU where memory lets them and nobody asks for else."""
    from engine.device import cpu_dtype
    from engine.kv.dtype import plain

    return plain(cpu_dtype(gguf)).name


def _cpu(facts: Facts, why: str) -> Choice:
    if facts.torch.version is None or facts.torch.trouble:
        return Choice(
            "missing",
            "torch-cpu",
            facts.cpu.name,
            None,
            facts.torch.trouble or "torch is not installed",
            "pip install torch",
        )
    reason = f"{why}; torch computes on {facts.cpu.processors} processors"
    return _chosen("torch-cpu", facts.cpu.name, None, reason, kv_on_cpu(gguf=False), 16384, 1024, [("--device", "cpu")])


def _chosen(engine, card, capability, why, dtype, window, chunk, settings) -> Choice:
    pool = (-(-window // PAGE) + -(-chunk // PAGE) + SLACK) * PAGE
    return Choice("chosen", engine, card, capability, why, "", dtype, window, pool, tuple(settings))


def _unreadable(card: str, reason: str) -> Choice:
    fix = "NINFER_AGENT_CC=8.6 or --compute-capability 8.6 says it by hand; nvidia-smi shows whether the driver works"
    return Choice("unreadable", None, card, None, reason, fix)


def _missing(facts: Facts, engine: str) -> tuple[str, str] | None:
    """What the engine needs and this machine lacks: reason and fix."""
    torch = facts.torch
    if torch.version is None or torch.trouble:
        return torch.trouble or "torch is not installed", torch_line(facts)
    if torch.cuda is None:
        return f"torch {torch.version} is the CPU build, and a card is here", torch_line(facts)
    if not torch.sees_card:
        return f"torch {torch.version} (CUDA {torch.cuda}) does not find the card", "kvring doctor says why"
    if engine.startswith("triton") and facts.triton is None:
        return "triton is not installed", f"pip install {'triton-windows' if facts.system == 'windows' else 'triton'}"
    return None


def torch_line(facts: Facts) -> str:
    """The command that installs torch with CUDA; on Windows PyPI's own is the CPU build."""
    cuda = "cu128" if facts.driver.cuda is None or float(facts.driver.cuda) < 13 else "cu130"
    index = f"--index-url https://download.pytorch.org/whl/{cuda}"
    return f"pip install --force-reinstall torch {index}"
