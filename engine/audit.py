"""The invariants of kv/page.py, checked against the tables as they stand. Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from engine.config import PAGE
from engine.prefix import PrefixIndex
from engine.result import AuditError
from engine.runner import Runner
from engine.sequence import Sequence


def audit(runner: Runner, sequences: Iterable[Sequence], prefix: PrefixIndex, deep: bool = False) -> dict[str, int]:
    """Counts of what was checked; AuditError naming every invariant that does not hold. `deep` compares bytes too."""
    pool, host, transfer = runner.pool, runner.host, runner.transfer
    sequences = list(sequences)
    in_flight = set(transfer.in_flight)
    faults: list[str] = []

    opened: set[int] = set()
    for sequence in sequences:
        for index, page in enumerate(sequence.pages):
            if index < sequence.closed:
                if not host.replica[page] and page not in in_flight:
                    faults.append(f"1: closed page {page} has no host replica and no copy in flight")
            else:
                opened.add(page)
                if not pool.pinned[page] or (pool.slot_of[:, page] < 0).any():
                    faults.append(f"1: open page {page} is not in the pool in every layer")
        if len(sequence.pages) != -(-sequence.length // PAGE):
            faults.append(f"1: a sequence of {sequence.length} tokens has {len(sequence.pages)} pages")

    for layer in range(pool.shape.layers):
        slots, pages = pool.page_in[layer], pool.slot_of[layer]
        used = np.flatnonzero(slots >= 0)
        if len(np.unique(slots[used])) != len(used):
            faults.append(f"2: a page has two slots in layer {layer}")
        if (pages[slots[used]] != used).any() or int((pages >= 0).sum()) != len(used):
            faults.append(f"2: the tables of layer {layer} are not each other's inverse")
        if (host.references[slots[used]] == 0).any():
            faults.append(f"2: a slot of layer {layer} holds a page that nobody owns")

    pinned = set(np.flatnonzero(pool.pinned).tolist())
    if pinned != opened | in_flight:
        faults.append(f"5: pinned pages {sorted(pinned)} are not the open ones and those in flight")
    for page in prefix.pages():
        if not host.replica[page]:
            faults.append(f"6: checkpoint page {page} has no complete replica")

    faults += _tails(runner, sequences)
    held = Counter(page for sequence in sequences for page in sequence.pages) + Counter(prefix.pages())
    for page in np.flatnonzero(host.references).tolist():
        if held[page] != host.references[page]:
            faults.append(f"7: page {page} has {host.references[page]} references and {held[page]} holders")
    if any(host.references[page] == 0 for page in held):
        faults.append("7: a page is held that was freed")
    if host.free_pages + int((host.references > 0).sum()) != host.pages:
        faults.append("7: free and held pages do not add up to the store")
    if deep:
        faults += _differing(runner)
    if faults:
        raise AuditError(
            "the audit failed: " + "; ".join(faults[:8]), "this is a bug in kvring: report it with this line"
        )
    return {
        "sequences": len(sequences),
        "open": len(opened),
        "in_flight": len(in_flight),
        "checkpoint_pages": len(prefix),
    }


def _tails(runner: Runner, sequences: list[Sequence]) -> list[str]:
    if runner.tails is None:
        return []
    faults, shape = [], runner.tails.shape
    for sequence in sequences:
        if sequence.length and sequence.tail is None:
            faults.append(f"9: a sequence of {sequence.length} tokens has no tail")
        elif sequence.length and sequence.tail.start > max(0, sequence.closed - shape.pages) * PAGE:
            faults.append(f"9: a tail begins at {sequence.tail.start} in a sequence of {sequence.length} tokens")
    for page, part in runner.tails.snapshots().items():
        if runner.host.references[page] == 0:
            faults.append(f"9: a snapshot stands at the end of page {page}, which nobody owns")
        if part.shape[3] % PAGE or part.shape[3] > shape.pages * PAGE:
            faults.append(f"9: the snapshot of page {page} holds {part.shape[3]} tokens")
    return faults


def _differing(runner: Runner) -> list[str]:
    pool, host, faults = runner.pool, runner.host, []
    for layer in range(pool.shape.layers):
        for slot in np.flatnonzero(pool.page_in[layer] >= 0).tolist():
            page = int(pool.page_in[layer, slot])
            same = host.replica[page] and (pool.data[layer, slot].cpu() == host.data[page, layer]).all()
            if host.replica[page] and not same:
                faults.append(f"8: page {page} of layer {layer} differs between pool and host")
    return faults
