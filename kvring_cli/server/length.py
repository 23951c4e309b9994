"""A prompt that can't fit is refused before all of it is tokenised: 10 MB of one letter take a tokenizer 25 s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.errors import ContextLengthError

if TYPE_CHECKING:
    from engine.engine import Engine

SUSPICIOUS = 8
"""Characters per token of the context from which a prompt is counted first; text has four or five."""
PIECE = 1 << 16
SEAM = 8
"""Tokens that cutting a text may add at each cut, generously."""


def check_length(engine: Engine, prompt: Any) -> None:
    """ContextLengthError as soon as the pieces of a very long prompt are more than the context."""
    context, tokenizer = engine.capacity.context, engine.model.tokenizer
    if sum(map(len, _texts(prompt))) <= SUSPICIOUS * context:
        return
    count = 0
    for text in _texts(prompt):
        for start in range(0, len(text), PIECE):
            count += max(0, len(tokenizer.encode(text[start : start + PIECE], bos=False)) - SEAM)
            if count > context:
                raise ContextLengthError(
                    f"the prompt has more than {count:,} tokens; the context has room for {context:,}",
                    "shorten the prompt, or start the server with a larger --max-context",
                )


def _texts(prompt: Any) -> Iterator[str]:
    """Every text in messages, their tool calls included, or the text itself."""
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, dict):
        for value in prompt.values():
            yield from _texts(value)
    elif isinstance(prompt, list):
        for item in prompt:
            yield from _texts(item)
