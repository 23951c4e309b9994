"""The risk: a fault of the engine that no gate sees. Each is put into the engine; the gate named beside it turns red.

The table FAULTS is the one of the README. Documents are small, so that the whole table takes a minute or two; every
gate first passes at the same size without a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import engine.recall.recall as recall
import engine.recall.select as select
from engine.config import PAGE, EngineConfig
from engine.kv.transfer import Transfer
from engine.recall.digest import Digests
from engine.recall.window import Span
from engine.session import Session
from engine.step import Frame
from gates.context import Context
from gates.options import GateOptions
from gates.registry import known, run_in
from tests.models import phantom_folder

SIZES = {
    "multi-needle": {"tokens": 8_000, "trials": 1},
    "long-problem": {"tokens": 12_000, "trials": 1},
    "perplexity": {"tokens": 4_096},
    "reuse": {"tokens": 6_000},
    "agreement": {"tokens": 6_000},
}


@pytest.fixture(scope="module")
def gate(phantom) -> Callable:
    """gate(name): its report at the size of SIZES."""
    context = Context(EngineConfig(str(phantom_folder())), phantom, GateOptions(quick=True), lambda what, share: None)
    return lambda name: run_in(name, context, **SIZES.get(name, {}))


@pytest.mark.parametrize("name", known(["all"]))
def test_every_gate_passes_on_the_phantom_here(name, gate):
    report = gate(name)
    assert report.verdict == "PASS", report.reasons
    controls = [arm for arm in report.arms if arm.kind == "control"] + [c for c in report.checks if c.control]
    assert controls, "a gate without a control proves nothing"
    assert report.to_json()["exit_code"] == 0


def recall_off_in_silence(patch):
    patch.setattr(Session, "_warnings", lambda self, report: ())


def selection_never_made(patch):
    patch.setattr(recall, "choose", lambda *_, **__: select.EMPTY)


def selection_shuffled(patch):
    chosen = recall.choose

    def shuffled(scores, eligible, budget, **more):
        found = chosen(scores, eligible, budget, **more)
        pages = np.random.default_rng(len(eligible)).choice(np.flatnonzero(eligible), len(found.pages), replace=False)
        return replace(found, pages=np.sort(pages))

    patch.setattr(recall, "choose", shuffled)


def newest_instead_of_scored(patch):
    def newest(scores, eligible, budget, **_):
        return recall.control("newest", eligible, budget, None)

    patch.setattr(recall, "choose", newest)


def values_swapped(patch):
    load = Transfer.load

    def swapped(self, layer, pages):
        kv = load(self, layer, pages).clone()
        kv[:, 1] = kv[:, 1].flip(0)
        return kv

    patch.setattr(Transfer, "load", swapped)


def digest_stale(patch):
    patch.setattr(Digests, "forget", lambda self, pages: None)


def keys_at_the_wrong_offset(patch):
    patch.setattr(Frame, "offset_turns", property(lambda self: self.rope.cos_sin(self.rows % PAGE + 1)))


def window_a_page_short(patch):
    window = Span.window

    def short(self, selected):
        pages = window(self, selected)
        return pages[pages != self.recent] if self.past - self.recent > 1 else pages

    patch.setattr(Span, "window", short)


def sink_dropped(patch):
    window = Span.window
    patch.setattr(Span, "window", lambda self, selected: window(self, selected)[self.sink :])


def neighbours_dropped(patch):
    take = select._take

    def alone(reasons, rank, eligible, count, neighbors, *more):
        take(reasons, rank, eligible, count, 0, *more)

    patch.setattr(select, "_take", alone)


def host_copy_skipped(patch):
    patch.setattr(Transfer, "write_through", lambda self, pages: self._complete(pages) if pages else None)


def resumed_a_token_late(patch):
    resume = Session.resume

    def late(self, pages, tags):
        resume(self, pages, tags)
        if self.cached:
            self.sequence.tokens = self.prepared.tokens[: self.cached + 1]

    patch.setattr(Session, "resume", late)


def cached_over_reported(patch):
    result = Session.result

    def more(self):
        made = result(self)
        usage = made.usage
        extra = PAGE if usage.cached else 0
        return replace(made, usage=replace(usage, cached=usage.cached + extra, computed=usage.computed - extra))

    patch.setattr(Session, "result", more)


def no_quota_for_words(patch):
    patch.setattr(recall, "LEXICAL_SHARE", 10**9)


def no_quota_for_keys(patch):
    choose = recall.choose

    def by_words(scores, eligible, budget, *, lexical=None, **more):
        return choose(None if lexical is not None else scores, eligible, budget, lexical=lexical, **more)

    patch.setattr(recall, "choose", by_words)


FAULTS = [
    (recall_off_in_silence, "multi-needle", "every answer says so"),
    (selection_never_made, "multi-needle", "default"),
    (selection_shuffled, "multi-needle", "default"),
    (newest_instead_of_scored, "multi-needle", "default"),
    (neighbours_dropped, "multi-needle", "neighbours 1"),
    (no_quota_for_words, "multi-needle", "by key and by word"),
    (no_quota_for_keys, "multi-needle", "disjoint default"),
    (values_swapped, "lossless", "came back changed"),
    (host_copy_skipped, "lossless", "came back changed"),
    (keys_at_the_wrong_offset, "fits", "against a pass without pages"),
    (window_a_page_short, "fits", "the window against its mask"),
    (sink_dropped, "fits", "the window against its mask"),
    (resumed_a_token_late, "reuse", "logprobs of a resumed turn"),
    (cached_over_reported, "reuse", "counted"),
    (digest_stale, "resend", "another document in the same pages"),
]


@pytest.mark.parametrize(("fault", "name", "reason"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
def test_a_fault_of_the_engine_turns_its_gate_red(fault, name, reason, gate, monkeypatch):
    fault(monkeypatch)
    report = gate(name)
    assert report.verdict in ("FAIL", "BLIND", "WEAK MODEL")
    found = [arm.label for arm in report.arms if arm.kind == "positive" and not arm.green]
    found += [f"{check.name}: {check.detail}" for check in report.checks if not check.ok]
    assert any(reason in line for line in found), (found, report.reasons)
