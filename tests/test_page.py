"""The risk: a page that reaches out to the network, makes markup of a model's words, or stops working unseen."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvring_cli.server import page

ALL = [name for name, _ in page.FILES.values()]
SCRIPTS = [name for name in ALL if name.endswith(".js")]


def source(name):
    return files(page).joinpath(name).read_text(encoding="utf-8")


@pytest.fixture
def client():
    app = FastAPI()
    page.mount(app)
    return TestClient(app)


@pytest.mark.parametrize("path", page.FILES)
def test_each_file_is_served_as_what_it_is_under_a_strict_policy(client, path):
    name, kind = page.FILES[path]
    answer = client.get(path)
    assert answer.status_code == 200 and answer.text == source(name)
    assert answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert not re.search(r"unsafe|\*|http", " ".join(rules.values()))


def test_the_page_stays_out_of_the_openapi_document(client):
    assert client.get("/openapi.json").json()["paths"] == {}


@pytest.mark.parametrize("name", ALL)
def test_no_file_names_another_host(name):
    assert not re.search(r"//[a-z0-9.-]+\.[a-z]|https?:|@import|url\(", source(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_can_make_markup_or_code_of_text(name):
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc|setHTML"
    assert not re.search(ways, source(name))


class Markup(HTMLParser):
    """What of a document a policy or a screen reader cares for."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def test_the_markup_has_nothing_inline_and_loads_only_what_is_served_by_relative_addresses():
    tags = Markup(source("index.html")).tags
    loaded = {attrs.get("src") or attrs.get("href") for tag, attrs in tags if tag in ("script", "link")}
    assert loaded - {"data:,"} == {path.strip("/") for path in page.FILES} - {""}
    for tag, attrs in tags:
        assert tag != "style" and "style" not in attrs and not any(name.startswith("on") for name in attrs)


def test_every_field_has_a_label_and_every_id_that_a_script_asks_for_exists():
    tags = Markup(source("index.html")).tags
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    asked = set().union(*(re.findall(r'\$\("([a-z-]+)"\)', source(name)) for name in SCRIPTS))
    assert asked <= set(ids)
    labels = {attrs.get("for") for tag, attrs in tags if tag == "label"}
    assert "prompt" in labels and ("html", {"lang": "en"}) in tags
    assert all(attrs["aria-labelledby"] in ids for tag, attrs in tags if tag == "progress")


def test_every_letter_of_a_strip_has_a_colour_and_a_meaning():
    from kvring_cli.frame import KINDS
    from kvring_cli.server.ring import NAMES

    drawn = dict(re.findall(r'^  "?([a-z.])"?: \["([a-z]+)"', source("ring.js"), re.M))
    live = {letter: name for letter, name in drawn.items() if letter not in "ln"}  # reasons, known when it has ended
    assert live == NAMES == {letter: name for letter, (name, _) in KINDS.items()}
    for name in drawn.values():
        assert source("style.css").count(f"--{name}: #") == 2  # light and dark
        assert f"#legend .{name} {{" in source("style.css")


def test_the_server_shows_it_without_a_key_while_the_model_loads():
    from kvring_cli.server.app import make_app
    from kvring_cli.server.service import ServeSettings, Service

    client = TestClient(make_app(Service(lambda model: None, ServeSettings(api_key="s3cret"))))
    assert [client.get(path).status_code for path in page.FILES] == [200] * len(page.FILES)
    assert client.get("/v1/ring").status_code == 401
