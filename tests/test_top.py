"""The risk: a view that shows nothing, breaks in a pipe, or dies with a traceback where no server is."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from gates.child import free_port
from kvring_cli.app import call
from kvring_cli.commands.top import Source, read_metrics
from kvring_cli.frame import Look, draw, rate, strip

SESSION = {
    "request": 3,
    "state": "decode",
    "mode": "recall",
    "prompt_tokens": 8000,
    "processed_tokens": 8000,
    "cached_tokens": 7936,
    "generated_tokens": 17,
    "max_tokens": 512,
    "seconds": 1.2,
    "prefill_tokens_per_second": 2100.0,
    "decode_tokens_per_second": 31.5,
    "over_pool": True,
    "strip": "ssss" + "." * 100 + "kk" + "w" + "r" * 17 + "o",
    "pages": {"sink": 4, "selected": 2, "recent": 17, "open": 1, "resident": 1, "cold": 100},
}
RING = {
    "model": "phantom",
    "state": "ready",
    "backend": "torch-cpu",
    "uptime_seconds": 12.5,
    "age_seconds": 0.1,
    "context_tokens": 32768,
    "kv_dtype": "bf16",
    "page_tokens": 64,
    "ring": True,
    "pool": {"pages": 63, "used": 40, "bytes": 33030144},
    "host": {"pages": 512, "used": 90, "bytes": 268435456, "pinned_bytes": 0, "checkpoint_pages": 80},
    "window": {"sink": 4, "selection": 31, "recent": 24, "free": 4},
    "reuse": True,
    "retrieve": "auto",
    "scorer": "fused",
    "queue": {"active": 2, "max_active": 4, "waiting": 1, "max_pending": 16},
    "sessions": [SESSION, {**SESSION, "request": 4, "state": "prefill", "processed_tokens": 3072}],
    "totals": {"requests": 2, "prompt_tokens": 9000, "cached_tokens": 4500, "generated_tokens": 40, "bytes_fetched": 0},
}
METRICS = """# HELP kvring_refused_total Requests refused, by code.
# TYPE kvring_refused_total counter
kvring_refused_total{code="server_overloaded"} 2.0
kvring_refused_total{code="kv_exhausted"} 1.0
kvring_first_token_seconds_sum 3.0
kvring_first_token_seconds_count 2.0
"""


@pytest.fixture
def serve():
    """serve({path: (status, text)}): the address of a server that answers so."""
    servers = []

    def start(answers):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                given.append((self.path, self.headers.get("Authorization")))
                status, text = answers.get(self.path, (404, "{}"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        given = []
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}", given

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def good():
    return {"/v1/ring": (200, json.dumps(RING)), "/metrics": (200, METRICS)}


def text_of(ring, width=120):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(draw(Look("http://x", ring, read_metrics(METRICS))))
    return captured.get()


def test_one_frame_shows_tiers_requests_pages_and_rates(serve, capsys):
    url, _ = serve(good())
    assert call(["top", "--once", "--url", url + "/"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "phantom",
        "40 of 63 pages, 31.5 MiB",
        "90 of 512 pages, 256 MiB",
        "2 of 4",
        "4,500 (50%)",
        "2,131.5",
        "1.50 s on average",
        "req#3 | recall | wrote 17 after 8,000 tokens, 7,936 cached",
        "reads 3,072 of 8,000 tokens",
        "100 cold",
        "ssss......",
        "larger than the pool",
        ".kkwrrr",
    ):
        assert expected in shown.replace("\n   100 ", ""), expected


def test_in_a_pipe_one_frame_is_all(serve, capsys):
    url, given = serve(good())
    assert call(["top", "--url", url]) == 0 and "phantom" in capsys.readouterr().out
    assert [path for path, _ in given] == ["/v1/ring", "/metrics"]


def test_an_idle_or_dense_server_is_shown_too():
    shown = text_of({**RING, "ring": False, "sessions": []})
    assert (
        "context 32,768 tokens in bf16" in shown
        and "ring off: the pool holds the whole context" in shown
        and rate({"sessions": []}) == 0
    )


@pytest.mark.parametrize("width", [20, 60, 200])
def test_any_width_can_be_drawn(width):
    assert "phantom" in text_of(RING, width)


def test_a_long_strip_keeps_its_rare_pages_and_its_height():
    letters = "." * 4000 + "k" + "." * 4000 + "o"
    lines = strip(letters).plain.splitlines()
    assert len(lines) <= 8 and "k" in "".join(lines) and lines[-1].endswith("o")


def test_the_key_is_sent(serve, monkeypatch):
    url, given = serve(good())
    assert call(["top", "--once", "--url", url, "--api-key", "s3cret"]) == 0
    monkeypatch.setenv("KVRING_API_KEY", "other")
    assert call(["top", "--once", "--url", url]) == 0
    assert [key for _, key in given] == ["Bearer s3cret"] * 2 + ["Bearer other"] * 2


def test_where_nothing_listens_it_says_so_and_what_would_mend_it(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert call(["top", "--url", url]) == 1
    said = capsys.readouterr().err
    assert f"error: nothing answers at {url}" in said and "fix: start one: kvring serve" in said


@pytest.mark.parametrize(
    ("answer", "error", "fix"),
    [
        ((401, "{}"), "wants its API key", "--api-key"),
        ((503, '{"error": {"message": "the model is loading"}}'), "the model is loading", "try again"),
        ((503, "busy"), "HTTP 503", "try again"),
        ((404, "{}"), "is not kvring serve", "--url"),
        ((200, "<html>"), "is not kvring serve", "--url"),
        ((200, "[]"), "is not kvring serve", "--url"),
        ((200, "{}"), "is not kvring serve", "--url"),
    ],
)
def test_other_answers_end_in_an_error_and_a_fix(serve, capsys, answer, error, fix):
    url, _ = serve({**good(), "/v1/ring": answer})
    assert call(["top", "--once", "--url", url]) == 1
    said = capsys.readouterr().err
    assert error in said and "fix: " in said and fix in said


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/passwd", "", "http://[", "http://:nan"])
def test_an_address_that_is_none_is_refused(url):
    assert call(["top", "--once", "--url", url]) in (1, 2)


def test_a_server_that_stops_answering_is_looked_at_again(serve):
    from kvring_cli.commands.top import _frame

    source = Source(f"http://127.0.0.1:{free_port()}", None)
    assert "nothing answers" in _frame(source, patient=True).plain


def test_what_a_real_server_says_can_be_drawn(phantom, capsys):
    from tests.serving import served

    with served(phantom) as live:
        body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True}
        with live.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # one that is dropped closes the stream
            next(lines)
            live.wait(lambda: live.http.get("/v1/ring").json()["sessions"])
            assert call(["top", "--once", "--url", live.base]) == 0
    shown = capsys.readouterr().out
    assert "phantom" in shown and "of 40 pages" in shown and "req#1 |" in shown


def test_metrics_are_summed_over_labels():
    assert read_metrics(METRICS)["kvring_refused_total"] == 3
