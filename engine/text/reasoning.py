"""What a model thinks, told apart from what it says: `<think>...</think>` at the beginning of an answer.

Only there: a model that writes about the tag later on means the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.stop import StopMatcher

OPEN, CLOSE = "<think>", "</think>"
CLOSING = "\n</think>\n\n"
"""What ends the thinking of a model that used up its budget."""

Part = tuple[str, str]  # ("reasoning" | "content", text)


class Reasoning:
    """Feed an answer as it comes; parts come out without the tags. `inside`: the prompt has opened the tag already."""

    def __init__(self, inside: bool = False) -> None:
        self._state = "inside" if inside else "start"
        self._begun = False  # something but white space came out of this state
        self._held = ""
        self._close = StopMatcher((CLOSE,))

    @property
    def inside(self) -> bool:
        return self._state == "inside"

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        if self._state == "start":
            self._held += text
            seen = self._held.lstrip()
            if seen.startswith(OPEN):
                self._state, text, self._held = "inside", seen[len(OPEN) :], ""
            elif OPEN.startswith(seen):
                return parts
            else:
                self._state, self._begun, text, self._held = "after", True, self._held, ""
        if self._state == "inside":
            self._held += text
            thought = self._close.push(text)
            parts += self._out("reasoning", thought)
            if self._close.stopped is None:
                return parts
            text = self._held[self._held.index(CLOSE) + len(CLOSE) :]
            self._state, self._begun, self._held = "after", False, ""
        return parts + self._out("content", text)

    def finish(self) -> list[Part]:
        """What was held back when the answer ended."""
        if self._state == "inside":
            return self._out("reasoning", self._close.flush())
        return self._out("content", self._held) if self._state == "start" else []

    def _out(self, kind: str, text: str) -> list[Part]:
        text = text if self._begun or not text else text.lstrip("\n")
        self._begun = self._begun or bool(text)
        return [(kind, text)] if text else []


class ThinkingBudget:
    """Counts the tokens of thinking, and says once what must come next when they are used up."""

    def __init__(self, limit: int, closing: Sequence[int], inside: bool) -> None:
        self._limit, self._closing = max(0, limit), list(closing)
        self._reasoning, self._count, self.spent = Reasoning(inside), 0, False

    def __call__(self, token: int, text: str) -> Sequence[int]:
        self._reasoning.push(text)
        if not self._reasoning.inside or self.spent:
            return ()
        self._count += 1
        if self._count < self._limit:
            return ()
        self.spent = True
        return self._closing


def thinking_limit(max_tokens: int, asked: int | None, closing: int) -> int:
    """Tokens that thinking may take: what was asked for, and never the last quarter of the answer."""
    most = max_tokens * 3 // 4 - closing
    return most if asked is None else min(asked, most)
