"""What every gate gets: the user's own settings, one loaded model, and a place to say how far it is."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from engine.config import PAGE, EngineConfig
from engine.device import free_memory, limit_memory, loading, resolve_device, resolve_dtype, set_threads
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.budget import check_weights
from engine.model.config import ModelConfig
from engine.model.load import LoadedModel, load_model
from engine.platform import this_platform
from engine.switches import SETTINGS
from gates.bare import is_bare, to_go_on_from, with_template
from gates.filler import Filler, read_filler
from gates.haystack import TASKS, Counter, Document, build
from gates.options import GateOptions
from gates.verdict import Report

ROOM = 1024  # tokens beyond a document: two questions, two answers
SMALLEST_POOL = 28 * PAGE  # sink, a chunk of 1,024 tokens and a few pages to select

Say = Callable[[str, float], None]
"""say(what, share done 0..1)"""


@dataclass(frozen=True)
class Context:
    config: EngineConfig
    model: LoadedModel
    options: GateOptions
    say: Say

    def engine(self, **changes: object) -> Engine:
        """An engine over the shared weights with the user's settings and these changes."""
        self.needs(changes.get("max_context") or 0)
        return Engine(replace(self.config, **changes), self.model)

    def needs(self, tokens: int) -> None:
        """ConfigError where the model was not trained on a context of so many."""
        trained = self.model.config.trained_context
        if tokens > trained and self.config.positions == "absolute":
            few = f"this gate needs a context of {tokens:,} tokens, and {self.model.name} was trained on {trained:,}"
            raise ConfigError(few, "-m with a model that was trained on more")

    @property
    def prefill(self) -> str:
        """The user's, or exact on a GPU and window on a CPU, where 42K exact takes over a minute."""
        if self.config.prefill != "auto":
            return self.config.prefill
        return "window" if self.model.transformer.device.type == "cpu" else "exact"

    @property
    def counter(self) -> Counter:
        """How this model counts a text, and messages in its template."""
        tokenizer, chat = self.model.tokenizer, self.model.chat
        return Counter(
            lambda text: len(tokenizer.encode(text, bos=False)),
            lambda messages: len(chat.encode(messages, tokenizer).ids),
        )

    @cached_property
    def filler(self) -> str | Filler:
        """The user's own text, or prose."""
        return read_filler(self.options.haystack)

    def document(self, task: str, tokens: int, seed: int, *, own: bool = True, **more: Any) -> Document:
        """A document in prose or the user's text; a task that no fact table has asks keyed facts under its own name.

        `own` False: prose whatever the user gave, where the gate quotes what was answered.
        """
        seam = {"seam": PAGE} if task == "seam" else {}
        kind = task if task in TASKS else "keyed"
        try:
            built = build(kind, tokens, self.counter, seed, filler=self.filler if own else "prose", **seam, **more)
        except ValueError as error:
            raise ConfigError(str(error), "--length with more tokens, or another --haystack") from None
        built = to_go_on_from(built, self.counter) if is_bare(self.model) else built
        return replace(built, task=task)

    def fitted(self, tokens: int, report: Report, room: int = ROOM) -> int:
        """`tokens`, or what the model was trained on where that is less and positions are true, or --max-context; said
        in the report.
        """
        longest, why = self.model.config.trained_context, "the model was trained on"
        if self.config.positions == "compact":
            longest = max(longest, tokens + room)
        if self.config.max_context and self.config.max_context < longest:
            longest, why = self.config.max_context, "--max-context is"
        if tokens <= longest - room:
            return tokens
        if longest <= room:
            raise ConfigError(f"{why} {longest:,}: no document fits beside {room:,} tokens of room", "a longer context")
        report.notes.append(f"{longest - room:,} tokens instead of {tokens:,}: {why} {longest:,}")
        return longest - room

    def pool(self, tokens: int, document: int) -> int:
        """The user's pool, or `tokens`, or a quarter of a `document` that is too short for that to hide anything."""
        if self.config.kv_capacity:
            return self.config.kv_capacity
        return tokens if tokens <= document // 2 else max(SMALLEST_POOL, document // 4 // PAGE * PAGE)

    def outgrown(self, tokens: int, document: int) -> int:
        """`pool(tokens, document)`; ConfigError where a `document` is not twice that: hardly a page would be hidden."""
        pool = self.pool(tokens, document)
        if document < 2 * pool:
            few = f"a prompt of {document:,} tokens is less than two pools of {pool:,}: hardly a page would be hidden"
            raise ConfigError(few, f"--length {2 * pool} or more, or a smaller --kv-capacity")
        return pool

    def environment(self) -> dict[str, object]:
        """Settings that differ from the defaults, model, device, versions; neither user nor path."""
        values = {setting.field: getattr(self.config, setting.field) for setting in SETTINGS if not setting.place}
        default = EngineConfig(model="")
        changed = {name: value for name, value in values.items() if value != getattr(default, name)}
        device = self.model.transformer.device
        return {
            "model": self.model.name,
            "model_digest": self.model.digest,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " cpu",
            "dtype": str(self.model.transformer.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "prefill": self.prefill,
            "seeds": list(self.options.seed_numbers),
            **({"template": "none: facts are begun, to be gone on with"} if is_bare(self.model) else {}),
            "haystack": "own text" if self.options.haystack else "prose",
            "kvring": _version(),
            "settings": changed,
        }


def _version() -> str:
    try:
        return version("kvring")
    except PackageNotFoundError:
        return "not installed"


def load_context(config: EngineConfig, options: GateOptions, say: Say) -> Context:
    """Load `config.model` (a path) once for a whole gate."""
    device = resolve_device(config.device)
    set_threads(config.threads)
    limit_memory(device, config.device_limit_bytes)
    dtype = resolve_dtype(config.dtype, device, config.model)

    def check(_: ModelConfig, size: int) -> None:
        check_weights(config, free_memory(device, this_platform(), 0), size)

    with loading(config.model):
        model = load_model(config.model, device, dtype, config.weights, check)
    return Context(config, with_template(model), options, say)
