"""Text to compute where only its length counts: of words that are a token each in most vocabularies."""

from __future__ import annotations

_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "as",
    "with",
    "time",
    "work",
    "part",
    "case",
    "system",
)


def filler(words: int, after: int = 0) -> str:
    """So many, those that come `after` so many others; a longer text begins like a shorter one."""
    return " ".join(_WORDS[(7 * n + n // 16) % 16] for n in range(after, after + words))
