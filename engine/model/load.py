"""A model from disk: a Hugging Face folder or a GGUF file, recognised by what it is, never by unpickling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelError
from engine.model.assemble import Layout, assemble
from engine.model.config import ModelConfig
from engine.model.hf_config import from_hf
from engine.model.transformer import Transformer
from engine.text.chat import ChatTemplate
from engine.text.hf_text import read_json, text_of_folder
from engine.text.tokenizer import Tokenizer
from engine.weights import names
from engine.weights.safetensors import SafetensorsFolder
from engine.weights.source import digest_of


@dataclass(frozen=True)
class LoadedModel:
    """Everything of a model that the engine uses. `digest` identifies its weights and config; see `digest_of`."""

    transformer: Transformer
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    config: ModelConfig
    digest: str
    name: str
    path: Path


def load_model(path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Raises ModelError, naming the file or tensor, for anything missing, damaged or not supported."""
    path = Path(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}", "give a Hugging Face folder or a .gguf file")
    if path.is_dir():
        return _load_folder(path, torch.device(device), dtype)
    raise ModelError(f"{path} is neither a model folder nor a GGUF file", "give a Hugging Face folder or a .gguf file")


def _load_folder(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    if not (folder / "config.json").exists():
        raise ModelError(f"{folder} has no config.json", "give the folder that save_pretrained wrote")
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = from_hf(raw, read_json(generation) if generation.exists() else None)
    source = SafetensorsFolder(folder)
    tokenizer, chat = text_of_folder(folder, config.bos, config.eos)
    layout = Layout(names.HF_TOP, names.HF_LAYER, names.HF_DERIVED)
    return LoadedModel(
        transformer=Transformer(config, assemble(config, source, layout, device, dtype)),
        tokenizer=tokenizer,
        chat=chat,
        config=config,
        digest=digest_of(source.files, repr(config).encode()),
        name=folder.resolve().name,
        path=folder,
    )
