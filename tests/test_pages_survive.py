"""The risk: a page is lost, doubled, stale or leaked when a request ends in any way but the good one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.config import RecallParams, SamplingParams
from engine.errors import EngineError, KVRingError, OutOfMemoryError
from engine.faults import damage_checkpoint, shuffle_checkpoints
from engine.kv.host import HostStore
from engine.kv.transfer import Transfer
from engine.recall.digest import encode_keys
from engine.result import AuditError, Progress, Token

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def test_the_invariants_hold_after_every_step(make_engine, words):
    engine = make_engine(verify_pages=True)
    for mode in ("window", "recall", "exact"):
        for _ in engine.generate(engine.prepare(words(2400, 1), SHORT, RecallParams(prefill=mode, decode=mode))):
            engine.audit(deep=True)
        engine.audit(deep=True)


def test_a_cancelled_prefill_leaves_no_page_behind(make_engine, words):
    engine = make_engine(reuse=False)
    for stop_after in (1, 2, 4):
        events = engine.generate(engine.prepare(words(2400), SHORT, RecallParams(prefill="window")))
        for _ in range(stop_after):
            assert isinstance(next(events), Progress)
        events.close()
        engine.audit(deep=True)
        assert engine.stats()["host_pages_used"] == 0
    assert engine.complete(engine.prepare("The river", SHORT)).usage.generated == 4


def test_a_cancelled_answer_keeps_its_prompt_as_a_checkpoint(make_engine, words):
    engine = make_engine()
    prompt = words(2400)
    events = engine.generate(engine.prepare(prompt, SamplingParams(max_tokens=50, ignore_eos=True)))
    while not isinstance(next(events), Token):
        pass
    events.close()
    engine.audit(deep=True)
    again = engine.complete(engine.prepare(prompt, SHORT))
    assert again.usage.cached >= again.usage.prompt - 64


@pytest.mark.parametrize("broken", ["write_through", "fetch", "stage", "place"])
def test_a_copy_that_fails_at_any_point_fails_its_request_only(make_engine, words, monkeypatch, broken):
    """For each k, the k-th call of the copy raises; the audit holds and the next request is right."""
    engine = make_engine(max_context=2816, kv_capacity=26 * 64)
    owner = Transfer if broken != "place" else type(engine._runner.pool)
    modes = RecallParams(prefill="exact", decode="exact") if broken == "stage" else RecallParams(prefill="window")
    text = words(2400)
    expected = engine.complete(engine.prepare(text, SHORT, modes)).tokens
    real, failed = getattr(owner, broken), 0
    for k in [0, 1, 2, 5, 13, 34, 55]:
        engine.forget()
        left = [k]

        def sometimes(*arguments, left=left):
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("injected")
            return real(*arguments)

        monkeypatch.setattr(owner, broken, sometimes)
        try:
            engine.complete(engine.prepare(text, SHORT, modes))
        except RuntimeError:
            failed += 1
        monkeypatch.setattr(owner, broken, real)
        engine.audit(deep=True)
        assert engine.complete(engine.prepare(text, SHORT, modes)).tokens == expected
        engine.audit(deep=True)
    assert failed >= 4


def test_what_is_loaded_from_the_host_has_arrived_there(make_engine, words):
    """A scorer that is not the engine's makes its digests from the host, also of a page whose copy is under way."""
    engine = make_engine()
    engine.complete(engine.prepare(words(300), SHORT))
    host, transfer, page = engine._runner.host, engine._runner.transfer, engine._prefix.pages()[0]
    wanted = host.data[page].clone()

    class Late:
        query, synchronize = (lambda self: False), (lambda self: host.data[page].copy_(wanted))

    host.data[page], host.replica[page], engine._runner.pool.pinned[page] = 0, False, True
    transfer._in_flight.append(([page], Late()))
    assert torch.equal(transfer.load(0, np.array([page]))[0], wanted[0])


def test_out_of_memory_in_one_request_is_an_error_of_that_request(make_engine, words, monkeypatch):
    engine = make_engine()
    real = type(engine.model.transformer).logits

    def exhausted(self, hidden):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setattr(type(engine.model.transformer), "logits", exhausted)
    with pytest.raises(OutOfMemoryError) as caught:
        engine.complete(engine.prepare(words(300), SHORT))
    assert caught.value.fix
    monkeypatch.setattr(type(engine.model.transformer), "logits", real)
    engine.audit(deep=True)
    assert engine.complete(engine.prepare(words(300), SHORT)).usage.generated == 4


def test_an_interrupt_inside_a_step_undoes_the_step(make_engine, words, monkeypatch):
    engine = make_engine()
    calls = [0]
    real = Transfer.write_through

    def interrupted(self, pages):
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(self, pages)

    monkeypatch.setattr(Transfer, "write_through", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.complete(engine.prepare(words(2400), SHORT, RecallParams(prefill="window")))
    engine.audit(deep=True)
    assert engine.complete(engine.prepare(words(2400), SHORT, RecallParams(prefill="window"))).usage.cached >= 256


def test_random_cancels_and_resumes_leave_the_audit_clean(make_engine, words):
    rng = random.Random(7)
    engine = make_engine(max_context=1600, kv_capacity=14 * 64, prefill_chunk=128, sink=64)
    prompts = [words(rng.randint(5, 1000), seed) for seed in range(6)]
    for number in range(250):
        modes = RecallParams(prefill=rng.choice(["auto", "window", "recall", "exact"]))
        events = engine.generate(engine.prepare(rng.choice(prompts), SHORT, modes))
        for _ in range(rng.randint(0, 6)):
            if next(events, None) is None:
                break
        events.close()
        engine.audit(deep=number % 50 == 0)


def test_a_flipped_bit_is_an_engine_error_and_never_an_answer(make_engine, words):
    engine = make_engine(verify_pages=True)
    modes = RecallParams(prefill="window", decode="exact")
    engine.complete(engine.prepare(words(2400), SHORT, modes))
    page = damage_checkpoint(engine)
    with pytest.raises(EngineError, match="came back changed"):
        engine.complete(engine.prepare(words(2400), SHORT, modes))
    damage_checkpoint(engine, page)
    assert engine.complete(engine.prepare(words(2400), SHORT, modes)).usage.cached > 0


def test_a_copy_that_writes_something_else_is_caught_by_the_checksum(make_engine, words, monkeypatch):
    """The checksum is of what the device held, so a bad copy to the host can't vouch for itself."""
    real = HostStore.seal

    def corrupt(self, pages, source=None):
        real(self, pages, source)
        self.data[pages[0]].view(torch.uint8).view(-1)[0] ^= 1

    engine = make_engine(verify_pages=True, reuse=False)
    monkeypatch.setattr(HostStore, "seal", corrupt)
    with pytest.raises(EngineError, match="came back changed"):
        engine.complete(engine.prepare(words(2400), SHORT, RecallParams(prefill="exact", decode="exact")))
    monkeypatch.setattr(HostStore, "seal", real)
    engine.forget()


def test_the_audit_sees_a_broken_table(make_engine, words):
    """The control of every audit above."""
    engine = make_engine()
    engine.complete(engine.prepare(words(600), SHORT))
    pool = engine._runner.pool
    page = int(pool.page_in[0, 0])
    pool.slot_of[0, page] = 5
    with pytest.raises(AuditError, match="inverse"):
        engine.audit()
    pool.slot_of[0, page] = 0
    host = engine._runner.host
    host.references[page] += 1
    with pytest.raises(AuditError, match="references"):
        engine.audit()
    host.references[page] -= 1
    engine.audit()


def test_a_prepared_prompt_is_used_once_and_a_closed_engine_refuses(make_engine):
    engine = make_engine()
    prepared = engine.prepare("The river", SHORT)
    engine.complete(prepared)
    with pytest.raises(KVRingError):
        engine.complete(prepared)
    engine.close()
    with pytest.raises(KVRingError, match="closed"):
        engine.complete(engine.prepare("The river", SHORT))


def test_shuffled_pages_keep_the_digests_of_what_stood_there(make_engine, words):
    """An exact prefill scores nothing; digests that were made after the shuffle led the control to the moved bytes."""
    engine = make_engine()
    engine.complete(engine.prepare(words(3000), SamplingParams(max_tokens=1), RecallParams("exact")))
    pages, runner = np.array(engine._prefix.pages()), engine._runner
    wanted = [encode_keys(runner.host.data[pages, layer, 0])[0] for layer in range(runner.host.shape.layers)]
    shuffle_checkpoints(engine, 0)
    for layer, codes in enumerate(wanted):
        assert torch.equal(runner.digests.read_codes(layer, pages)[0].transpose(0, 1), codes)
        assert not torch.equal(encode_keys(runner.host.data[pages, layer, 0])[0], codes)
