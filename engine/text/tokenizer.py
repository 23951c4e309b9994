"""Text to token ids and back, over the `tokenizers` library.

What always holds: text that came from a user never becomes a special token. `encode` reads the strings of special
tokens as plain text; only `encode_rendered`, for what a chat template wrote, turns them into ids.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers

from engine.errors import RequestError
from engine.text.spans import Kept, Spans

_UNFINISHED = "\ufffd"  # what decoding puts for bytes that aren't (yet) a character
_LONGEST_HOLD = 8  # tokens: a character has at most 4 bytes and a byte-level token at least one


class Tokenizer:
    """One model's vocabulary. `bos` is put in front of a raw prompt when `adds_bos`; `eos` ends an answer."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos: int | None, eos: Iterable[int], adds_bos: bool = False
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._turn = threading.Lock()  # `encode_special_tokens` is a setting of the backend, not an argument
        self.bos = bos
        self.eos = tuple(dict.fromkeys(eos))
        self.adds_bos = adds_bos and bos is not None
        added = backend.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        self._kept = Kept()
        self.special_ids = frozenset(self.special.values())
        longest_first = sorted(self.special, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def vocab_size(self) -> int:
        """Tokens that have a string, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Text as written, special-token strings included; the model's own BOS in front unless `bos` is False."""
        ids = self._encode(text, specials=False).ids
        return [self.bos, *ids] if bos and self.adds_bos else ids  # type: ignore[list-item]

    def encode_rendered(self, rendered: str) -> list[int]:
        """What a chat template wrote: its markers become special ids, and it has put in BOS itself if it wants one."""
        return self._encode(rendered, specials=True).ids

    def encode_spans(self, rendered: str, *, specials: bool) -> Spans:
        """Ids with the characters of `rendered` that each covers, `specials` read as such or as text. No BOS."""
        if not specials:
            return self._spans(rendered, specials=False)
        if not self.joins:
            return self._kept.get(rendered, lambda text: self._spans(text, specials=True))
        parts, cursor = [], 0
        for match in self.special_pattern.finditer(rendered):
            parts.append(self._piece(rendered[cursor : match.start()], cursor))
            parts.append(Spans.of([self.special[match[0]]], [match.span()]))
            cursor = match.end()
        return Spans.joined([*parts, self._piece(rendered[cursor:], cursor)])

    @cached_property
    def joins(self) -> bool:
        """Whether text between special tokens is encoded alike alone and in its place, by trying it.

        Not where a space is put in front of the first word only, or a special token swallows those around it.
        """
        if not self.special or any(
            token.lstrip or token.rstrip or token.single_word
            for token in self._backend.get_added_tokens_decoder().values()
            if token.special
        ):
            return False
        mark = min(self.special, key=len)
        before, after = ("word", "word ", "word\n", "\u6f22", "12"), (" word", "word", "\n\nword", "\u6f22", "12", "")
        return all(
            self._encode(first + mark + second, specials=True).ids
            == [
                *self._encode(first, specials=True).ids,
                self.special[mark],
                *self._encode(second, specials=True).ids,
            ]
            for first in before
            for second in after
        )

    def _piece(self, text: str, at: int) -> Spans:
        if not text:
            return Spans.of([], [])
        return self._kept.get(text, lambda text: self._spans(text, specials=True)).moved(at)

    def _spans(self, text: str, *, specials: bool) -> Spans:
        encoding = self._encode(text, specials=specials)
        return Spans.of(encoding.ids, encoding.offsets)

    def decode(self, ids: Sequence[int], *, specials: bool = False) -> str:
        """Text of ids; special tokens are left out unless `specials`. Broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=not specials)

    def token(self, id: int) -> str:
        """The token's own string, as the vocabulary spells it; empty for an id without one."""
        return self._backend.id_to_token(id) or ""

    def _encode(self, text: str, *, specials: bool) -> tokenizers.Encoding:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a code point that is no character, the first at {error.start}", "remove it"
            ) from None
        with self._turn:
            self._backend.encode_special_tokens = not specials
            return self._backend.encode(text, add_special_tokens=False)


class StreamDecoder:
    """Decodes an answer token by token; what it has given out never changes, and never ends inside a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # ids before this are given out whole; a few of them stay as context for the next
        self._context = 0

    def push(self, id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._ids.append(id)
        text = self._new_text()
        held = len(self._ids) - self._given
        if text.endswith(_UNFINISHED) and held < _LONGEST_HOLD:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        """What was held back, at the end of the answer: unfinished bytes as U+FFFD."""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        """Decoded together with the tokens before it, because some decoders join neighbours with a space."""
        before = self._tokenizer.decode(self._ids[self._context : self._given])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]

    def _advance(self) -> None:
        self._context, self._given = self._given, len(self._ids)
