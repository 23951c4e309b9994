"""Stop strings over streamed text: what may be the beginning of one is held until it's known not to be."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text as it comes; `stopped` becomes the stop string that ended it, which itself is never given out."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = tuple(string for string in strings if string)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show now. After a stop, always empty."""
        if self.stopped is not None or not self._strings:
            return "" if self.stopped is not None else text
        self._held += text
        found = [(self._held.index(string), -len(string), string) for string in self._strings if string in self._held]
        if found:  # the earliest, and of those the longest
            at, _, self.stopped = min(found)
            return self._release(at, keep="")
        hold = max(_overlap(self._held, string) for string in self._strings)
        split = len(self._held) - hold
        return self._release(split, keep=self._held[split:])

    def flush(self) -> str:
        """What was held back, when the answer ended otherwise."""
        return self._release(len(self._held), keep="")

    def _release(self, end: int, keep: str) -> str:
        text, self._held = self._held[:end], keep
        return text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that begins `string` without being all of it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
