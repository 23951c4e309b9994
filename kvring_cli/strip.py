"""What `--explain` draws: one character a page of where it was and why it was seen, and what the selected ones say.

Every layer selects anew at every step, so in a long run nearly every page is selected once. A page counts as selected
here if it is among the most often selected, as many of them as one selection brings back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from rich.text import Text

from engine.config import PAGE

if TYPE_CHECKING:
    from engine.result import PageView, RecallReport

_LETTER = {"key": "k", "lexical": "l", "neighbor": "n", "control": "c"}
_MEANING = {
    "#": "resident, seen",
    "+": "fetched, seen",
    "~": "seen, no longer resident",
    "o": "resident, never seen",
    ".": "never seen",
    "k": "often selected by key",
    "l": "often selected by shared words",
    "n": "often selected as a neighbor",
    "c": "often selected by a control",
}
_STYLE = {"#": "blue", "+": "cyan", "~": "blue", "o": "dim", ".": "dim", "k": "green", "l": "yellow"}
_STYLE |= {"n": "magenta", "c": "red"}
WORDS = 12
GROUPS = 40


def often(pages: Sequence[PageView], recall: RecallReport) -> set[int]:
    """The pages that were selected most, as many as a selection holds on average."""
    size = -(-recall.pages_selected // max(1, recall.selections))
    ranked = sorted(range(len(pages)), key=lambda index: -pages[index].selected)
    return {index for index in ranked[:size] if pages[index].selected}


def symbol(page: PageView, chosen: bool) -> str:
    """One character; a chosen page has the letter of its commonest reason, a capital if it had to be fetched."""
    if chosen:
        letter = _LETTER[max(page.steps, key=page.steps.__getitem__)]
        return letter.upper() if page.fetched else letter
    if not page.seen:
        return "o" if page.resident else "."
    if page.fetched:
        return "+"
    return "#" if page.resident else "~"


def draw(pages: Sequence[PageView], chosen: Set[int], width: int) -> Text:
    """Rows of pages, each with its first page's number, and a legend of the symbols that occur."""
    symbols = [symbol(page, index in chosen) for index, page in enumerate(pages)]
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


def groups(pages: Sequence[PageView], chosen: Set[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring chosen pages as [first, last], that of the most selected page first."""
    runs: list[tuple[int, int]] = []
    for index in sorted(chosen):
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return sorted(runs, key=lambda run: -max(page.selected for page in pages[run[0] : run[1] + 1]))


def describe(
    pages: Sequence[PageView], chosen: Set[int], tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    """A line for each run of chosen pages: numbers, reasons with counts, how many were fetched, and first words."""
    lines = []
    runs = groups(pages, chosen)
    for first, last in runs[:GROUPS]:
        inside = pages[first : last + 1]
        steps: Counter[str] = sum((Counter(page.steps) for page in inside), Counter())
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in steps.most_common())
        fetched = sum(page.fetched for page in inside)
        # A neighbour came along: the words that were looked for stand on the page that was chosen itself.
        alone = [page.selected - page.steps.get("neighbor", 0) for page in inside]
        core = first + alone.index(max(alone))
        words = decode(tokens[core * PAGE : (core + 1) * PAGE]).split()
        quoted = " ".join(words[:WORDS]) + (" ..." if len(words) > WORDS else "")
        span = f"page {first}" if first == last else f"pages {first}-{last}"
        lines.append(f"{span} | {reasons} | fetched {fetched} of {len(inside)} | {quoted}")
    if len(runs) > GROUPS:
        lines.append(f"and {len(runs) - GROUPS:,} more runs of often selected pages")
    seldom = sum(page.selected > 0 for page in pages) - len(chosen)
    if seldom:
        lines.append(f"pages selected less often: {seldom:,}")
    return lines
