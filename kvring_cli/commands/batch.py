"""`kvring run --batch`: many questions about one document, each from the checkpoint that the first one left."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from engine.config import RecallParams, SamplingParams
from engine.errors import KVRingError
from kvring_cli import console
from kvring_cli.document import decode
from kvring_cli.files import check_writable
from kvring_cli.prompt import Prompt, check

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True)
class Question:
    """One line of the batch; `id` is the line's number where it gives none, as text if another has given that one."""

    id: Any
    text: str


def read_questions(path: str) -> list[Question]:
    """All of them, checked before any work; KVRingError naming the first bad line."""
    file = Path(path)
    try:
        text = decode(file.read_bytes(), path)
    except OSError as error:
        raise KVRingError(f"{path} can't be read: {error.strerror}", "--batch takes a file of JSON lines") from None
    questions: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad(path, number, f"is not JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("question"), str) or not entry["question"].strip():
            raise _bad(path, number, "has no question")
        try:
            check(entry["question"])
            json.dumps(entry.get("id"), allow_nan=False)
        except (KVRingError, ValueError) as error:
            raise _bad(path, number, f"can't be asked: {error}") from None
        questions.append((number, entry))
    given = [entry["id"] for _, entry in questions if "id" in entry]
    return [
        Question(entry.get("id", f"line {number}" if number in given else number), entry["question"])
        for number, entry in questions
    ]


def keep_inputs(output: str | None, inputs: list[str]) -> None:
    """Before any work: answers can be written, and don't overwrite what is asked or read."""
    if output not in (None, "-"):
        check_writable("--output", output)
    for path in inputs:
        if output not in (None, "-") and Path(output).exists() and Path(path).exists() and Path(output).samefile(path):
            raise KVRingError(f"--output {output} is an input of this run", "another path for --output")


def _bad(path: str, number: int, what: str) -> KVRingError:
    return KVRingError(f"{path}, line {number}: {what}", 'each line is like {"id": 7, "question": "Who is it?"}')


def answer_all(
    engine: Engine, prompt: Prompt, questions: list[Question], sampling: SamplingParams, output: str | None
) -> bool:
    """Write a line for each question as soon as it is answered; False if any failed. KeyboardInterrupt after Ctrl-C."""
    from kvring_cli.answer import Stopped, answer, summary

    failed = 0
    with _lines(output) as file:
        for number, question in enumerate(questions, 1):
            line: dict[str, Any] = {"id": question.id, "question": question.text}
            try:
                result = answer(engine, prompt.prepare(engine, question.text, sampling, RecallParams()), None)
            except Stopped:
                console.say(f"stopped at question {number:,} of {len(questions):,}")
                raise KeyboardInterrupt from None
            except KVRingError as error:
                failed += 1
                line["error"] = {"message": error.message, "fix": error.fix}
                console.warn(f"question {number:,} of {len(questions):,} failed: {error.message}")
            else:
                line |= {
                    "answer": result.text,
                    "usage": vars(result.usage),
                    "recall": vars(result.recall),
                    "finish": result.finish,
                    "warnings": result.warnings,
                }
                for warning in result.warnings:
                    console.warn(f"question {number:,}: {warning}")
                console.say(f"{number:,} of {len(questions):,} {summary(result)}", "dim")
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
    if failed:
        console.say(f"error: {failed:,} of {len(questions):,} questions failed", "bold red")
    return not failed


@contextlib.contextmanager
def _lines(output: str | None) -> Iterator[IO[str]]:
    """Where the answers go; stdout if nothing is said."""
    if output in (None, "-"):
        yield sys.stdout
        return
    try:
        file = open(output, "w", encoding="utf-8", newline="\n")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise KVRingError(f"{output} can't be written: {error.strerror}", "another path for --output") from None
    with file:
        yield file
