"""What every gate gets: the user's own settings, one loaded model, and a place to say how far it is."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from engine.config import EngineConfig
from engine.device import resolve_device, resolve_dtype, set_threads
from engine.engine import Engine
from engine.errors import ConfigError
from engine.model.load import LoadedModel, load_model
from gates.haystack import Counter

Say = Callable[[str, float], None]
"""say(what, share done 0..1)"""


@dataclass
class Context:
    config: EngineConfig
    model: LoadedModel
    quick: bool
    seeds: int
    say: Say

    def engine(self, **changes: object) -> Engine:
        """An engine over the shared weights with the user's settings and these changes."""
        return Engine(replace(self.config, **changes), self.model)

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

    def environment(self) -> dict[str, object]:
        """Settings that differ from the defaults, model, device, versions; neither user nor path."""
        default = EngineConfig(model="")
        changed = {
            field.name: getattr(self.config, field.name)
            for field in fields(EngineConfig)
            if field.name != "model" and getattr(self.config, field.name) != getattr(default, field.name)
        }
        device = self.model.transformer.device
        return {
            "model": self.model.name,
            "model_digest": self.model.digest,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " cpu",
            "dtype": str(self.model.transformer.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "prefill": self.prefill,
            "settings": changed,
        }


def load_context(config: EngineConfig, *, quick: bool, seeds: int, say: Say) -> Context:
    """Load `config.model` (a path) once for a whole gate."""
    device = resolve_device(config.device)
    set_threads(config.threads)
    model = load_model(config.model, device, resolve_dtype(config.dtype, device, config.model))
    if model.chat is None:
        raise ConfigError(f"{model.name} has no chat template, which gates ask their questions in", "use a chat model")
    return Context(config, model, quick, seeds, say)
