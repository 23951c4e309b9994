"""The risk: a second turn pays twice, requests starve each other, and what ends early keeps what it held."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise

import httpx
import pytest

from kvring_cli.server.service import ServeSettings
from tests.serving import Live, served

WINDOW = {"kvring": {"prefill": "window"}, "ignore_eos": True}
"""A long prompt in linear time: what these tests are about is the pages, not the answer."""


@pytest.fixture(scope="module")
def live(phantom):
    with served(phantom, ServeSettings(keep_alive=0.2), max_context=16384) as live:
        yield live


def follow(live: Live, messages, **fields):
    body = {"messages": messages, "max_tokens": 3, **fields}
    answer = live.http.post("/v1/chat/completions", json=body).json()
    messages.append(answer["choices"][0]["message"])
    return answer


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_second_turn_computes_its_new_tokens_only_and_comes_sooner(live, words):
    messages = [{"role": "user", "content": words(4500, 1)}]
    cold = follow(live, messages, **WINDOW)
    assert cached(cold) == 0 and cold["kvring"]["over_pool"]
    messages.append({"role": "user", "content": "And then?"})
    warm = follow(live, messages, **WINDOW)
    assert cached(warm) >= 0.98 * cold["usage"]["prompt_tokens"]
    assert warm["timings"]["cache_n"] + warm["timings"]["prompt_n"] == warm["usage"]["prompt_tokens"]
    assert warm["timings"]["prompt_ms"] < cold["timings"]["prompt_ms"] / 5
    again = follow(live, messages[:-1], **WINDOW)  # regenerate: all but the answer
    assert cached(again) >= cached(warm)


def test_conversations_a_b_a_both_keep_theirs(live, words):
    a, b = ([{"role": "user", "content": words(1500, seed)}] for seed in (2, 3))
    first = {name: follow(live, messages)["usage"]["prompt_tokens"] for name, messages in (("a", a), ("b", b))}
    for name, messages in (("a", a), ("b", b), ("a", a)):
        messages.append({"role": "user", "content": "Go on."})
        assert cached(follow(live, messages)) >= 0.9 * first[name]


def test_another_first_token_reuses_nothing(live, words):
    text = words(500, 4)
    follow(live, [{"role": "user", "content": text}])
    assert cached(follow(live, [{"role": "system", "content": "x"}, {"role": "user", "content": text}])) == 0


def test_an_answer_far_beyond_the_pool_is_not_cut_at_its_edge(live, words):
    pool = live.engine.capacity.pool_pages * 64
    answer = live.chat(words(pool + 500, 5), max_tokens=80, **WINDOW)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 80
    assert answer["kvring"]["over_pool"] and answer["kvring"]["recall"]["pages_selected"] > 0


def test_an_answer_that_grows_over_the_pool_goes_on(phantom, words):
    with served(phantom, kv_capacity=24 * 64, sink=128, prefill_chunk=128) as live:
        answer = live.chat(words(24 * 64 - 50, 6), max_tokens=120, **WINDOW)
        assert answer["usage"]["completion_tokens"] == 120 and answer["kvring"]["over_pool"]


def test_the_same_request_over_the_pool_twice_answers_the_same(live, words):
    text = words(5000, 7)
    first, second = (live.chat(text, max_tokens=12, **WINDOW) for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert cached(second) >= 4900
    live.audit()


def streaming(live: Live, content: str, **fields):
    body = {"messages": [{"role": "user", "content": content}], "stream": True, **fields}
    return live.http.stream("POST", "/v1/chat/completions", json=body)


def test_a_silent_prefill_sends_signs_of_life(live, words):
    with streaming(live, words(6000, 8), max_tokens=2, **WINDOW) as response:
        lines = list(response.iter_lines())
    assert "charset=utf-8" in response.headers["content-type"]
    alive = [line for line in lines if line.startswith(": keep-alive ")]
    done, total = map(int, alive[-1].removeprefix(": keep-alive ").split("/"))
    assert len(alive) >= 2 and 0 < done <= total
    assert lines[-2] == "data: [DONE]"


def test_progress_without_a_word_is_no_sign_of_life(live):
    """It was: chunks of 4.9 s put each sign off, and nothing was sent for 9.8 s."""
    from types import SimpleNamespace

    from engine.config import SamplingParams
    from engine.result import Progress, Result
    from kvring_cli.server.ask import Answer, Ask
    from kvring_cli.server.job import Admitted

    async def run() -> list[float]:
        engine, log = live.engine, SimpleNamespace(done=lambda answer: None)
        service = SimpleNamespace(worker=None, engine=engine, settings=ServeSettings(keep_alive=0.2), log=log)
        service.worker = SimpleNamespace(submit=lambda job: None, cancel=lambda job: None)
        prepared = engine.prepare("The river", SamplingParams(max_tokens=1))
        answer = Answer(service, Ask("openai-text", "The river", prepared.sampling), prepared)
        answer.stream.job.deliver([Admitted()])

        async def work() -> None:
            for done in range(8):
                await asyncio.sleep(0.15)
                answer.stream.job.deliver([Progress(done, 8, "exact")])
            answer.stream.job.deliver([Result("", (), "stop", None, None, None)])

        working, said = asyncio.ensure_future(work()), [time.perf_counter()]
        async for part in answer.parts():
            assert part is None
            said.append(time.perf_counter())
        await working
        return [after - before for before, after in pairwise(said)]

    silences = asyncio.run(run())
    assert len(silences) >= 4 and max(silences) < 0.28


@pytest.mark.parametrize("moment", ["prefill", "stream"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_holds_nothing(live, words, moment, stream):
    live.forget()
    text, tokens = (words(8000, 9), 2) if moment == "prefill" else (words(100, 9), 8000)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream, **WINDOW}
    ring = lambda: live.http.get("/v1/ring").json()["sessions"]  # noqa: E731
    client = httpx.Client(base_url=live.base, timeout=30 if stream else 1)  # a second later it hangs up by itself
    request = client.build_request("POST", "/v1/chat/completions", json=body)
    state = "prefill" if moment == "prefill" else "decode"
    if stream:
        response = client.send(request, stream=True)
        live.wait(lambda: any(session["state"] == state for session in ring()))
        response.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.send(request)
        assert any(session["state"] == state for session in ring())
    client.close()
    live.wait(live.idle, 5)
    assert live.audit()["sequences"] == 0
    stats = live.stats()
    assert stats["host_pages_used"] == stats["checkpoint_pages"]  # what is left is there for the next turn
    assert live.chat("Still there?")["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize("ticks", range(6))
def test_a_cancel_that_meets_an_event_is_not_lost(ticks):
    """It was: the client was gone and its answer went on to the last token."""
    from types import SimpleNamespace

    from kvring_cli.server.job import Admitted
    from kvring_cli.server.stream import Stream

    async def run() -> bool:
        worker = SimpleNamespace(submit=lambda job: None, cancel=lambda job: None)
        stream = Stream(worker, SimpleNamespace(tokens=[1], max_tokens=1), time.perf_counter())
        stream.job.deliver([Admitted()])

        async def read() -> None:
            await stream.begin(5, 5)
            async for _ in stream.events(lambda: time.perf_counter() + 5):
                pass

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0.05)
        stream.job.deliver([object()])
        for _ in range(ticks):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,), timeout=1)
        return reading.cancelled()

    assert asyncio.run(run())


def test_four_at_once_are_served_together_and_answer_as_alone(live, words):
    texts = [words(200 + 50 * n, 20 + n) for n in range(4)]
    alone = [live.chat(text, max_tokens=20, ignore_eos=True)["choices"][0]["message"] for text in texts]
    together: dict[int, object] = {}
    seen = []

    def one(n):
        together[n] = live.chat(texts[n], max_tokens=20, ignore_eos=True)["choices"][0]["message"]

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(live.http.get("/v1/ring").json()["queue"]["active"])
        time.sleep(0.01)
    assert [together[n] for n in range(4)] == alone and max(seen) == 4


def test_a_long_prompt_does_not_starve_a_short_one(live, words):
    done = {}

    def one(name, text, **fields):
        live.chat(text, **fields)
        done[name] = time.monotonic()

    long = threading.Thread(target=one, args=("long", words(6000, 30)), kwargs=WINDOW)
    long.start()
    live.wait(lambda: not live.idle())
    one("short", "Hello")
    long.join()
    assert done["short"] < done["long"]


def test_a_slow_reader_holds_up_nobody(live, words):
    with streaming(live, "Hello", max_tokens=150, ignore_eos=True) as response:
        lines = response.iter_lines()
        next(lines)
        began = time.monotonic()
        live.chat("Hi")
        assert time.monotonic() - began < 5
        live.wait(live.idle)
        assert list(lines)[-2] == "data: [DONE]"


def test_a_crowd_is_answered_or_refused_by_rule(live, words):
    """A small one of what a load test does with 200 clients."""
    ends: list[object] = []

    def one(n):
        for turn in range(2):
            body = {"messages": [{"role": "user", "content": words(30 * (n % 5 + 1), n + turn)}], "max_tokens": 2}
            response = httpx.post(f"{live.base}/v1/chat/completions", json=body, timeout=60)
            ends.append(response.status_code if response.is_success else response.json()["error"]["code"])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 80 and set(ends) == {200, "server_overloaded"}
    live.wait(live.idle)
    live.audit()


def test_a_character_is_never_cut_between_two_events(live):
    from tests.serving import scripted

    text = "naïve – 漢字 🙂🙂 ẞ"
    with scripted(live, text), streaming(live, "Say it") as response:
        raw = b"".join(response.iter_raw())
    events = [event for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    pieces = [json.loads(event[6:].decode())["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces) and len(pieces) > 5
