"""A GGUF file that is damaged, cut short or not supported is refused by name, with what would be right."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from tests.gguf_models import save_gguf
from tests.models import refusal, tiny_model


@pytest.fixture(scope="module")
def original_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tiny_model("llama"), tmp_path_factory.mktemp("gguf") / "model.gguf", "Q8_0")


@pytest.fixture
def file(original_gguf: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original_gguf, tmp_path / "model.gguf"))


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


def test_a_folder_around_a_gguf_file_is_refused_by_the_files_name(original_gguf: Path) -> None:
    error = refusal(original_gguf.parent)
    assert "has no config.json" in error.message and error.fix == f"give the file in it: {original_gguf}"


def test_an_unknown_way_of_cutting_text_is_refused(tmp_path: Path) -> None:
    error = refusal(save_gguf(tiny_model("llama"), tmp_path / "model.gguf", pre="deepseek-llm"))
    assert "'deepseek-llm'" in error.message
    assert "smollm" in error.fix


def test_a_qwen2_gguf_without_its_biases_is_refused(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("qwen2"), tmp_path / "model.gguf")
    assert "attn_q.bias" in refusal(_renamed(path, b"attn_q.bias", b"attn_q.zzzz")).message
