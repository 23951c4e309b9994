"""Reports as one HTML file that needs nothing else: verdict, arms, maps, a failing trial's pages, how to repeat it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from engine.units import MIB
from gates.verdict import Arm, Outcome, Report, worst

MAPPED = 4  # outcomes that make a map worth drawing
STRIPS = 3  # failing trials that are drawn, a gate
DRAWN = ("recall", "recall off")  # beside the positive arms
_MEANS = (("k", "selected"), ("w", "seen: sink, recent, open"), ("o", "in the pool, not seen"), ("", "out of sight"))


def to_html(reports: Sequence[Report], command: str) -> str:
    """The whole page; `command` is what repeats the run."""
    verdict = worst(reports)
    body = [
        f'<div class="head"><h1>kvring gate</h1>{_badge(verdict)}</div>',
        '<p class="soft">Each gate proves one claim on the machine named below, beside controls that must fail.</p>',
        f"<h3>Repeat it</h3><pre>{escape(command)}</pre>",
        *(_section(report) for report in reports),
    ]
    page = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return page.substitute(title=escape(verdict), body="\n".join(body))


def _section(report: Report) -> str:
    parts = [
        f'<div class="head"><h2>{escape(report.gate)}</h2>{_badge(report.verdict)}'
        f'<span class="soft">{report.seconds:,.0f} s</span></div>',
        _list(report.reasons, "no"),
        _arms(report.arms),
        _maps(report.arms),
        _strips(report.arms),
        _checks(report),
        _part("Notes", _list([*report.notes, *(f"not run: {what}" for what in report.not_run)], "soft")),
        _part("Environment", _rows(report.environment)),
    ]
    return f"<section>{''.join(parts)}</section>"


def _arms(arms: Sequence[Arm]) -> str:
    if not arms:
        return ""
    heads = ("arm", "task", "must be", "hits", "95 % interval", "silent wrong", "hidden", "MiB fetched", "seconds")
    rows = []
    for arm in arms:
        low, high = arm.interval
        bar = (
            f'<div class="rate" title="{low:.1%} to {high:.1%}"><i style="left:{low:.1%};width:{high - low:.1%}"></i>'
            f'<b style="left:{arm.hits / max(1, arm.trials):.1%}"></b></div>'
        )
        must, right = ("red", arm.red) if arm.kind == "control" else ("green", arm.green)
        must, right = ("-", True) if arm.kind == "shown" else (must, right)
        twin = f'<br><span class="soft">twin: {escape(arm.twin)}</span>' if arm.twin else ""
        name = f'<span title="{escape(arm.settings)}">{escape(arm.name)}</span>{twin}'
        cells = [
            name,
            escape(arm.task),
            must,
            f'<span class="{"yes" if right else "no"}">{arm.hits}/{arm.trials}</span>',
        ]
        cells += [bar, str(arm.silent_wrong), f"{arm.hidden_pages:,}", f"{arm.bytes_fetched / MIB:,.1f}"]
        rows.append([*cells, f"{arm.seconds:,.1f}"])
    return _table(heads, rows, numbers=(5, 6, 7, 8))


def _maps(arms: Iterable[Arm]) -> str:
    """Length by depth, for the arms that a reader compares."""
    drawn = [_map(arm) for arm in arms if arm.trials >= MAPPED and (arm.kind == "positive" or arm.name in DRAWN)]
    return (
        _part("Hits by depth (columns) and prompt length (rows)", f'<div class="maps">{"".join(drawn)}</div>')
        if drawn
        else ""
    )


def _map(arm: Arm) -> str:
    cells: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for outcome in arm.outcomes:
        cells[round(outcome.tokens / 1000), min(9, int(outcome.depth * 10))].append(outcome.hit)
    lengths, depths = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    rows = []
    for length in lengths:
        line = [f"<th>{length}K</th>"]
        for depth in depths:
            hits = cells.get((length, depth))
            if hits is None:
                line.append("<td></td>")
                continue
            colour = f"hsl({120 * sum(hits) / len(hits):.0f} 55% 62%)"
            line.append(f'<td><span style="background:{colour}">{sum(hits)}/{len(hits)}</span></td>')
        rows.append(f"<tr>{''.join(line)}</tr>")
    head = "".join(f"<th>{depth * 10}%</th>" for depth in depths)
    return f'<div>{escape(arm.label)}<table class="heat"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _strips(arms: Iterable[Arm]) -> str:
    missed = [(arm, outcome) for arm in arms for outcome in arm.outcomes if outcome.strip][:STRIPS]
    if not missed:
        return ""
    swatch = '<i class="strip" style="background:var(--{})"></i>{}'
    key = "".join(swatch.format(_COLOUR[sign], what) for sign, what in _MEANS)
    drawn = "".join(_strip(arm, outcome) for arm, outcome in missed)
    return _part("Failing trials, page by page", f'<p class="key soft">{key}<i class="fact"></i>the fact</p>{drawn}')


_COLOUR = {"k": "key", "w": "window", "o": "pool", "": "cold"}


def _strip(arm: Arm, outcome: Outcome) -> str:
    facts = set(outcome.pages)
    pages = "".join(
        f'<i class="{"" if sign == "." else sign}{" fact" if page in facts else ""}" title="page {page}"></i>'
        for page, sign in enumerate(outcome.strip)
    )
    said = f"turn {outcome.turn}: expected {outcome.expected}, said '{outcome.said[:120]}'"
    return f'<div><b>{escape(arm.label)}</b>, {escape(said)}</div><div class="strip">{pages}</div>'


def _checks(report: Report) -> str:
    mark = {True: '<span class="yes">ok</span>', False: '<span class="no">NO</span>'}
    rows = [[mark[check.ok], escape(check.name), escape(check.detail)] for check in report.checks]
    return _part("Checks", _table(("", "check", "what was found"), rows)) if rows else ""


def _rows(values: dict[str, object]) -> str:
    def shown(value: object) -> str:
        return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)

    rows = [[escape(name), f"<code>{escape(shown(value))}</code>"] for name, value in values.items()]
    return _table(("", ""), rows) if rows else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: tuple[int, ...] = ()) -> str:
    kind: Callable[[int], str] = lambda column: ' class="n"' if column in numbers else ""  # noqa: E731
    head = "".join(f"<th{kind(i)}>{text}</th>" for i, text in enumerate(heads))
    lines = ("".join(f"<td{kind(i)}>{cell}</td>" for i, cell in enumerate(row)) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _part(title: str, inner: str) -> str:
    return f"<h3>{title}</h3>{inner}" if inner else ""


def _list(lines: Sequence[str], kind: str) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""


def _badge(verdict: str) -> str:
    return f'<span class="badge {verdict.split()[0]}">{escape(verdict)}</span>'
