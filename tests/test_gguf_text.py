"""A tokenizer rebuilt from GGUF metadata has the ids of transformers, or is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import transformers

from engine.errors import ModelError
from engine.text.gguf_text import text_of_gguf
from engine.text.tokenizer import StreamDecoder
from engine.weights.gguf import GGUFFile
from tests.gguf_models import save_gguf
from tests.models import (
    CHAT,
    TEXTS,
    assert_spans,
    smollm2_file,
    tiny_model,
)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken", "smaug-bpe", "deepseek-r1-qwen"])
def test_a_gguf_tokenizer_has_the_ids_of_transformers(pre: str, tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "model.gguf", pre=pre)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer, chat = text_of_gguf(GGUFFile(path).metadata, path.name)
    for text in TEXTS:
        assert tokenizer.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert chat is not None
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat.encode(CHAT, tokenizer).ids == ids
    assert tokenizer.eos[0] == 2


def test_a_gguf_tokenizer_ends_at_every_end_of_turn(tmp_path: Path) -> None:
    path = save_gguf(tiny_model("llama"), tmp_path / "model.gguf")
    tokenizer, _ = text_of_gguf(GGUFFile(path).metadata, path.name)
    assert set(tokenizer.eos) == {0, 2}  # <|endoftext|> and <|im_end|>


def test_digits_stand_alone_where_the_vocabulary_was_learned_so(tmp_path: Path) -> None:
    """`smollm`: transformers doesn't cut digits for it, llama.cpp and SmolLM2's own tokenizer.json do."""
    ids = {}
    for pre in ("smollm", "gpt-2"):
        path = save_gguf(tiny_model("llama"), tmp_path / f"{pre}.gguf", pre=pre)
        tokenizer, _ = text_of_gguf(GGUFFile(path).metadata, path.name)
        ids[pre] = tokenizer.encode("a  9")
        alone = [*tokenizer.encode("a  "), *tokenizer.encode("9")]
    assert ids["smollm"] == alone
    assert ids["gpt-2"] != alone


def _sentencepiece_file(path: Path, prefix: bool) -> Path:
    """A SentencePiece vocabulary of bytes, letters and some merges, scored as SentencePiece scores."""
    words = ["▁t", "he", "▁the", "qu", "ick", "▁quick", "ow", "▁b", "▁brown", "er", "▁▁", "▁▁▁", "在", "世界", "00"]
    pieces = sorted({character for word in (*words, TEXTS[0]) for character in word} - {" ", *words})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *pieces]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words) + len(pieces))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * (len(words) + len(pieces))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sentencepiece_vocabulary_has_the_ids_of_transformers(tmp_path: Path) -> None:
    path = _sentencepiece_file(tmp_path / "model.gguf", prefix=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer, _ = text_of_gguf(GGUFFile(path).metadata, path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)).lstrip() == text.lstrip()
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", bos=False)]


def test_a_sentencepiece_stream_keeps_its_spaces(tmp_path: Path) -> None:
    path = _sentencepiece_file(tmp_path / "model.gguf", prefix=True)
    tokenizer, _ = text_of_gguf(GGUFFile(path).metadata, path.name)
    for text in TEXTS:
        stream = StreamDecoder(tokenizer)
        ids = tokenizer.encode(text)
        assert "".join(stream.push(id) for id in ids) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("tokenizer.ggml.tokens"), "no tokenizer"),
        (lambda m: m.pop("tokenizer.ggml.merges"), "no merges"),
        (lambda m: m.update({"tokenizer.ggml.merges": ["zzz qqq"]}), "merges"),
        (lambda m: m.update({"tokenizer.ggml.model": "bert"}), "'bert'"),
        (lambda m: m["tokenizer.ggml.tokens"].append("a"), "twice"),
    ],
)
def test_a_damaged_gguf_tokenizer_is_refused(change: object, words: str, tmp_path: Path) -> None:
    metadata = GGUFFile(save_gguf(tiny_model("llama"), tmp_path / "model.gguf")).metadata
    change(metadata)  # type: ignore[operator]
    with pytest.raises(ModelError, match=words):
        text_of_gguf(metadata, "model.gguf")


@pytest.mark.slow
def test_smollm2_has_the_ids_of_transformers() -> None:
    path = smollm2_file()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer, chat = text_of_gguf(GGUFFile(path).metadata, path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert chat is not None
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat.encode(CHAT, tokenizer).ids == ids
    assert_spans(chat, tokenizer, CHAT)
