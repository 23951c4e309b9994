"""The risk: a page that passes every look at its source and does nothing in a browser."""

from __future__ import annotations

import json
import shutil

import pytest

from gates.child import Child, free_port
from gates.haystack import Counter, build
from gates.smoke import SERVE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
POOL = 2048
PATIENCE = 60_000  # ms: how long a busy machine may take for an answer

playwright = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not here")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
expect = playwright.expect


@pytest.fixture(scope="module")
def address():
    """Where the phantom is served with a pool of 32 pages and a host store of one context, 256 pages."""
    port = free_port()
    command = [*SERVE, "phantom", "--port", str(port), "--kv-capacity", str(POOL), "--max-context", "16384"]
    command += ["--host-kv-gib", "0.0625"]
    with Child(command, port) as child:
        assert child.wait_ready(120) == "ready", child.lines
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture
def view(browser, address):
    """The page, open. Afterwards: it asked nobody else, and nothing was thrown or blocked."""
    page = browser.new_page(viewport={"width": 1280, "height": 850})
    asked, faults = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(address)
    expect(page.locator("#model")).to_contain_text("phantom")
    yield page
    page.close()
    assert not [url for url in asked if not url.startswith((address, "data:"))] and not faults


def say(view, text):
    view.fill("#prompt", text)
    view.press("#prompt", "Enter")


def answer(view, number=0):
    return view.locator("#log article.assistant").nth(number)


def canned(view, *payloads, status=200):
    """The server's next answers are these server-sent events."""
    body = "".join(f"{payload}\n\n" if payload.startswith(":") else f"data: {payload}\n\n" for payload in payloads)
    view.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=status, body=body, content_type="text/event-stream"),
    )


def piece(text):
    return json.dumps({"choices": [{"delta": {"content": text}}]})


def test_a_conversation_over_the_pool_goes_on_from_its_cached_pages_and_the_ring_shows_why(view):
    count = Counter(lambda text: len(text) // 3 + 1, lambda turns: sum(len(turn["content"]) // 3 for turn in turns))
    document = build("keyed", 4000, count, seed=3, asked=2)
    first, second = document.asked
    say(view, document.messages(first)[0]["content"])
    expect(view.locator("#windows canvas")).to_have_count(1, timeout=PATIENCE)  # live, while it reads
    expect(answer(view).locator(".note")).to_contain_text("cached 0 (0%)", timeout=PATIENCE)
    expect(answer(view)).to_contain_text(first.expected)
    say(view, second.question)
    expect(answer(view, 1).locator(".note")).to_contain_text("larger than the pool", timeout=PATIENCE)
    expect(answer(view, 1)).to_contain_text(second.expected)
    note = answer(view, 1).locator(".note").inner_text()
    assert int(note.split("cached ")[1].split("(")[1].split("%")[0]) >= 95
    expect(view.locator("#windows figcaption")).to_contain_text("the last answer")
    pages = view.locator("#windows canvas").get_attribute("aria-label")
    assert all(kind in pages for kind in ("4 sink", "selected", "recent", "1 open", "cold"))
    expect(view.locator("#host-text")).to_contain_text("of 256 pages")
    expect(view.locator("#cached")).not_to_have_text("0")


def test_stop_ends_the_answer_on_the_server_too_and_the_conversation_goes_on(view):
    say(view, "Tell me a long story about the river.")
    expect(view.locator("#status")).to_have_text("writing", timeout=PATIENCE)
    expect(view.locator("#active")).to_have_text("1 / 4", timeout=PATIENCE)
    view.click("#stop")
    expect(answer(view).locator(".note")).to_have_text("stopped")
    expect(view.locator("#active")).to_have_text("0 / 4", timeout=PATIENCE)
    assert len(answer(view).locator("div").inner_text()) > 2
    with view.expect_request("**/v1/chat/completions") as asked:
        say(view, "And then?")
    assert [turn["role"] for turn in json.loads(asked.value.post_data)["messages"]] == ["user", "assistant", "user"]
    expect(answer(view, 1).locator("div")).not_to_be_empty(timeout=PATIENCE)  # it may be over before a click


def test_markup_stays_text_whoever_wrote_it(view):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    canned(view, piece(evil), "[DONE]")
    say(view, evil)
    expect(answer(view).locator("div")).to_have_text(evil)
    assert view.locator("#log img, #log script").count() == 0 and view.title() == "kvring"


def test_a_failure_in_mid_stream_is_told_and_what_was_said_stays(view):
    canned(view, ": keep-alive 1024/80000", piece("It was"), json.dumps({"error": {"message": "out of memory"}}))
    say(view, "why?")
    expect(answer(view).locator(".wrong")).to_have_text("out of memory")
    expect(answer(view).locator("div")).to_have_text("It was")
    expect(view.locator("#send")).to_be_enabled()


def test_a_stream_that_just_ends_is_not_taken_for_an_answer(view):
    canned(view, piece("It was"))
    say(view, "why?")
    expect(answer(view).locator(".wrong")).to_contain_text("stopped in the middle")


def test_a_refused_question_can_be_sent_again(view):
    refusal = json.dumps({"error": {"message": "the API key is missing or wrong"}})
    view.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, body=refusal))
    say(view, "why?")
    expect(answer(view).locator(".wrong")).to_have_text("the API key is missing or wrong")
    expect(view.locator("#prompt")).to_have_value("why?")


def test_the_key_is_sent_with_every_request(view):
    keys = []
    view.fill("#key", "s3cret")
    view.on("request", lambda request: keys.append(request.headers.get("authorization")))
    canned(view, piece("Because."), "[DONE]")
    say(view, "why?")
    expect(answer(view).locator("div")).to_have_text("Because.")
    assert keys and set(keys) == {"Bearer s3cret"}


def test_a_server_that_is_gone_is_told(view):
    view.route("**/v1/ring", lambda route: route.abort())
    expect(view.locator("#ring-state")).to_have_text("the server doesn't answer")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 400)])
def test_nothing_is_cut_off_at_any_width(view, scheme, width):
    view.emulate_media(color_scheme=scheme)
    view.set_viewport_size({"width": width, "height": 800})
    canned(view, piece("word " * 300 + "x" * 400), "[DONE]")
    say(view, "y" * 400)
    expect(answer(view).locator("div")).to_contain_text("xxx")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
