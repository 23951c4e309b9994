"""multi-needle: a 42,355-token conversation through a pool of 63 pages, six trials of two turns, three kinds of fact.

One document a task and seed is prefilled once; every trial of every arm resumes from its checkpoint. A trial asks for
one fact, keeps the answer, and asks for another: turn 2 goes through turn 1's checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter

from engine.config import PAGE, RecallParams, SamplingParams
from gates.arms import ArmSpec, Settings, blinding, excluding, instrument, plain, straddling
from gates.context import SMALLEST_POOL, Context
from gates.frozen import Arms, Frozen, warnings_checked
from gates.haystack import GATE_TOKENS, Document
from gates.verdict import Check, Report

POOL = 4032
LARGER_POOL = 17_920
LARGER = "pool 17,920"
TASKS = ("keyed", "disjoint", "lines")
SEAM = "seam"
"""Keyed facts whose values begin two tokens before a page ends; only the following page has the rest."""

LEXICAL = "scorer lexical"
SCORED_PAGES = 6
TOKEN = f"token, {SCORED_PAGES} pages"
ENGLISH = 4
"""Pages to a "the", at most, where words can't find a disjoint fact: it shares hardly another with its question, and in
Chinese filler, where "the" stands in the facts only, lexical search finds half of them."""

TAIL_PAGES = 3
"""Budget of the query-tail and seam twins: one page and its neighbours. The question takes about 14 tokens; a tail of
16 finds 48 of 48 pages first, 64 finds 34 and 256 finds 20: the green twin is 16, and red is at most half."""


def specs(prefill: str, excluded: Settings) -> list[ArmSpec]:
    """Every arm. `excluded` gives the settings that hide a fact's own pages from the selection."""

    def one_shot(**changes: object) -> Settings:
        return plain(prefill, scorer="lexical", budget_pages=TAIL_PAGES, **changes)

    def scored(scorer: str) -> Settings:
        """The question too goes through the selection: read exactly, it tells 4 of 12 values whatever is selected."""
        return plain("window", scorer=scorer, budget_pages=SCORED_PAGES)

    keyed, seam = ("keyed",), (SEAM,)
    return [
        ArmSpec("dense", "dense", plain(prefill, decode="exact")),
        ArmSpec("default", "positive", plain(prefill)),
        ArmSpec(LARGER, "positive", plain(prefill), TASKS, where="larger", quick=False),
        ArmSpec("fitting", "positive", plain(prefill), TASKS, where="fitting", quick=False),
        ArmSpec("recall off", "control", plain(prefill, decode="window"), TASKS, twin="default", warns=True),
        ArmSpec("newest pages", "control", plain(prefill, control="newest"), TASKS, twin="default", quick=False),
        ArmSpec("random pages", "control", plain(prefill, control="random"), TASKS, twin="default", quick=False),
        ArmSpec("fact excluded", "control", excluded, TASKS, twin="default"),
        ArmSpec(LEXICAL, "control", plain(prefill, scorer="lexical"), ("disjoint",), twin="default"),
        ArmSpec(TOKEN, "positive", scored("token"), keyed, quick=False),
        ArmSpec(f"mean, {SCORED_PAGES} pages", "control", scored("mean"), keyed, twin=TOKEN, quick=False),
        ArmSpec("lexical, tail 16", "positive", one_shot(query_tail=16), keyed, quick=False),
        ArmSpec(
            "lexical, tail 256",
            "control",
            one_shot(query_tail=256),
            keyed,
            twin="lexical, tail 16",
            quick=False,
            red=0.5,
        ),
        ArmSpec("lexical, neighbours 1", "positive", one_shot(query_tail=16, neighbor_pages=1), seam),
        ArmSpec(
            "lexical, neighbours 0",
            "control",
            one_shot(query_tail=16, neighbor_pages=0),
            seam,
            twin="lexical, neighbours 1",
        ),
    ]


def run(context: Context, tokens: int = GATE_TOKENS, trials: int = 6) -> Report:
    """The gate of spec/gates.md; `--quick`: fewer tasks, trials and arms."""
    quick = context.options.quick
    tasks = ("keyed", "disjoint", SEAM) if quick else (*TASKS, SEAM)
    trials = min(trials, 2) if quick else trials
    report = Report("multi-needle", environment=context.environment(), blinding_switches=blinding(context.config))
    tokens = context.fitted(context.options.length or tokens, report)
    context.outgrown(POOL, tokens)
    seam_tokens = max(tokens // 4, 2 * (context.config.kv_capacity or SMALLEST_POOL))  # lengths don't matter to it
    larger = tokens >= 2 * LARGER_POOL
    if not (larger or quick):
        report.not_run.append(f"{LARGER}: {tokens:,} tokens are less than two such pools")
    work = [(seed, task) for seed in context.options.seed_numbers for task in tasks]
    arms: Arms = {}
    shares, seams = [], []
    for number, (seed, task) in enumerate(work):

        def say(what: str, share: float, number: int = number) -> None:
            context.say(what, (number + share) / len(work))

        document = context.document(task, seam_tokens if task == SEAM else tokens, seed, asked=2 * trials)
        say(f"{task}: {document.tokens:,} tokens, prefill {context.prefill}", 0.0)
        pools = {"pool": context.pool(POOL, document.tokens), "larger": LARGER_POOL, "fitting": document.tokens + 1024}
        with Frozen(context, document, pools) as frozen:
            chosen = specs(context.prefill, excluding(frozen.main, document, context.prefill))
            chosen = [s for s in chosen if task in (s.tasks or (task,)) and (s.quick or not quick)]
            chosen = [spec for spec in chosen if larger or spec.name != LARGER]
            if not common(document):
                chosen = [spec for spec in chosen if spec.name != LEXICAL]
                note = f'{LEXICAL} on disjoint facts: "the" is so rare in this haystack that it leads to them'
                report.not_run += [note] if task == "disjoint" and note not in report.not_run else []
            if task == SEAM:
                seams.append((straddling(frozen.main, document), len(document.asked)))
            else:
                shares.append(_shares(frozen, document, context.prefill))
            frozen.run(chosen, arms, say)
    report.arms = list(arms.values())
    on_seam, asked = (sum(column) for column in zip(*seams, strict=True))
    report.checks = [
        *instrument(report.arms),
        *warnings_checked(arms),
        Check("instrument, seam values", on_seam == asked, f"{on_seam} of {asked} lie across a page boundary"),
        *_sources(sum(shares, Counter()), context.config.neighbor_pages),
    ]
    return report.judge()


def common(document: Document) -> bool:
    """Whether the words that facts share with their questions stand everywhere, so that they lead nowhere."""
    return ENGLISH * len(re.findall(r"\bthe\b", document.text, re.IGNORECASE)) * PAGE >= document.tokens


def _shares(frozen: Frozen, document: Document, prefill: str) -> Counter[str]:
    """How often pages were selected for each reason while the first question was answered."""
    prepared = frozen.main.prepare(
        document.messages(document.asked[0]),
        SamplingParams(max_tokens=8),
        RecallParams(prefill=prefill, scorer="fused", explain=True),
    )
    found: Counter[str] = Counter()
    for page in frozen.main.complete(prepared).pages:
        found.update(page.steps)
    return found


def _sources(found: Counter[str], neighbors: int) -> list[Check]:
    """Each source of the fused scorer gets its share of the budget; a quota of zero would hide behind the other."""
    wanted = ["key", "lexical", *(["neighbor"] if neighbors else [])]
    detail = ", ".join(f"{name} {found[name]:,}" for name in wanted)
    return [Check("instrument, fused selects by key and by word", all(found[name] for name in wanted), detail)]
