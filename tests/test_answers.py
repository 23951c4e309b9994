"""The risk: an answer that is not only the answer on stdout, a batch or chat that pays twice, a Ctrl-C that breaks."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.config import RecallParams, SamplingParams
from engine.errors import RequestError
from kvring_cli.answer import Stopped, answer
from kvring_cli.app import call
from kvring_cli.commands.chat import Conversation
from kvring_cli.document import Document
from kvring_cli.prompt import Prompt
from tests.models import phantom_folder

ROOT = Path(__file__).parent.parent
KVRING = [sys.executable, "-m", "kvring_cli.app"]
SMALL = ["--max-context", "4K", "--kv-capacity", "2K", "--prefill-chunk", "256", "--threads", "1"]
QUESTION = "What is the access code for silver harbour?"
FACT = "The access code for silver harbour is 48213."


@pytest.fixture
def document(words, tmp_path):
    """A file of about 3,000 tokens, more than the small pool holds, with the fact in its middle."""
    path = tmp_path / "document.txt"
    path.write_text(f"{words(1500, 1)}. {FACT} {words(1500, 2)}.\n", encoding="utf-8")
    return str(path)


def run(*line: str) -> int:
    return call(["run", str(phantom_folder()), *line, *SMALL])


def test_a_whole_run_puts_the_answer_on_stdout_and_all_else_on_stderr(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text(f"It rained all week. {FACT} People walked by the river.\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    line = [*KVRING, "run", str(phantom_folder()), QUESTION, "--file", str(path), *SMALL]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "48213" in done.stdout and done.stdout.count("\n") == 1
    assert "done | stop | prompt" in done.stderr and "settings | --max-context 4096" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_json_is_one_object_with_result_usage_recall_timings_and_settings(document, capsys):
    assert run(QUESTION, "--file", document, "--json", "--explain", "-n", "4", "--sink", "128") == 0
    written = capsys.readouterr()
    value = json.loads(written.out)
    names = "answer finish usage recall timings warnings model settings pages"
    assert set(value) == set(names.split())
    assert value["usage"]["prompt"] == value["usage"]["cached"] + value["usage"]["computed"]
    assert value["usage"]["generated"] == 4 and value["finish"] == "length" and value["recall"]["over_pool"]
    assert value["settings"]["sink"] == {"value": 128, "source": "--sink"}
    assert len(value["pages"]) == -(-(value["usage"]["prompt"] + 3) // 64)
    assert sum(sum(page["steps"].values()) for page in value["pages"]) == value["recall"]["pages_selected"] > 0
    assert "| fetched" in written.err


def test_explain_draws_a_character_a_page_and_quotes_the_selected_ones(document, capsys):
    assert run(QUESTION, "--file", document, "--explain", "-n", "4") == 0
    said = capsys.readouterr().err
    assert "selected by key" in said and "resident" in said
    assert re.search(r"^pages? [\d-]+ \|.* key \d+", said, re.MULTILINE)
    assert re.search(r"pages selected less often: \d+", said)


def test_a_warning_of_the_result_reaches_the_person(document, capsys):
    assert run(QUESTION, "--file", document, "-n", "4", "--retrieve", "off") == 0
    assert "warning: recall was off" in capsys.readouterr().err


def test_the_refusal_of_a_folder_that_is_too_large_names_its_largest_files(words, tmp_path, capsys):
    for name, tokens in (("small.txt", 100), ("large.txt", 3000), ("middle.txt", 2000)):
        (tmp_path / name).write_text(words(tokens), encoding="utf-8")
    assert run("why?", "--dir", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert said.index("the largest files: large.txt (") < said.index("middle.txt (") < said.index("small.txt (")
    assert "fix: shorten the prompt, or --max-context" in said


def test_raw_text_meets_no_template_and_stdin_can_ask(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{FACT} {QUESTION}\n".encode())))
    assert run("-", "--raw", "-n", "3", "--json") == 0
    raw = json.loads(capsys.readouterr().out)["usage"]["prompt"]
    assert run(f"{FACT} {QUESTION}", "-n", "3", "--json") == 0
    assert raw < json.loads(capsys.readouterr().out)["usage"]["prompt"]


def test_a_batch_answers_every_question_from_one_checkpoint(document, tmp_path, capsys):
    batch, output = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions = [{"question": QUESTION, "id": "a"}, {"question": "x " * 5000}, {"question": "Who walked?"}]
    batch.write_text("\n\n".join(map(json.dumps, questions)), encoding="utf-8")
    assert run("--batch", str(batch), "-o", str(output), "--file", document, "-n", "4") == 1
    first, failed, last = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert list(first) == ["id", "question", "answer", "usage", "recall", "finish", "warnings"]
    assert (first["id"], failed["id"], last["id"]) == ("a", 3, 5)
    assert "context" in failed["error"]["message"] and "answer" not in failed
    assert first["usage"]["cached"] == 0 and last["usage"]["cached"] > 0.9 * last["usage"]["prompt"]
    assert "1 of 3 questions failed" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["not json", '{"id": 1}', '["x"]', '{"question": ""}'])
def test_a_bad_line_of_a_batch_is_named_before_any_work(tmp_path, capsys, line):
    batch = tmp_path / "questions.jsonl"
    batch.write_text(f'{{"question": "why?"}}\n{line}\n', encoding="utf-8")
    assert run("--batch", str(batch), "-o", str(tmp_path / "out")) == 1
    assert f"{batch}, line 2: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_conversation_resumes_and_survives_what_goes_wrong_in_it(document):
    lines = [
        f"/file {document}",
        QUESTION,
        "/file /nope",
        "/file",
        "/nope",
        "x " * 5000,
        "And again?",
        "/stats",
        "/reset",
        "hi",
    ]
    line = [*KVRING, "chat", str(phantom_folder()), *SMALL, "-n", "4"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, input="\n".join([*lines, "/exit", "no"]))
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3
    cached = [int(count.replace(",", "")) for count in re.findall(r"cache ([0-9,]+)", done.stderr)]
    assert cached[0] == 0 and cached[1] > 2500 and cached[2] == 0
    assert "/file needs the path" in done.stderr and "there is no file /nope" in done.stderr
    assert "/nope is not known" in done.stderr
    assert "no room for an answer" in done.stderr and "pool_pages 32" in done.stderr


def test_a_file_that_does_not_fit_is_kept_until_it_is_dropped(make_engine, capsys):
    engine, talk = make_engine(), Conversation(SamplingParams(max_tokens=2), None, None)
    talk.waiting.append("so " * 5000)
    for _ in range(2):
        with pytest.raises(RequestError) as refused:
            talk.take(engine, "What?")
        assert "/drop" in refused.value.fix and len(talk.waiting) == 1
    talk.take(engine, "/drop")
    talk.take(engine, "What?")
    assert not talk.waiting and len(talk.messages) == 2


def test_numbers_that_a_batch_gives_by_itself_meet_no_given_one(tmp_path):
    from kvring_cli.commands.batch import read_questions

    batch = tmp_path / "questions.jsonl"
    batch.write_text('{"question": "a"}\n{"id": 1, "question": "b"}\n{"question": "c"}\n{"id": "x", "question": "d"}')
    assert [question.id for question in read_questions(str(batch))] == ["line 1", 1, 3, "x"]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_ctrl_c_cancels_an_answer_between_two_steps_and_the_engine_serves_on(make_engine):
    engine, written = make_engine(), []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 2:
            interrupt()

    prompt = Prompt([Document("a", FACT)])
    prepared = prompt.prepare(engine, QUESTION, SamplingParams(max_tokens=40), RecallParams())
    with pytest.raises(Stopped) as stopped:
        answer(engine, prepared, write)
    assert stopped.value.text and len(written) <= 4
    engine.audit()
    assert (
        "48213" in engine.complete(Prompt([Document("a", FACT)]).prepare(engine, QUESTION, SamplingParams(), None)).text
    )


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_a_stopped_turn_leaves_the_conversation_usable(make_engine, words, capsys, monkeypatch):
    engine = make_engine()
    conversation = Conversation(SamplingParams(max_tokens=6))
    real, steps = type(engine).step, iter(range(10_000))

    def step(self):
        if next(steps) == 2:
            interrupt()
        return real(self)

    monkeypatch.setattr(type(engine), "step", step)
    conversation.ask(engine, words(2500, 1))
    assert "stopped" in capsys.readouterr().err and not conversation.messages
    conversation.ask(engine, f"{FACT} {QUESTION}")
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_a_turn_that_is_refused_leaves_no_trace(make_engine, words):
    conversation = Conversation(SamplingParams(max_tokens=4))
    with pytest.raises(RequestError):
        conversation.ask(make_engine(), words(8000))
    assert not conversation.messages


@pytest.mark.skipif(os.name == "nt", reason="signals are sent otherwise there")
def test_ctrl_c_in_a_long_prefill_exits_with_130_and_one_clean_line(words, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(words(30000), encoding="utf-8")
    line = [*KVRING, "run", str(phantom_folder()), "why?", "--file", str(path), "-v", "--threads", "1"]
    line += ["--max-context", "64K", "--kv-capacity", "4032", "--prefill", "exact"]
    child = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = ""
    while "capacity |" not in said:
        said += child.stderr.readline()
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130 and out == ""
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="pipes close otherwise there")
def test_a_reader_that_goes_away_ends_it_quietly():
    line = [*KVRING, "run", str(phantom_folder()), "Tell me everything", "-n", "400", *SMALL]
    child = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read().decode()
    assert child.wait(60) in (0, 1) and "Traceback" not in err and "Exception ignored" not in err
