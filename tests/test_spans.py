"""The risk: a conversation tokenised piece by piece, or from what was kept, has other tokens than as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import engine.text.spans as spans
from engine.text import tokenizer as module
from tests.models import SPECIALS, tiny_tokenizer

WORDS = st.sampled_from(["word", " word", "\n\n", " ", "", "12 34", "漢字", "🙂", "<|im", "▁x", *SPECIALS])


def metaspace(**marks: bool) -> Tokenizer:
    """As SentencePiece models are: a space before the first word of all, and characters as tokens."""
    alphabet = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz0123456789<>|_\n"]
    made = Tokenizer(models.BPE({text: id for id, text in enumerate(alphabet)}, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens([AddedToken(text, special=True, **marks) for text in SPECIALS])
    return made


def wrapped(backend: Tokenizer) -> module.Tokenizer:
    return module.Tokenizer(backend, bos=None, eos=[])


@pytest.fixture(scope="module", params=["byte-level", "metaspace", "strips"])
def tokenizer(request) -> module.Tokenizer:
    made = {"byte-level": tiny_tokenizer, "metaspace": metaspace, "strips": lambda: metaspace(lstrip=True)}
    return wrapped(made[request.param]())


@settings(max_examples=150)
@given(words=st.lists(WORDS, max_size=12))
def test_pieces_have_the_tokens_and_characters_of_the_whole(tokenizer, words):
    text = "".join(words)
    for specials in (True, False):
        whole = tokenizer._encode(text, specials=specials)
        got = tokenizer.encode_spans(text, specials=specials)
        assert got.ids.tolist() == whole.ids
        assert list(zip(got.starts.tolist(), got.ends.tolist(), strict=True)) == whole.offsets


def test_only_what_joins_is_cut():
    assert wrapped(tiny_tokenizer()).joins
    assert not wrapped(metaspace()).joins and not wrapped(metaspace(lstrip=True)).joins


def test_a_next_turn_tokenises_only_what_is_new(monkeypatch):
    tokenizer = wrapped(tiny_tokenizer())
    start, end = SPECIALS[1:]
    first = f"{start}user\n{'long ' * 1000}{end}\n{start}assistant\n"
    turn = tokenizer.encode_spans(first, specials=True)
    seen, encode = [], tokenizer._encode

    def counted(text: str, *, specials: bool):
        seen.append(text)
        return encode(text, specials=specials)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    more = tokenizer.encode_spans(f"{first}answer{end}\n{start}user\nmore{end}", specials=True)
    assert sum(map(len, seen)) < 100 and more.ids[: len(turn.ids)].tolist() == turn.ids.tolist()


def test_what_is_kept_stays_below_its_bound_and_the_longest_unused_goes():
    kept, made = spans.Kept(most_tokens=5000), []

    def make(text: str) -> spans.Spans:
        made.append(text[0])
        return spans.Spans.of(np.arange(len(text)), [(0, 1)] * len(text))

    for name in "abacab":
        kept.get(name * 2400, make)
        assert kept._tokens == sum(len(piece.ids) for piece in kept._pieces.values()) <= 5000
    assert made == ["a", "b", "c", "b"]
    kept.get("d" * 9000, make)
    assert kept._tokens == 0, "larger than all of it: not kept"
