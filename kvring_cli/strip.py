"""What `--explain` draws: one character a page of where it was and why it was seen, and what the selected ones say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from engine.config import PAGE

if TYPE_CHECKING:
    from engine.result import PageView

_REASONS = ("key", "lexical", "neighbor", "control")  # the first that applies names the page
_LETTER = {"key": "k", "lexical": "l", "neighbor": "n", "control": "c"}
_MEANING = {
    "#": "resident, seen without being selected",
    "+": "fetched, seen without being selected",
    "~": "seen, no longer resident",
    "o": "resident, never seen",
    ".": "never seen",
    "k": "selected by key",
    "l": "selected by shared words",
    "n": "neighbor of a selected page",
    "c": "selected by a control",
}
_STYLE = {"#": "blue", "+": "cyan", "~": "blue", "o": "dim", ".": "dim", "k": "green", "l": "yellow"}
_STYLE |= {"n": "magenta", "c": "red"}
WORDS = 12
GROUPS = 40


def symbol(page: PageView) -> str:
    """One character; a selected page's letter is a capital if it had to be fetched."""
    reason = next((reason for reason in _REASONS if reason in page.reasons), None)
    if reason is not None:
        return _LETTER[reason].upper() if page.fetched else _LETTER[reason]
    if not page.seen:
        return "o" if page.resident else "."
    if page.fetched:
        return "+"
    return "#" if page.resident else "~"


def draw(pages: Sequence[PageView], width: int) -> Text:
    """Rows of pages, each with its first page's number, and a legend of the symbols that occur."""
    symbols = [symbol(page) for page in pages]
    margin = len(str(max(0, len(pages) - 1))) + 2
    room = max(8, width - margin - 1)
    row = room // 10 * 10 if room >= 10 else room
    text = Text()
    for start in range(0, len(symbols), row):
        text.append(f"{start:>{margin - 2}}: ", "dim")
        for mark in symbols[start : start + row]:
            text.append(mark, _STYLE[mark.lower()])
        text.append("\n")
    for mark in sorted(set(symbols), key=lambda mark: (list(_MEANING).index(mark.lower()), mark)):
        meaning = _MEANING[mark.lower()] + (", fetched" if mark.isupper() else "")
        text.append(f"{mark} ", _STYLE[mark.lower()])
        text.append(f"{meaning}: {symbols.count(mark):,}\n")
    return text


def groups(pages: Sequence[PageView]) -> list[tuple[int, int]]:
    """Runs of neighbouring selected pages, as [first, last]."""
    runs: list[tuple[int, int]] = []
    for index, page in enumerate(pages):
        if not page.reasons:
            continue
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def describe(pages: Sequence[PageView], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """A line for each run of selected pages: their numbers, reasons, how many were fetched, and their first words."""
    lines = []
    runs = groups(pages)
    for first, last in runs[:GROUPS]:
        inside = pages[first : last + 1]
        reasons = [reason for reason in _REASONS if any(reason in page.reasons for page in inside)]
        fetched = sum(page.fetched for page in inside)
        # A neighbour came along: the words that were looked for stand on the page that was chosen itself.
        core = next((i for i in range(first, last + 1) if set(pages[i].reasons) - {"neighbor"}), first)
        words = decode(tokens[core * PAGE : (core + 1) * PAGE]).split()
        quoted = " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else "")
        span = f"page {first}" if first == last else f"pages {first}-{last}"
        lines.append(f"{span} | {', '.join(reasons)} | fetched {fetched} of {len(inside)} | {quoted}")
    if len(runs) > GROUPS:
        lines.append(f"and {len(runs) - GROUPS:,} more runs of selected pages")
    return lines
