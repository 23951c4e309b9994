"""The risk: a report that says less than the run did, can't be opened, or tells who ran it and where."""

from __future__ import annotations

import getpass
import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.errors import KVRingError
from gates.html import to_html
from gates.junit import to_junit
from gates.verdict import SCHEMA, Arm, Check, Outcome, Report, to_json, worst
from kvring_cli.app import call
from kvring_cli.files import check_writable, write
from kvring_cli.gate_files import to_send
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
    flags += ["--device-profile-path", str(tmp_path / "mine")]
    assert call(["gate", "fits", "-m", str(phantom_folder()), "--quick", "--sink", "128", *flags]) == 0
    assert "fits: PASS" in capsys.readouterr().out
    for file in files.values():
        text = file.read_text(encoding="utf-8")
        for secret in (str(Path.home()), str(tmp_path), str(phantom_folder().parent), f"/{getpass.getuser()}/"):
            assert secret not in text
    command = json.loads(files["json"].read_text())["command"]
    assert command == f"kvring gate fits --model {phantom_folder().name} --quick --sink 128 --device-profile-path PATH"


def test_what_a_server_or_an_error_told_of_a_place_stays_here():
    fault = "OSError: HTTP 500: no /home/anna/models/x.gguf for anna"
    arms = [Arm("long document", "keyed", "positive", [outcome(False, said=fault)], note=fault)]
    sent = to_send(Report("suite", arms, [Check("server", False, f"it ended: {fault}")], notes=[fault]).judge())
    text = to_html([sent], "") + to_junit([sent]) + json.dumps(to_json([sent], ""))
    assert "HTTP 500: no <path> for" in text and "/home" not in text and "x.gguf" not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["fits", "--tasks", "keyed"], "--tasks changes nothing of fits"),
        (["multi-needle", "fits", "--grid"], "long-problem would"),
        (["fits", "--haystack", "missing.txt"], "--haystack changes nothing"),
        (["multi-needle", "--served-model", "x"], "--base-url"),
        (["suite", "--base-url", "http://127.0.0.1:9", "--budget", "512"], "--budget changes nothing of suite with"),
        (["suite", "--budget", "512", "--kv-capacity", "1024"], "leave one out"),
        (["reuse", "--base-url", "http://127.0.0.1:9", "-m", "smollm2-135m"], "--served-model names its model"),
        (["reuse", "--base-url", "http://127.0.0.1:9", "--sink", "128"], "--served-model names its model"),
        (["multi-needle", "--length", "0"], "--length 0 is no length"),
        (["multi-needle", "--length", "99999M"], "1 to 16,777,216 tokens"),
        (["suite", "--budget", ""], "not a number of tokens"),
    ],
)
def test_a_flag_that_no_gate_would_read_is_bad_usage(flags, said, capsys):
    assert call(["gate", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_report_takes_no_other_files_place(tmp_path, capsys):
    story, link = tmp_path / "story.txt", tmp_path / "link"
    story.write_text("Once upon a time.")
    link.symlink_to(story)
    one = str(tmp_path / "report")
    for flags in (["--json", one, "--html", f"{tmp_path}/./report"], ["--haystack", str(story), "--junit", str(link)]):
        assert call(["gate", "perplexity", *flags]) == 1
    err = capsys.readouterr().err
    assert "--json and --html are the same file" in err and "would overwrite what --haystack reads" in err
    assert story.read_text() == "Once upon a time." and sorted(tmp_path.iterdir()) == [link, story]


def test_a_report_is_written_whole_or_the_one_before_it_stays(tmp_path, monkeypatch):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    check_writable("--json", str(link))
    assert link.is_symlink() and not real.exists()
    write("--json", str(link), "a name of \udcff bytes")
    real.chmod(0o640)
    assert link.is_symlink() and real.read_text() == "a name of \\udcff bytes"
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(KVRingError, match="No space left"):
        write("--json", str(link), "half")
    assert real.read_text().startswith("a name") and [*tmp_path.glob("*.part")] == []
    monkeypatch.undo()
    write("--json", str(link), "second")
    assert real.read_text() == "second" and real.stat().st_mode & 0o777 == 0o640


def test_a_run_that_breaks_off_leaves_no_report_that_passes(tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    file.write_text('{"verdict": "PASS"}')
    done = Report("fits", checks=[Check("a", True, "")]).judge()

    def interrupted(name, *_):
        if name == "lossless":
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr("gates.registry.run_gate", interrupted)
    for names in (["lossless"], ["fits", "lossless", "arch"]):
        assert call(["gate", *names, "-m", str(phantom_folder()), "--json", str(file)]) == 130
        value = json.loads(file.read_text())
        assert (value["verdict"], [report["gate"] for report in value["reports"]]) == ("INCONCLUSIVE", names)
    assert value["reports"][0]["verdict"] == "PASS" and value["reports"][1]["reasons"] == ["nothing was run"]


@pytest.mark.parametrize("name", ["x" * 300, "missing/report"])
def test_a_path_that_cannot_be_is_refused_before_the_work(name, tmp_path):
    with pytest.raises(KVRingError, match="can't be written"):
        check_writable("--json", str(tmp_path / name))


@pytest.mark.parametrize(
    "line",
    [
        ["gate", "fits", "--json", ""],
        ["smoke", "--json", ""],
        ["serve", "phantom", "--request-log", ""],
        ["receipt", "-o", ""],
        ["run", "phantom", "--batch", "q.jsonl", "-o", ""],
    ],
    ids=lambda line: line[0],
)
def test_an_empty_name_of_a_file_is_told_as_that(line, tmp_path, monkeypatch, capsys):
    """As an unset variable of a script makes one. `receipt` said ' can't be written: Is a directory'."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"id": 1, "question": "Who is it?"}\n')
    assert call(line) == 1
    said = capsys.readouterr()
    assert (
        f"error: {line[-2].replace('-o', '--output')} is given an empty name\nfix: a path, or leave it out" in said.err
    )
    assert not said.out and [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


def test_answers_that_nothing_would_hold_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kvring_cli.start.start", lambda *_: pytest.fail("it was loaded"))
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"id": 1, "question": "Who is it?"}\n')
    assert call(["run", "phantom", "--batch", str(questions), "-o", str(tmp_path / "no" / "a.jsonl")]) == 1
    assert "can't be written: No such file or directory\nfix: another path for --output" in capsys.readouterr().err
    assert call(["run", "phantom", "Who?", "-o", ""]) == 2
    assert "--output takes the answers of --batch" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--html", "--junit"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(flag, tmp_path, capsys):
    assert call(["gate", "fits", flag, str(tmp_path)]) == 1
    assert f"another path for {flag}" in capsys.readouterr().err
