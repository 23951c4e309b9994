"""One frame of `kvring top`: a server's ring as tables, bars and strips of pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

KINDS = {
    "s": ("sink", "magenta"),
    "k": ("selected", "yellow"),
    "r": ("recent", "cyan"),
    "o": ("open", "blue"),
    "w": ("resident", "white"),
    ".": ("cold", "dim"),
}
"""Letters of a strip as GET /v1/ring sends them, what each means, and its colour."""

ROW = 100  # pages a line of a strip
ROWS = 8  # a longer strip has several pages a letter
BAR = 40


@dataclass(frozen=True)
class Look:
    """What was read off a server at one moment."""

    url: str
    ring: dict[str, Any]
    metrics: dict[str, float]


def draw(look: Look) -> RenderableType:
    """Raises KeyError or TypeError where the ring is not one."""
    from rich.console import Group
    from rich.text import Text

    ring = look.ring
    parts: list[Any] = [_head(look), Text(), _tiers(ring), Text(), _numbers(look)]
    for session in ring["sessions"]:
        parts += [Text(), _session(session), strip(session["strip"])]
    legend = Text("\n")
    for letter, (name, style) in KINDS.items():
        legend.append(f"{letter} {name}  ", style)
    return Group(*parts, legend)


def _head(look: Look) -> Any:
    from rich.text import Text

    ring, window = look.ring, look.ring["window"]
    shape = ", ".join(f"{name} {window[name]}" for name in ("sink", "selection", "recent", "free"))
    state = f"ring on ({shape})" if ring["ring"] else "ring off: the pool holds the whole context"
    head = Text(f"kvring | {ring['model']}", "bold", overflow="fold")
    context = f"context {ring['context_tokens']:,} tokens in {ring['kv_dtype']}"
    head.append(f" | {look.url} | {ring['backend']} | {context} | {state}", "not bold")
    return head


def _tiers(ring: dict[str, Any]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, label in (("pool", "device pool"), ("host", "host store")):
        tier = ring[name]
        share = f"{tier['used'] / max(1, tier['pages']):.0%}"
        bar = ProgressBar(max(1, tier["pages"]), tier["used"], width=BAR)
        text = f"{tier['used']:,} of {tier['pages']:,} pages, {format_bytes(tier['bytes'])}"
        grid.add_row(label, bar, share, text)
    return grid


def _numbers(look: Look) -> Any:
    from rich.table import Table

    queue, totals, metrics = look.ring["queue"], look.ring["totals"], look.metrics
    first = metrics.get("kvring_first_token_seconds_count", 0)
    mean = metrics.get("kvring_first_token_seconds_sum", 0.0) / first if first else None
    share = totals["cached_tokens"] / max(1, totals["prompt_tokens"])
    table = Table.grid(padding=(0, 3))
    rows = (
        ("active", f"{queue['active']} of {queue['max_active']}"),
        ("waiting", f"{queue['waiting']} of {queue['max_pending']}"),
        ("requests", f"{totals['requests']:,}"),
        ("refused", f"{metrics.get('kvring_refused_total', 0):,.0f}"),
        ("tokens cached", f"{totals['cached_tokens']:,} ({share:.0%})"),
        ("tok/s", f"{rate(look.ring):,.1f}" if look.ring["sessions"] else "-"),
        ("first token", f"{mean:.2f} s on average" if mean is not None else "-"),
        ("from host", format_bytes(totals["bytes_fetched"])),
    )
    table.add_row(*(name for name, _ in rows), style="dim")
    table.add_row(*(value for _, value in rows))
    return table


def rate(ring: dict[str, Any]) -> float:
    """Tokens a second of all that runs: read by those that read, written by those that write."""
    return sum(session[f"{session['state']}_tokens_per_second"] for session in ring["sessions"])


def _session(session: dict[str, Any]) -> Any:
    from rich.text import Text

    if session["state"] == "prefill":
        doing = f"reads {session['processed_tokens']:,} of {session['prompt_tokens']:,} tokens"
    else:
        doing = f"wrote {session['generated_tokens']:,} after {session['prompt_tokens']:,} tokens"
    pages = ", ".join(f"{count:,} {name}" for name, count in session["pages"].items() if count)
    over = " | larger than the pool" if session["over_pool"] else ""
    return Text(
        f"req#{session['request']} | {session['mode']} | {doing}, {session['cached_tokens']:,} cached | "
        f"{session[session['state'] + '_tokens_per_second']:,.1f} tok/s | {pages}{over}"
    )


def strip(letters: str) -> Any:
    """The pages in their order, a letter each; where there are too many, a letter shows the rarest kind of several."""
    from rich.text import Text

    group = max(1, -(-len(letters) // (ROW * ROWS)))
    marks = [
        next((kind for kind in "oksrw" if kind in letters[at : at + group]), ".")
        for at in range(0, len(letters), group)
    ]
    text = Text()
    for start in range(0, len(marks), ROW):
        text.append(f"{start * group:>6} ", "dim")
        for mark in marks[start : start + ROW]:
            text.append(mark, KINDS[mark][1])
        text.append("\n")
    text.rstrip()
    return text
