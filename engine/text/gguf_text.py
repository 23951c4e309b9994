"""Tokenizer and chat template from GGUF metadata.

A GGUF file spells out tokens, merges and scores, and names the way text is cut before merging (`tokenizer.ggml.pre`).
The names known here are those of the families that this engine computes; the patterns are those of the models' own
tokenizer.json. An unknown name is refused: a wrong cut gives tokens that are nearly right.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelError
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_END_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    "<end_of_turn>",
)
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2, _LLAMA3 = _WORDS % "", _WORDS % "{1,3}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "jais"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), "llama3"),
    **dict.fromkeys(("dbrx", "smaug-bpe"), "smaug"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), "qwen2"),
    "tekken": "tekken",
}
"""`tokenizer.ggml.pre` -> one of the cuts of `_byte_level`; files from before it was written count as `default`."""


def text_of_gguf(metadata: dict[str, Any], file: str) -> tuple[Tokenizer, ChatTemplate | None]:
    """Raises ModelError for a tokenizer that can't be rebuilt exactly."""

    def read(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens = read("model"), read("tokens")
    if not tokens:
        raise ModelError(f"{file} has no tokenizer", "use a GGUF file that holds its vocabulary (not --no-vocab)")
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"the vocabulary of {file} names a token twice", "download the file again")
    if kind == "gpt2":
        cut = _CUTS.get(read("pre", "default"))
        if cut is None:
            raise ModelError(
                f"the tokenizer of {file} cuts text the '{read('pre')}' way, which is not known here",
                f"ways that work: {', '.join(sorted(_CUTS))}; or load the model's Hugging Face folder",
            )
        backend = _byte_level(tokens, read("merges"), cut, file)
        adds_bos = read("add_bos_token", cut == "llama3")
    elif kind == "llama":
        backend = _sentencepiece(
            tokens, read("scores"), read("unknown_token_id", 0), read("add_space_prefix", True), file
        )
        adds_bos = read("add_bos_token", True)
    else:
        raise ModelError(f"the tokenizer of {file} is a '{kind}'", "kinds that work: gpt2 (byte-level BPE), llama")
    kinds = read("token_type")
    kinds = [1] * len(tokens) if kinds is None else kinds.tolist()
    for number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, its in zip(tokens, kinds, strict=True) if its == number and token]
        added = [AddedToken(token, normalized=False, special=special) for token in found]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    bos = read("bos_token_id")
    named = [read(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    control = {token: id for id, (token, its) in enumerate(zip(tokens, kinds, strict=True)) if its == _CONTROL}
    ends = [id for id in (*named, *(control.get(token) for token in _END_OF_TURN)) if id is not None]
    tokenizer = Tokenizer(backend, bos=bos, eos=ends, adds_bos=bool(adds_bos))
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return tokenizer, None
    strings = {"bos": "" if bos is None else tokens[bos], "eos": tokens[ends[0]] if ends else ""}
    return tokenizer, ChatTemplate(source, **strings)


def _byte_level(tokens: list[str], merges: list[str] | None, cut: str, file: str) -> tokenizers.Tokenizer:
    """GPT-2's scheme: bytes spelled as printable characters, words cut by a pattern, pairs merged in order."""
    if merges is None:
        raise ModelError(f"{file} has no merges for its byte-level tokenizer", "download the file again")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    whole_words = cut in ("llama3", "tekken")  # a word that is a token is taken without merging
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"the merges of {file} don't fit its vocabulary: {error}", "download the file again") from None
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    pattern = {"llama3": _LLAMA3, "smaug": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}.get(cut)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        before = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    else:
        before = [pre_tokenizers.Digits(individual_digits=True)] if cut == "digits" else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, gpt2])
    return backend


def _sentencepiece(tokens: list[str], scores: Any, unknown: int, prefix: bool, file: str) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, as transformers rebuilds it: merges from scores, best first, bytes for what is unknown."""
    if scores is None or len(scores) != len(tokens):
        raise ModelError(f"{file} has no score for each token of its vocabulary", "download the file again")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    ranked = []
    for token, score in zip(tokens, scores.tolist(), strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-score, -len(left), -len(right), vocabulary[left], vocabulary[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend
