"""Names that a person may mean: the nearest of those that there are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_LIKE = 0.6
_MOST = 3


def nearest(asked: str, known: Iterable[str]) -> list[str]:
    """At most three names, the likeliest first: `27B` is 27b-2.1bit, `Qwen/Qwen3 8B Instruct` is qwen3-8b.

    A name that holds the other whole comes before those of its family (the first word of a name), and these before
    names that are spelt alike.
    """
    asked = re.sub(r"[\s_]+", "-", re.split(r"[/\\]", asked.strip().lower().rstrip("/\\"))[-1])
    if len(re.sub(r"\W", "", asked)) < 2:
        return []
    scores = {name: _likeness(asked, name) for name in known}
    best = max(scores.values(), default=0.0)
    floor = 2.0 if best >= 2 else _LIKE
    return sorted((name for name in scores if scores[name] >= floor), key=lambda name: -scores[name])[:_MOST]


def _likeness(asked: str, name: str) -> float:
    """0 to 1 by spelling; 1 more for the family, 2 more where one holds the other."""
    alike = SequenceMatcher(None, asked, name).ratio()
    bare, plain = (re.sub(r"[^\w.]", "", text) for text in (asked, name))
    if bare in plain or plain in bare:
        return 2 + alike
    return alike + (name.split("-")[0] in asked.split("-"))


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """A question that ends in a space, or nothing."""
    near = nearest(asked, known)
    return f"did you mean {' or '.join(near)}? " if near else ""
