"""`kvring chat`: a conversation. Each turn sends all of it; the engine resumes from the pages that it has already."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from engine.config import RecallParams, SamplingParams
from engine.errors import KVRingError, RequestError
from kvring_cli import console
from kvring_cli.document import join, read_file
from kvring_cli.options import CardProfile, Flags, Model, Verbose, engine_options, sampling_options
from kvring_cli.prompt import Message, check

if TYPE_CHECKING:
    from engine.engine import Engine

HELP = (
    "/file PATH adds a document to the next message, /drop forgets those that wait, /reset begins anew, "
    "/stats shows the engine, /exit leaves"
)


@sampling_options
@engine_options
def chat(
    model: Model,
    *,
    files: Annotated[
        list[str] | None, typer.Option("--file", "-f", metavar="PATH", help="A document to begin with. Repeats.")
    ] = None,
    encoding: Annotated[str | None, typer.Option("--encoding", help="Of files. Left out: their BOM, or UTF-8.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="The system prompt.")] = None,
    profile: CardProfile = None,
    verbose: Verbose = False,
    flags: Flags,
    sampling: SamplingParams,
) -> None:
    """Keep a conversation; later turns compute only what is new. /help lists what can be typed."""
    from kvring_cli.start import settle, start

    conversation = Conversation(sampling, system, encoding)
    for path in files or ():
        conversation.add_file(path)
    engine = start(settle(model, flags, verbose, profile), verbose)
    try:
        if engine.model.chat is None:
            raise RequestError(f"{engine.model.name} has no chat template", "kvring run --raw sends text as it is")
        if sys.stdin.isatty():
            console.say(HELP, "dim")
        while (line := _read()) is not None:
            try:
                if not conversation.take(engine, line):
                    break
            except KVRingError as error:
                console.report(error)
    finally:
        engine.close()


@dataclass
class Conversation:
    """Its turns, and the documents that wait for the next question. A turn that failed leaves no trace."""

    sampling: SamplingParams
    system: str | None = None
    encoding: str | None = None
    messages: list[Message] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def take(self, engine: Engine, line: str) -> bool:
        """Obey or answer one line; False at /exit."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return True
        if word == "/exit":
            return False
        if word == "/reset":
            self.messages, self.waiting = [], []
        elif word == "/file":
            self.add_file(rest.strip())
        elif word == "/drop":
            console.say(f"{len(self.waiting):,} files are sent no more")
            self.waiting = []
        elif word == "/stats":
            for name, value in engine.stats().items():
                console.say(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}")
        elif word == "/help":
            console.say(HELP)
        elif word.startswith("/") and "/" not in word[1:]:
            raise KVRingError(f"{word} is not known", HELP)
        else:
            self.ask(engine, line.strip())
        return True

    def add_file(self, path: str) -> None:
        if path in ("", "-"):
            raise KVRingError("/file needs the path of a file", "/file PATH")
        document = read_file(os.path.expanduser(path), self.encoding)
        self.waiting.append(join([document], headers=False))
        console.say(f"{path}: {len(document.text):,} characters, sent with the next message")

    def ask(self, engine: Engine, question: str) -> None:
        """Answer to stdout. Stopped by Ctrl-C, the turn stays with what was said of it, if anything was."""
        from kvring_cli import answer

        check(question)
        turn = [*self.messages, {"role": "user", "content": "\n\n".join([*self.waiting, question])}]
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        try:
            prepared = engine.prepare([*system, *turn], self.sampling, RecallParams())
        except KVRingError as error:
            if self.waiting:
                raise RequestError(error.message, f"{error.fix}; /drop forgets the files that wait") from None
            raise
        waiting, self.waiting = self.waiting, []
        try:
            result = answer.answer(engine, prepared)
        except answer.Stopped as stopped:
            console.say("stopped")
            if not stopped.text.strip():
                self.waiting = waiting
                return
            text = stopped.text
        except KVRingError:
            self.waiting = waiting
            raise
        else:
            answer.report(result)
            text = result.text
        self.messages = [*turn, {"role": "assistant", "content": text}]


def _read() -> str | None:
    """The next line; None at the end, or at Ctrl-C or Ctrl-D. The prompt never gets into the answer's stream."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    if not sys.stdin.isatty():
        prompt = ""
    elif sys.stdout.isatty():
        prompt = "> "
    else:
        prompt = ""
        console.err().print("> ", end="")
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        console.say("")
        return None
