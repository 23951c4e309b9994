"""The environment, read in one place, and the table of every engine setting with its flag and its switch.

flag > environment > profile > default. A value is stripped of spaces and quotes first (`set X=0 & kvring` gives `0 `,
`set X="1"` keeps the quotes); an empty one counts as unset. Booleans: everything but `0` is on. Numbers: `0` is
literal. What is out of range is refused with the range; an unknown `NINFER_*` name is warned of, with the nearest
known one. Importing this file imports no torch: `kvring --help` needs the table.
"""

from __future__ import annotations

import difflib
import math
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.config import KV_DTYPES, KV_EXPERIMENTAL, MODES, PAGE, SCORERS, WEIGHT_TYPES, EngineConfig
from engine.conflicts import conflicts
from engine.errors import ConfigError
from engine.units import MIB, format_bytes, parse_bytes, parse_tokens

PREFIX = "NINFER_"
OTHER_SWITCHES = ("NINFER_AGENT_CC",)
"""Known names that are no engine settings: which card to pretend."""

_EDGES = string.whitespace + "\"'"  # what shells leave around a value
_NEGATIVE_WORDS = ("false", "no", "off", "none")
Parser = Callable[[str], Any]


@dataclass(frozen=True)
class Setting:
    """One field of EngineConfig: its flag, its switch if it has one, and what it may be (`values`, in words)."""

    field: str
    flag: str
    parse: Parser  # raises ValueError or ConfigError for what it doesn't take
    values: str
    help: str
    switch: str | None = None
    parse_switch: Parser | None = None  # where the switch is written otherwise than the flag
    group: str = "Memory"

    @property
    def default(self) -> Any:
        return _DEFAULTS[self.field]

    @property
    def boolean(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def words(self) -> tuple[str, ...]:
        """All that its flag takes, where that is a few words."""
        return self.parse.words if isinstance(self.parse, _OneOf) else ()

    @property
    def place(self) -> bool:
        """Whether it names a file or folder of the user's: reports leave it out."""
        return self.parse is _path

    def show(self, value: Any) -> str:
        """A value of this setting as a person reads it."""
        if value is None:
            return "auto"
        if isinstance(value, bool):
            return "on" if value else "off"
        return format_bytes(value) if self.field.endswith("_bytes") and not isinstance(value, str) else str(value)

    def read(self, text: str, source: str) -> Any:
        """The value of `text`, which came from `source` (the flag or the switch); ConfigError naming the range."""
        parse = self.parse_switch if self.parse_switch and source == self.switch else self.parse
        try:
            return parse(text)
        except (ValueError, OverflowError, ConfigError):
            raise ConfigError(
                f"{source} is '{text}', which is out of its range: {self.values}",
                f"set it within the range, or leave it out for the default ({self.show(self.default)})",
            ) from None


@dataclass(frozen=True)
class Effective:
    """A value and where it came from: a flag, a switch's name, a profile, or `default`."""

    value: Any
    source: str


@dataclass(frozen=True)
class Resolved:
    """What the engine is to be built with, and why."""

    config: EngineConfig
    sources: dict[str, Effective]  # by field of EngineConfig, `model` left out
    warnings: tuple[str, ...]


def resolve(
    model: str,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    profile: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """EngineConfig for `model` from flags and profile (both by field; None or absent = not given) and the environment.

    `defaults`: those of the command, where they differ from the engine's. A profile's value may be an Effective, which
    says which profile it is from. Text among the flags is parsed as the flag takes it. Raises ConfigError for a value
    out of its range.
    """
    chosen: dict[str, Effective] = {}
    warnings = _unknown(environ)
    for setting in SETTINGS:
        given = flags.get(setting.field)
        switch = environ.get(setting.switch, "").strip(_EDGES) if setting.switch else ""
        if given is not None:
            value = setting.read(given.strip(_EDGES), setting.flag) if isinstance(given, str) else given
            chosen[setting.field] = Effective(value, setting.flag)
        elif switch and setting.switch:
            chosen[setting.field] = Effective(setting.read(switch, setting.switch), setting.switch)
            if setting.parse_switch is not None and switch.lower() in _NEGATIVE_WORDS:
                warnings += _looks_negative(setting, switch, chosen[setting.field].value)
        elif profile and profile.get(setting.field) is not None:
            measured = profile[setting.field]
            chosen[setting.field] = measured if isinstance(measured, Effective) else Effective(measured, "profile")
        else:
            chosen[setting.field] = Effective((defaults or {}).get(setting.field, setting.default), "default")
    config = EngineConfig(model=model, **{field: effective.value for field, effective in chosen.items()})
    given = [setting.field for setting in SETTINGS if chosen[setting.field].source in (setting.flag, setting.switch)]
    warnings += conflicts(config, given)
    return Resolved(config, chosen, tuple(warnings))


def _unknown(environ: Mapping[str, str]) -> list[str]:
    known = [*OTHER_SWITCHES, *(setting.switch for setting in SETTINGS if setting.switch)]
    return [
        f"{name} is not a switch and is ignored; did you mean {difflib.get_close_matches(name, known, 1, 0)[0]}?"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known
    ]


def _looks_negative(setting: Setting, text: str, value: Any) -> list[str]:
    """A boolean switch is off only when it is 0; a word that says otherwise is taken as on, and pointed out."""
    if value in (False, "off"):
        return []
    return [f"{setting.switch}={text} is not 0, so it counts as on; write {setting.switch}=0 to turn it off"]


# --- parsers ----------------------------------------


def _boolean(text: str) -> bool:
    return text != "0"


@dataclass(frozen=True)
class _OneOf:
    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError
        return text.lower()


def _one_of(*words: str) -> Parser:
    return _OneOf(words)


def _boolean_or(words: Parser, on: str, off: str) -> Parser:
    """A switch whose flag has words: those, else the rule of booleans."""

    def parse(text: str) -> str:
        try:
            return words(text)
        except ValueError:
            return on if _boolean(text) else off

    return parse


def _within(read: Callable[[str], int], low: int, high: float = math.inf) -> Parser:
    def parse(text: str) -> int:
        value = read(text)
        if not low <= value <= high:
            raise ValueError
        return value

    return parse


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError
    return text


def _device(text: str) -> str:
    name, _, number = text.lower().partition(":")
    if name not in ("auto", "cpu", "cuda") or (number and not (name == "cuda" and number.isdecimal())):
        raise ValueError
    return text.lower()


def _retrieve(text: str) -> str | int:
    words = {"0": "off", "off": "off", "1": "auto", "auto": "auto"}
    if text.lower() in words:
        return words[text.lower()]
    return _within(parse_tokens, PAGE)(text)


def _far_heads(text: str) -> str | int:
    return text.lower() if text.lower() in ("auto", "all") else _within(int, 1, 100)(text.removesuffix("%"))


def _gib(text: str) -> int | str:
    """A bare number is GiB here; with a unit it is what it says."""
    if text.lower() == "auto":
        return "auto"
    size = parse_bytes(f"{text}GiB" if text.replace(".", "", 1).isdecimal() else text)
    return _within(int, 1)(str(size))


_memory = _within(parse_bytes, MIB)
_ring = _one_of("auto", "on", "off")
_host_memory = _one_of("auto", "pinned", "pageable")
_modes = ("auto", *MODES)
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}

# fmt: off
SETTINGS: tuple[Setting, ...] = (
    Setting("max_context", "--max-context", _within(parse_tokens, 1), "tokens, 1 or more (256K = 262144)",
            "Longest prompt and answer together. Left out: what the model was trained for, or what fits in memory."),
    Setting("kv_capacity", "--kv-capacity", _within(parse_tokens, PAGE), f"tokens, {PAGE} or more",
            "Tokens of KV that the device pool holds. Left out: sized from --kv-window."),
    Setting("kv_window", "--kv-window", _within(parse_tokens, PAGE), f"tokens, {PAGE} or more",
            "Tokens of working set; sizes the automatic pool.", "NINFER_KV_WINDOW"),
    Setting("ring", "--ring", _ring, "auto, on or off (as a switch: 1 on, 0 off)",
            "May the pool be smaller than the context? off refuses to start if it is.", "NINFER_KV_RING",
            _boolean_or(_ring, "on", "off")),
    Setting("host_memory", "--host-memory", _host_memory, "auto, pinned or pageable (as a switch: 1 pageable)",
            "What the host store is made of.", "NINFER_HOST_PAGEABLE", _boolean_or(_host_memory, "pageable", "auto")),
    Setting("host_kv_bytes", "--host-kv-gib", _gib, "auto, or GiB above 0",
            "Size of the host store; auto holds several contexts. Left out: what one context needs, in serve auto."),
    Setting("kv_dtype", "--kv-dtype", _one_of(*KV_DTYPES), f"one of {', '.join(KV_DTYPES)}",
            "What pages hold. auto: the model's own dtype if memory holds the context in it, else k8v4. "
            f"Experimental: {', '.join(KV_EXPERIMENTAL)}."),
    Setting("device_limit_bytes", "--vram-limit", _memory, "memory with its unit, 1MiB or more (12GiB)",
            "Use no more device memory than this."),
    Setting("ram_limit_bytes", "--ram-limit", _memory, "memory with its unit, 1MiB or more (32GiB)",
            "Use no more host memory than this."),
    Setting("retrieve", "--retrieve", _retrieve, f"auto (1), off (0), or a budget of {PAGE} tokens or more",
            "Recall of pages that left the pool. off sees only what is resident.", "NINFER_KV_RETRIEVE",
            group="Recall"),
    Setting("retrieve_share", "--retrieve-share", _within(int, 1, 100), "1 to 100 (percent of the pool)",
            "Percent of the pool that the selection may fill.", "NINFER_KV_RETRIEVE_SHARE", group="Recall"),
    Setting("sink", "--sink", _within(parse_tokens, 0), "tokens, 0 or more",
            "Tokens at the start that are always seen.", "NINFER_KV_SINK", group="Recall"),
    Setting("neighbor_pages", "--neighbor-pages", _within(int, 0, 64), "0 to 64 (pages each side)",
            "Pages each side of a selected page that come along.", "NINFER_KV_NEIGHBOR_PAGES", group="Recall"),
    Setting("query_tail", "--query-tail", _within(parse_tokens, 1, 65536), "1 to 65536 (tokens)",
            "Last prompt tokens that are the question, where the user's turn isn't known.", "NINFER_KV_QUERY_TAIL",
            group="Recall"),
    Setting("scorer", "--scorer", _one_of(*SCORERS), f"one of {', '.join(SCORERS)}",
            "What pages are scored by.", "NINFER_KV_SCORER", group="Recall"),
    Setting("far_heads", "--far-heads", _far_heads, "auto, all, or 1 to 100 (percent of the head groups)",
            "Head groups whose keys are scored. auto: those that look far by kvring heads, all where it never ran.",
            group="Recall"),
    Setting("prefill", "--prefill", _one_of(*_modes), f"one of {', '.join(_modes)}",
            "How the prompt attends to pages outside the pool.", "NINFER_KV_PREFILL", group="Recall"),
    Setting("decode", "--decode", _one_of(*_modes), f"one of {', '.join(_modes)}",
            "How the answer attends to pages outside the pool.", "NINFER_KV_DECODE", group="Recall"),
    Setting("positions", "--positions", _one_of("absolute", "compact"), "absolute or compact",
            "compact packs the window from 0, to go beyond the model's trained context.", group="Recall"),
    Setting("reuse", "--reuse", _boolean, "0 or 1",
            "Resume from the pages of earlier requests.", "NINFER_KV_REUSE_HOSTBACKED", _boolean, group="Recall"),
    Setting("verify_pages", "--verify-pages", _boolean, "0 or 1",
            "Checksum every page's way to the host and back.", "NINFER_KV_VERIFY", _boolean, group="Recall"),
    Setting("device", "--device", _device, "auto, cpu, cuda or cuda:N", "What computes.", group="Compute"),
    Setting("dtype", "--dtype", _one_of("auto", "float32", "bfloat16", "float16"),
            "auto, float32, bfloat16 or float16", "What numbers it computes with.", group="Compute"),
    Setting("weights", "--weights", _one_of("auto", "packed", "dense", *WEIGHT_TYPES),
            "auto, packed (as a GGUF file holds them), dense, or a type: q8_0, q4_0, ... (a folder is quantised to it)",
            "What weights are in memory. auto: packed on a card and on a CPU in bfloat16.", group="Compute"),
    Setting("threads", "--threads", _within(int, 1, 4096), "1 to 4096", "CPU threads.", group="Compute"),
    Setting("device_profile", "--device-profile", _one_of("auto", "off", "calibrate"), "auto, off or calibrate",
            "Measured routes for this hardware. off: the compiled-in ones.", group="Compute"),
    Setting("device_profile_path", "--device-profile-path", _path, "a file (.yaml) or a folder",
            "Where your calibrated profiles live. Left out: your cache folder.", "NINFER_DEVICE_PROFILES",
            group="Compute"),
    Setting("cuda_graph", "--cuda-graph", _one_of("on", "off"), "on or off",
            "Decode steps as CUDA graphs. off launches the same kernels one by one.", group="Compute"),
    Setting("prefill_chunk", "--prefill-chunk", _within(parse_tokens, PAGE), f"tokens, {PAGE} or more",
            "Prompt tokens computed in one step.", group="Compute"),
)
# fmt: on
