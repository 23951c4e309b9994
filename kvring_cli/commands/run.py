"""`kvring run`: one question, or a batch of them, about a document that may be larger than the pool."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config import RecallParams, SamplingParams
from kvring_cli import console
from kvring_cli.document import Document, decode, read_file
from kvring_cli.options import CardProfile, Flags, Model, Verbose, engine_options, sampling_options
from kvring_cli.prompt import Prompt, check

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.prepare import Prepared
    from engine.result import Result
    from engine.switches import Resolved

_INPUT, _OUTPUT = "Input", "Output"


@sampling_options
@engine_options
def run(
    model: Model,
    question: Annotated[str | None, typer.Argument(metavar="QUESTION", help="What to ask; - reads stdin.")] = None,
    *,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", "-f", metavar="PATH", help="A document to ask about. Repeats.", rich_help_panel=_INPUT),
    ] = None,
    folders: Annotated[
        list[str] | None,
        typer.Option("--dir", metavar="PATH", help="A folder to ask about. Repeats.", rich_help_panel=_INPUT),
    ] = None,
    globs: Annotated[
        list[str] | None,
        typer.Option("--glob", help="Of --dir, only files like this (*.py). Repeats.", rich_help_panel=_INPUT),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option("--encoding", help="Of the files. Left out: their BOM, or UTF-8.", rich_help_panel=_INPUT),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="The system prompt.", rich_help_panel=_INPUT)
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Plain text, without the chat template.", rich_help_panel=_INPUT)
    ] = False,
    batch: Annotated[
        str | None,
        typer.Option("--batch", metavar="JSONL", help='Lines of {"question": ..., "id": ...}.', rich_help_panel=_INPUT),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="JSONL", help="The batch's answers.", rich_help_panel=_OUTPUT),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Draw which pages were seen, and why.", rich_help_panel=_OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=_OUTPUT)
    ] = False,
    profile: CardProfile = None,
    verbose: Verbose = False,
    flags: Flags,
    sampling: SamplingParams,
) -> None:
    """Ask a model about documents of any length. The answer goes to stdout, everything else to stderr."""
    from kvring_cli.commands.batch import answer_all, keep_inputs, read_questions
    from kvring_cli.start import settle, start

    _check(question, files, folders, globs, encoding, system, raw, batch, output, explain, as_json)
    questions = read_questions(batch) if batch else []
    keep_inputs(output, [*([batch] if batch else []), *(files or [])])
    if question is not None:
        check(question := _question(question))
    headers = bool(folders) or len(files or ()) > 1
    prompt = Prompt(_documents(files, folders, globs, encoding), headers, system, raw)
    resolved = settle(model, flags, verbose, profile)
    engine = start(resolved, verbose)
    try:
        if batch:
            if not answer_all(engine, prompt, questions, sampling, output):
                raise typer.Exit(1)
            return
        prepared = prompt.prepare(engine, question or "", sampling, RecallParams(explain=explain))
        result = _answer(engine, prepared, quiet=as_json)
        if explain:
            _explain(engine, prepared, result)
        if as_json:
            _write_json(engine, result, resolved)
    finally:
        engine.close()


def _check(question: str | None, *rest: Any) -> None:
    """Bad usage: options that contradict each other or would be read by nobody."""
    files, folders, globs, encoding, system, raw, batch, output, explain, as_json = rest
    wrong = [
        (question is None and not batch, "there is no question: give QUESTION, or --batch"),
        (question is not None and batch, "QUESTION and --batch exclude each other"),
        (globs and not folders, "--glob chooses among the files of --dir, and there is none"),
        (encoding and not (files or folders), "--encoding is that of --file or --dir, and there is neither"),
        (raw and system is not None, "--raw sends no chat template, so there is no place for --system"),
        (output is not None and not batch, "--output takes the answers of --batch; redirect stdout for a single one"),
        (batch and (explain or as_json), "--batch writes JSON lines of its own: without --explain and --json"),
        ([*(files or ()), question].count("-") > 1, "standard input can be read only once"),
    ]
    for applies, message in wrong:
        if applies:
            raise console.BadUsage(message, "kvring run --help shows what it takes")


def _documents(
    files: list[str] | None, folders: list[str] | None, globs: list[str] | None, encoding: str | None
) -> list[Document]:
    documents = [read_file(path, encoding) for path in files or ()]
    for path in folders or ():
        from kvring_cli.folder import read_folder

        folder = read_folder(path, globs or (), encoding)
        console.say(f"{path}: {len(folder.documents):,} files")
        for line in folder.skipped():
            console.warn(line)
        above = f"{path.rstrip('/')}/" if len(folders or ()) > 1 else ""  # the same name may be in two folders
        documents += [Document(above + document.name, document.text) for document in folder.documents]
    return documents


def _question(question: str) -> str:
    return decode(sys.stdin.buffer.read(), "the question on standard input").strip() if question == "-" else question


def _answer(engine: Engine, prepared: Prepared, quiet: bool) -> Result:
    from kvring_cli import answer

    try:
        result = answer.answer(engine, prepared, None if quiet else console.write)
    except answer.Stopped:
        raise KeyboardInterrupt from None
    answer.report(result)
    return result


def _explain(engine: Engine, prepared: Prepared, result: Result) -> None:
    from kvring_cli import strip

    chosen = strip.often(result.pages, result.recall)
    console.err().print(strip.draw(result.pages, chosen, console.err().width))
    tokens = [*prepared.tokens, *result.tokens]
    for line in strip.describe(result.pages, chosen, tokens, engine.model.tokenizer.decode):
        console.say(line)


def _write_json(engine: Engine, result: Result, resolved: Resolved) -> None:
    from kvring_cli.answer import as_json
    from kvring_cli.start import effective

    value = {"model": engine.model.name, **as_json(result), "settings": effective(resolved)}
    if result.pages:
        value["pages"] = [vars(page) for page in result.pages]
    console.write_json(value)
