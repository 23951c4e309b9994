"""A model file that is damaged, cut short, incomplete or not supported is refused by name, with what would be right."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.budget import Memory
from engine.model.load import load_model
from engine.weights.source import digest_of
from tests.models import refusal, tiny_folder, tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("original"))


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


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
    assert f"{len(whole[:keep])} bytes" in error.message
    if keep < 0:
        assert f"is cut short: {len(whole) + keep} bytes, its table promises {len(whole)}" in error.message


def test_a_file_that_the_system_does_not_map_is_refused_with_its_size(folder: Path, monkeypatch) -> None:
    """As met with one file of 30 GiB on a machine of 24: torch's own error is no reason to end with a traceback."""

    def refuse(file, framework):
        raise RuntimeError("unable to mmap: Cannot allocate memory (12)")

    monkeypatch.setattr("engine.weights.safetensors.safe_open", refuse)
    error = refusal(folder)
    assert "model.safetensors" in error.message and "Cannot allocate memory" in error.message
    assert "max_shard_size" in error.fix


def test_bytes_behind_the_tensors_are_refused(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("ab") as stream:
        stream.write(b"\0" * 10)
    assert f"is damaged: {size + 10} bytes, its table promises {size}" in refusal(folder).message


def test_a_damaged_table_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)
    assert re.search(rf"is damaged: {len(content)} bytes \(.*header", refusal(folder).message)


def test_a_table_whose_shape_and_bytes_disagree_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    assert b'"shape":[64]' in content
    path.write_bytes(content.replace(b'"shape":[64]', b'"shape":[65]', 1))
    assert f"model.safetensors is damaged: {len(content)} bytes (" in refusal(folder).message


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


def test_a_tensor_in_two_shards_is_named_with_both(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "again.safetensors")
    shards = {"a": "model.safetensors", "b": "again.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert re.search(r"'.*' is in both again.safetensors and model.safetensors", refusal(folder).message)


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


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {"rope_parameters": 5},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": float("nan")},
        {"num_key_value_heads": "2"},
        {"eos_token_id": {"a": 1}},
        {"num_hidden_layers": 10**9},
        {"layer_types": 3},
    ],
)
def test_settings_of_the_wrong_kind_are_a_model_error(folder: Path, change: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert refusal(folder).fix


@pytest.mark.parametrize("name", ["", "random:tiny"])
@pytest.mark.parametrize(
    ("settings", "free", "words"),
    [({"max_context": 1 << 21}, 1 << 33, "beyond the"), ({}, 1 << 10, r"weights .* exceed the 1 KiB of RAM that is")],
)
def test_what_can_not_be_served_is_refused_before_a_weight_is_read(
    name: str, settings: dict, free: int, words: str, folder: Path, monkeypatch
) -> None:
    """Weights beyond the RAM ended the process without a word."""
    for reading in ("assemble", "random_model"):
        monkeypatch.setattr(f"engine.model.load.{reading}", lambda *_: pytest.fail("the weights were read"))
    monkeypatch.setattr("engine.engine.free_memory", lambda *_: Memory(free))
    with pytest.raises(ConfigError, match=words):
        Engine.load(EngineConfig(model=name or str(folder), **settings))


@pytest.mark.parametrize("weights", ["auto", "q8_0", "q4_0"])
def test_weights_take_what_is_counted_before_they_are_read(weights: str, folder: Path) -> None:
    for path in ("random:tiny", folder):
        found: list[int] = []
        loaded = load_model(path, "cpu", torch.float32, weights, lambda _, size, found=found: found.append(size))
        assert found == [pytest.approx(loaded.transformer.weight_bytes, rel=0.03)]


@pytest.mark.parametrize("weights", ["q4_k", "tq2_0"])
def test_a_type_that_no_matrix_can_take_is_refused(weights: str, folder: Path) -> None:
    """Rows of 64 and 96 are no blocks of 256: everything stayed as it was, under a note."""
    with pytest.raises(ConfigError, match="would change nothing") as refused:
        load_model(folder, weights=weights)
    assert "--weights q4_1" in refused.value.fix
    load_model(folder, weights="q4_1")
