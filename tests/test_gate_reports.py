"""The risk: a report that says less than the run did, can't be opened, or tells who ran it and where."""

from __future__ import annotations

import getpass
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gates.html import to_html
from gates.junit import to_junit
from gates.verdict import SCHEMA, Arm, Check, Outcome, Report, to_json, worst
from kvring_cli.app import call
from tests.models import phantom_folder


def outcome(hit, depth=0.5, said="<b>&'\x00", strip=""):
    return Outcome(1, 42_355, 1, depth, "48213", said, hit, strip=strip, pages=(2,) if strip else ())


def reports():
    missed = [*(outcome(True, d / 10) for d in range(9)), outcome(False, 0.95, strip="ww.kk..w")]
    arms = [
        Arm("dense", "keyed", "dense", [outcome(True)] * 10),
        Arm("default", "keyed", "positive", missed, hidden_pages=604),
        Arm("recall off", "keyed", "control", [outcome(False)] * 10, twin="default", red_share=0.25),
    ]
    fits = Report("fits", checks=[Check("24 pages", True, "difference 0")], notes=["a < b"], not_run=["mean pages"])
    return [Report("multi-needle", arms, environment={"settings": {"sink": 64}}).judge(), fits.judge()]


class Balanced(HTMLParser):
    """Every tag that opens closes, in order; nothing is fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.cells = [], [], 0

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        self.cells += dict(attrs).get("title", "").startswith("page ")
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing():
    page = Balanced()
    page.feed(to_html(reports(), "kvring gate 'a & b'"))
    text = " ".join(page.text)
    assert not page.open and page.cells == 8
    for said in (
        "FAIL",
        "9/10",
        "default: 9 of 10, silent wrong 1",
        "kvring gate 'a & b'",
        "a < b",
        "mean pages",
        "<b>",
    ):
        assert said in text, said


def test_the_json_has_its_schema_and_every_trial():
    value = json.loads(json.dumps(to_json(reports(), "kvring gate all")))
    assert (value["schema"], value["verdict"], value["exit_code"]) == (SCHEMA, "FAIL", 1)
    arm = value["reports"][0]["arms"][1]
    assert (arm["hits"], arm["trials"], len(arm["outcomes"])) == (9, 10, 10)
    assert arm["interval"][0] < 0.9 < arm["interval"][1] and arm["outcomes"][-1]["strip"] == "ww.kk..w"


def test_junit_counts_what_failed_and_what_was_not_run():
    root = ElementTree.fromstring(to_junit(reports()))
    needle, fits = root
    failed = [case.get("name") for case in needle if case.find("failure") is not None]
    assert failed == ["arm keyed default", "verdict"] and needle.get("failures") == "2"
    assert fits.get("skipped") == "1" and fits.get("failures") == "0"


def test_the_worst_verdict_stands_for_all():
    made = [Report(name) for name in ("PASS", "INCONCLUSIVE", "WEAK MODEL", "BLIND", "FAIL")]
    for report in made:
        report.verdict = report.gate
    assert [worst(made[: size + 1]) for size in range(5)] == [report.gate for report in made]


def test_a_report_names_neither_user_nor_path(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "junit")}
    flags = [part for kind, file in files.items() for part in (f"--{kind}", str(file))]
    assert call(["gate", "fits", "-m", str(phantom_folder()), "--quick", "--sink", "128", *flags]) == 0
    assert "fits: PASS" in capsys.readouterr().out
    for file in files.values():
        text = file.read_text(encoding="utf-8")
        for secret in (str(Path.home()), str(tmp_path), str(phantom_folder().parent), f"/{getpass.getuser()}/"):
            assert secret not in text
    command = json.loads(files["json"].read_text())["command"]
    assert command == f"kvring gate fits --model {phantom_folder().name} --quick --sink 128"


@pytest.mark.parametrize("flag", ["--json", "--html", "--junit"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(flag, tmp_path, capsys):
    assert call(["gate", "fits", flag, str(tmp_path)]) == 1
    assert f"another path for {flag}" in capsys.readouterr().err
