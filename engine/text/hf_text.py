"""Tokenizer and chat template of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelError
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or ModelError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}", "download the model again") from None
    except ValueError as error:
        raise ModelError(f"{path} is damaged: {error}", "download that file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object", "download that file again")
    return value


def text_of_folder(folder: Path, bos: int | None, eos: Iterable[int]) -> tuple[Tokenizer, ChatTemplate | None]:
    """`bos` and `eos` are the model config's ids; the tokenizer's own are added to them."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json", "save it with transformers: AutoTokenizer...save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} is damaged: {error}", "download that file again") from None
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    bos_string, eos_string = _string(settings.get("bos_token")), _string(settings.get("eos_token"))
    own_bos, own_eos = (backend.token_to_id(string) if string else None for string in (bos_string, eos_string))
    bos = own_bos if own_bos is not None else bos
    tokenizer = Tokenizer(
        backend,
        bos=bos,
        eos=[id for id in (*eos, own_eos) if id is not None],
        adds_bos=_adds_bos(backend, bos, settings),
    )
    source = _template(folder, settings)
    template = None if source is None else ChatTemplate(source, bos=bos_string, eos=eos_string)
    return tokenizer, template


def _adds_bos(backend: tokenizers.Tokenizer, bos: int | None, settings: dict[str, Any]) -> bool:
    """Whether the model's own tokenizer starts a text with BOS: asked of its post-processor, then of its settings."""
    if bos is None:
        return False
    if backend.encode("a", add_special_tokens=True).ids[:1] == [bos]:
        return True
    return backend.post_processor is None and bool(settings.get("add_bos_token"))


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja is newer than the setting and wins. A list of templates holds one named `default`."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template


def _string(token: str | dict[str, Any] | None) -> str:
    """A special token's setting is its string, or an object with `content`, or absent."""
    if isinstance(token, dict):
        token = token.get("content")
    return token or ""
