"""Files to text: one document out of what a person names, in whatever encoding it was written.

A file says its encoding by its BOM, or `--encoding` does, or it is UTF-8; bytes that are not valid are an error with
their offset, never a replacement character.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import KVRingError

_BOMS = (  # UTF-32's begins as UTF-16's does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_LIKELY = "--encoding gbk, latin-1, or whatever it was written in"


@dataclass(frozen=True)
class Document:
    """One file's text, and what to call it."""

    name: str
    text: str


def read_file(path: str, encoding: str | None = None) -> Document:
    """`-` is standard input. KVRingError for what is missing, a folder, empty, or not text in that encoding."""
    if path == "-":
        return Document("standard input", decode(sys.stdin.buffer.read(), "standard input", encoding))
    file = Path(path)
    try:
        if not path or file.is_dir():
            raise KVRingError(f"'{path}' is a folder", f"--dir {path or '.'} reads the files in it")
        data = file.read_bytes()
    except FileNotFoundError:
        raise KVRingError(f"there is no file {path}", "check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KVRingError(f"{path[:200]} can't be read: {reason}", "check the path and its permissions") from None
    return Document(path, decode(data, path, encoding))


def decode(data: bytes, name: str, encoding: str | None = None) -> str:
    """Text of `data`, line ends as `\\n`; KVRingError naming the first invalid byte's offset, or if there is none."""
    chosen = encoding or encoding_of(data)
    utf8 = chosen.lower().replace("_", "-") in ("utf-8", "utf8")
    mark = len(codecs.BOM_UTF8) if utf8 and data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[mark:].decode(chosen)
    except LookupError:
        raise KVRingError(f"there is no encoding '{encoding}'", "--encoding utf-8, utf-16, gbk, latin-1, ...") from None
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise KVRingError(
            f"{name} is not valid {encoding or chosen.upper()}: byte 0x{data[at]:02X} at offset {at:,} "
            f"(line {data.count(bytes([10]), 0, at) + 1:,})",
            "another --encoding" if encoding else _guess(data),
        ) from None
    except UnicodeError as error:  # some codecs raise without a place
        raise KVRingError(f"{name} is not valid {chosen}: {error}", _LIKELY) from None
    if "\0" in text:
        raise KVRingError(f"{name} holds NUL bytes: it is binary, or text in another encoding", _guess(data))
    if not text.strip():
        raise KVRingError(f"{name} is empty", "give a file with text in it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def encoding_of(data: bytes) -> str:
    """What the BOM says; UTF-8 without one."""
    return next((name for bom, name in _BOMS if data.startswith(bom)), "utf-8")


def _guess(data: bytes) -> str:
    """Latin text in UTF-16 without a BOM has a zero in every other byte."""
    head = data[:4096]
    if head[1::2].count(0) > len(head) // 4:
        return "--encoding utf-16-le (it looks like UTF-16 without a BOM)"
    if head[0::2].count(0) > len(head) // 4:
        return "--encoding utf-16-be (it looks like UTF-16 without a BOM)"
    return _LIKELY


def join(documents: Iterable[Document], headers: bool) -> str:
    """One text; with `headers` each file begins with a line that names it."""
    documents = list(documents)
    if not headers:
        return "\n\n".join(document.text.rstrip("\n") for document in documents)
    # A name may hold bytes that are no characters; the model gets U+FFFD for them.
    names = [document.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for document in documents]
    return "\n\n".join(
        f"==== {name} ====\n" + document.text.rstrip("\n") for name, document in zip(names, documents, strict=True)
    )
