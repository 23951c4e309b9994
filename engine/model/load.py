"""A model from disk: a Hugging Face folder or a GGUF file, recognised by what it is, never by unpickling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError, ModelError
from engine.model.assemble import Layout, assemble
from engine.model.config import ModelConfig
from engine.model.gguf_config import from_gguf
from engine.model.hf_config import from_hf
from engine.model.packing import Packing, explain, held_bits, held_bytes, packed_types
from engine.model.random import PREFIX, random_config, random_model, random_path, shape_of
from engine.model.transformer import Transformer
from engine.ops.packed import TORCH
from engine.ops.packed_kernels import kernels_for
from engine.platform import this_platform
from engine.text.chat import ChatTemplate
from engine.text.gguf_text import text_of_gguf
from engine.text.hf_text import read_json, text_of_folder
from engine.text.tokenizer import Tokenizer
from engine.units import format_bytes
from engine.weights import names
from engine.weights.gguf import MAGIC, GGUFFile
from engine.weights.names import MATRICES, layer_names
from engine.weights.quant import TYPES, QuantType
from engine.weights.quantise import QuantisedSource
from engine.weights.safetensors import SafetensorsFolder
from engine.weights.source import WeightSource, digest_of


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
    notes: tuple[str, ...] = ()  # what of the weights costs more than their file, or computes slower than it could


@dataclass(frozen=True)
class OpenedModel:
    """What a model is, from its tables, config and text alone: no weight has been read."""

    source: WeightSource
    config: ModelConfig
    layout: Layout
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    container: str  # safetensors | gguf
    quantised_to: str = ""  # while it is loaded

    @property
    def loaded(self) -> list[str]:
        """Names of the tensors that are loaded."""
        return [name for name in self.source.shapes if not name.startswith(self.layout.ignored)]

    def digest(self) -> str:
        """Identifies weights and config; see `digest_of`."""
        return digest_of(self.source.files, f"{self.config!r}{self.quantised_to}".encode())


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: str = "auto",
    check: Callable[[ModelConfig, int], None] = lambda config, size: None,
) -> LoadedModel:
    """`weights`: as `EngineConfig.weights`. `check` may refuse the model before its weights are read, by its config
    and the bytes that they will take.

    Raises ModelError, naming the file or tensor, for anything missing, damaged or not supported; ConfigError for a
    quantisation that can't be done.
    """
    device = torch.device(device)
    if str(path).startswith(PREFIX):
        return _random(str(path), device, dtype, TYPES.get(weights.upper()), check)
    path = Path(path)
    opened = quantised(open_model(path), weights)
    source, types = opened.source, packed_types(weights, device.type, dtype)
    check(opened.config, held_bytes(source, opened.loaded, types, device.type, dtype))
    kernels, troubles = kernels_for(device, dtype, types.intersection(map(source.kind_of, source.shapes)))
    packing = Packing(device, dtype, kernels)
    grown = explain(source, opened.loaded, packing)
    transformer = Transformer(opened.config, assemble(opened.config, source, opened.layout, packing))
    this_platform().trim()  # packing leaves 230 MiB of freed memory behind (SmolLM2 on a CPU)
    kept = getattr(source, "kept", ())
    if kept:
        size = sum(source.bytes_of(name) for name in kept)
        troubles.append(
            f"{len(kept)} matrices of {format_bytes(size)} stay as they are, because their rows are no whole blocks of "
            f"{opened.quantised_to}: {min(kept)}, for one"
        )
    return LoadedModel(
        transformer=transformer,
        tokenizer=opened.tokenizer,
        chat=opened.chat,
        config=opened.config,
        digest=opened.digest(),
        notes=(*troubles, *([grown] if grown else [])),
        name=path.resolve().stem if path.is_file() else path.resolve().name,
        path=path,
    )


def _random(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kind: QuantType | None,
    check: Callable[[ModelConfig, int], None],
) -> LoadedModel:
    shape, bits = shape_of(name), held_bits(kind, device.type, dtype) if kind else 8 * dtype.itemsize
    numbers = shape.layers * shape.layer_weights + shape.head_weights * (1 if shape.tied else 2)
    check(random_config(name), int(numbers * bits / 8))
    kernels, troubles = kernels_for(device, dtype, [kind.name] if kind else [])
    transformer, tokenizer, config = random_model(name, device, dtype, kind, kernels[kind.name] if kind else TORCH)
    return LoadedModel(transformer, tokenizer, None, config, "random", name, random_path(name), tuple(troubles))


def quantised(opened: OpenedModel, weights: str) -> OpenedModel:
    """The same model with its matrices in the type that `weights` names, if it names one."""
    kind = TYPES.get(weights.upper())
    if kind is None:
        return opened
    if opened.container == "gguf":
        raise ConfigError(
            f"--weights {weights} quantises a folder of safetensors, and a GGUF file is what it is already",
            "leave --weights out, or give the folder",
        )
    layers = (layer_names(opened.layout.layer, index) for index in range(opened.config.layers))
    matrices = {name for names in layers for part, name in names.items() if part in MATRICES}
    top = {opened.layout.top[part] for part in ("embed", "head")}
    tops, rest = TYPES["Q8_0"] if kind.ternary else kind, opened.source
    present = set(rest.shapes)
    source = QuantisedSource(QuantisedSource(rest, tops, top & present), kind, matrices & present)
    if all(source.kind_of(name) != kind.name for name in matrices & present):
        raise ConfigError(
            f"--weights {weights} would change nothing: no matrix here has rows of whole blocks of {kind.block}",
            "--weights q4_1, whose blocks are of 32" if kind.block > 32 else "leave --weights out",
        )
    return replace(opened, source=source, quantised_to=kind.name)


def open_model(path: str | Path) -> OpenedModel:
    """Raises ModelError as `load_model` does, save for tensors that the config and the file do not agree on."""
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        raise ModelError(f"{str(path)[:200]} can't be read: {error.strerror or error}", "check the path") from None
    except _NONSENSE as error:
        raise ModelError(
            f"the settings in {path} make no sense: {type(error).__name__}: {error}", "download the model again"
        ) from error


_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What a value of the wrong type or size ends in, wherever it is read: config, metadata, tokenizer or template."""


def _open(path: Path) -> OpenedModel:
    if not path.exists():
        raise ModelError(f"there is no model at {path}", "give a Hugging Face folder or a .gguf file")
    if path.is_dir():
        return _open_folder(path)
    with path.open("rb") as file:
        if file.read(4) == MAGIC:
            return _open_gguf(path)
    if path.suffix == ".gguf":
        raise ModelError(f"{path} doesn't begin as a GGUF file does", "download it again")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is a part of a model", f"give its folder: {path.parent}")
    raise ModelError(f"{path} is neither a model folder nor a GGUF file", "give a Hugging Face folder or a .gguf file")


def _open_folder(folder: Path) -> OpenedModel:
    if not (folder / "config.json").exists():
        files = sorted(folder.glob("*.gguf"))
        fix = f"give the file in it: {files[0]}" if files else "give the folder that save_pretrained wrote"
        raise ModelError(f"{folder} has no config.json", fix)
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    config = from_hf(raw, read_json(generation) if generation.exists() else None)
    source = SafetensorsFolder(folder)
    tokenizer, chat = text_of_folder(folder, config.bos, config.eos)
    layout = Layout(names.HF_TOP, names.HF_LAYER, names.HF_DERIVED)
    if config.family == "gemma3":
        layout = Layout(*names.gemma_tables(source.shapes), names.HF_DERIVED, norm_offset=1.0, ignored=names.PICTURES)
        if any(name.startswith(names.PICTURES) for name in source.shapes):
            config = replace(config, left_out="the part that sees pictures")
    return OpenedModel(source, _with_text(config, tokenizer), layout, tokenizer, chat, "safetensors")


def _open_gguf(path: Path) -> OpenedModel:
    source = GGUFFile(path)
    divisors = None
    if "rope_freqs.weight" in source.shapes:
        divisors = tuple(float(x) for _, block in source.blocks("rope_freqs.weight") for x in block.tolist())
    config = from_gguf(source.metadata, source.shapes, divisors)
    tokenizer, chat = text_of_gguf(source.metadata, path.name)
    layout = Layout(names.GGUF_TOP, names.GGUF_LAYER, names.GGUF_DERIVED)
    if config.family == "llama":
        layout = replace(layout, reorder=lambda part, tensor: _unpair(part, tensor, config))
    return OpenedModel(source, _with_text(config, tokenizer), layout, tokenizer, chat, "gguf")


def _with_text(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The tokenizer knows best where a text begins and ends."""
    return replace(config, eos=tokenizer.eos, bos=tokenizer.bos)


def _unpair(part: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows of Llama's Q and K from GGUF's order to Hugging Face's.

    llama.cpp rotates neighbouring rows of a head together, Hugging Face row i with row i + head_dim / 2; llama.cpp's
    converter interleaves the halves of each head (convert_hf_to_gguf.py, `permute`), for biases too.
    """
    heads = {"q": config.heads, "k": config.kv_heads}.get(part.removesuffix("_bias"))
    if heads is None:
        return tensor
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
