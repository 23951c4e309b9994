"""What is sent to the model: documents, a blank line, the question; in the chat template or as raw text.

The document comes first, so that questions about the same document share its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import RecallParams, SamplingParams
from engine.errors import KVRingError, RequestError
from kvring_cli.document import Document, join

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.prepare import Prepared

Message = dict[str, str]
LARGEST = 5


@dataclass(frozen=True)
class Prompt:
    """Everything but the question."""

    documents: Sequence[Document] = ()
    headers: bool = False  # a line naming each file
    system: str | None = None
    raw: bool = False

    def user(self, question: str) -> str:
        """The user's turn."""
        return f"{join(self.documents, self.headers)}\n\n{question}" if self.documents else question

    def messages(self, question: str) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.user(question)}]

    def prepare(self, engine: Engine, question: str, sampling: SamplingParams, recall: RecallParams) -> Prepared:
        """RequestError where the engine refuses; if it is for the length, it names the largest files."""
        check(question)
        if engine.model.chat is None and not self.raw:
            raise RequestError(f"{engine.model.name} has no chat template", "--raw sends the text as it is")
        content = self.user(question) if self.raw else self.messages(question)
        try:
            return engine.prepare(content, sampling, recall)
        except RequestError as error:
            if len(self.documents) > 1 and engine.count_tokens(content) >= engine.capacity.context:
                raise RequestError(f"{error.message}; the largest files: {self._largest(engine)}", error.fix) from None
            raise

    def _largest(self, engine: Engine) -> str:
        sizes = sorted(
            ((engine.count_tokens(document.text), document.name) for document in self.documents), reverse=True
        )
        return ", ".join(f"{name} ({tokens:,} tokens)" for tokens, name in sizes[:LARGEST])


def check(question: str) -> None:
    """A question must say something, in characters that can be encoded."""
    if not question.strip():
        raise KVRingError("the question is empty", "ask something")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise KVRingError(
            f"the question holds bytes that are no characters, the first at {error.start}",
            "check the terminal's encoding, or give it on standard input with -",
        ) from None
