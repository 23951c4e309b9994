"""The risk: the command starts otherwise than it says, or leaves something behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from kvring_cli.app import call
from kvring_cli.server.worker import most_active

LINES = [
    r"device profile \S+: \d+ routed keys \(.+\)",
    r"\[ring\] content scoring ON by default \(the ring is configured\)",
    r"engine ready \| phantom \| total \d+\.\ds \| weights \d+\.\d\d GiB",
    r"capacity \| KV 2,560 tokens, fp32, explicit \| pages 40/128 \| runtime \d+\.\d\d GiB \| free \d+\.\d\d GiB",
    r"\[ring\] budgets: sink=4, selection=\d+, recent=\d+, free=\d+ \(pool 40\) \[sum == pool: yes\]",
    r"host store 0\.12 GiB, committed, 4\.0 contexts of 8,192 tokens \(auto: 4 contexts, or 262,144 tokens\) \| ",
    r"reuse host-backed: on",
    r"kv fp32 \(auto: memory holds the context in the model.s own fp32\)",
    r"compute \| cpu \(auto: no CUDA device\) \| float32 \(auto: .+\) \| threads \d+ \(.+\)",
    r"max_tokens where a request doesn't say \| 32,768 \(default\), clamped to what fits in the context: 8,191",
    r"listening on http://127\.0\.0\.1:\d+ \| model phantom \| auth disabled",
]
SIZES = ["--max-context", "8192", "--kv-capacity", "2560", "--prefill-chunk", "256"]
DYING = """
import sys
from engine.engine import Engine
from kvring_cli.app import call
step, count = Engine.step, iter(range(10**9))
def dying(self):
    if next(count) > 5:
        raise SystemError("killed")
    return step(self)
Engine.step = dying
sys.exit(call(sys.argv[1:]))
"""


class Child:
    """`kvring serve` as a process; `lines` is its stderr so far."""

    def __init__(self, *arguments: str, code: str | None = None) -> None:
        start = ["-c", code] if code else ["-m", "kvring_cli.app"]
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", "phantom", "--port", "0", *SIZES, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True).start()

    def wait_for(self, pattern: str, seconds: float = 40) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.05)
        raise AssertionError(f"no line like {pattern}:\n{''.join(self.lines)}")

    @property
    def base(self) -> str:
        return self.wait_for(r"listening on (\S+)")[1]

    def end(self, how: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(15)


def test_it_says_what_it_is_in_order_serves_logs_without_content_and_ends_at_ctrl_c(tmp_path):
    log = tmp_path / "requests.jsonl"
    child = Child("--request-log", str(log))
    try:
        secret = "my secret word"
        body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 24, "ignore_eos": True}
        answer = httpx.post(f"{child.base}/v1/chat/completions", json=body, timeout=30).json()
        child.wait_for(
            r"req#1 done \| openai-chat \| length \| prompt \d+ \| cache 0 \(0\.0%\) \| output 24 \| TTFT [\d,]+ ms \| "
            r"queue \d+ ms \| prefill [\d,]+ tok/s \| decode [\d.]+ tok/s \| select 0 pages \| host 0 hits, 0 MiB"
        )
        places = [next(i for i, line in enumerate(child.lines) if re.match(pattern, line)) for pattern in LINES]
        assert places == sorted(places)
        line = json.loads(log.read_text())
        assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"] and line["max_tokens_source"] == "request"
        # three digits would stand in a time by chance
        assert secret not in log.read_text() and answer["choices"][0]["message"]["content"] not in log.read_text()
    finally:
        code = child.end()
    assert code in (0, 130), "".join(child.lines)
    assert "Traceback" not in "".join(child.lines)


def test_without_a_key_it_answers_to_loopbacks_names_and_those_it_was_given():
    child = Child("--allowed-host", "Box.lan")
    try:
        statuses = [
            httpx.get(f"{child.base}/health", headers={"Host": name}, timeout=30).status_code
            for name in ("localhost:1", "box.lan", "evil.example")
        ]
        assert 403 not in statuses[:2] and statuses[2] == 403
    finally:
        child.end()


def test_on_failure_exit_ends_the_process_with_an_error():
    child = Child("--on-failure", "exit", code=DYING)
    try:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, "ignore_eos": True}
        response = httpx.post(f"{child.base}/v1/chat/completions", json=body, timeout=30)
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_unavailable"
        assert child.process.wait(15) == 1
        assert "error: the engine stopped" in "".join(child.lines)
    finally:
        child.end(signal.SIGKILL)


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        began = time.monotonic()
        assert call(["serve", "phantom", "--port", str(taken.getsockname()[1])]) == 1
    assert "can't listen on" in capsys.readouterr().err and time.monotonic() - began < 3


def test_strict_refuses_what_would_only_be_warned_of(monkeypatch, capsys):
    monkeypatch.setenv("NINFER_KV_RETREIVE", "1")
    assert call(["serve", "phantom", "--port", "0", "--strict"]) == 1
    assert "NINFER_KV_RETRIEVE" in capsys.readouterr().err


def test_an_open_door_is_warned_of_and_strict_refuses_it(capsys):
    public = ["serve", "phantom", "--host", "0.0.0.0", "--port", "0", "--max-context", "8192"]
    assert call([*public, "--kv-capacity", "64", "--allowed-host", "a"]) == 1  # too small: it ends here
    said = capsys.readouterr().err
    assert "can be reached by others" in said and "a pool of" in said and "--allowed-host changes nothing" in said
    assert call([*public, "--strict"]) == 1
    assert "--strict: 0.0.0.0 can be reached by others" in capsys.readouterr().err
    assert call([*public, "--api-key", ""]) == 1
    assert "--api-key is empty" in capsys.readouterr().err


def test_a_request_log_that_can_not_be_written_is_told_before_anything_is_loaded(capsys, tmp_path):
    assert call(["serve", "phantom", "--port", "0", "--request-log", str(tmp_path / "none" / "log")]) == 1
    assert "can't be written" in capsys.readouterr().err


def test_strict_refuses_a_slower_path_that_was_taken(monkeypatch, capsys):
    from engine.engine import Engine

    monkeypatch.setattr(Engine, "unpinned", lambda self, wait=False: "half of it is pinned" * wait)
    assert call(["serve", "phantom", "--port", "0", "--strict", *SIZES]) == 1
    assert "--strict: half of it is pinned" in capsys.readouterr().err


@pytest.mark.parametrize("pool, asked, active", [(63, 4, 4), (40, 4, 4), (24, 4, 3), (9, 4, 1), (63, 20, 7)])
def test_no_more_requests_are_active_than_the_pool_can_be_shared_among(pool, asked, active):
    from engine.kv.share import WindowBudget

    window = WindowBudget(pool, 2, pool // 3, pool - pool // 3 - 4, 2)
    assert most_active(window, True, asked) == active
    assert most_active(window, False, asked) == asked
