"""A folder to documents: what git would track, in sorted order.

`.gitignore` files count as git reads them: those of the folder, of folders below it, and of folders above it up to the
repository's root; a deeper one wins, and nothing comes back out of an ignored folder. `.git`, symbolic links and
binary files are left out, and counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import KVRingError
from kvring_cli.document import Document, decode, encoding_of

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_SNIFF = 8192  # bytes in which git, too, looks for a zero

Rules = list[tuple[Path, "GitIgnoreSpec"]]
"""Folders, outermost first, and what their .gitignore says."""


@dataclass(frozen=True)
class Folder:
    """What was read, and the names of what was not."""

    documents: tuple[Document, ...]
    binary: tuple[str, ...]
    undecodable: tuple[KVRingError, ...]

    def skipped(self) -> list[str]:
        """A line for each kind of file that was left out; a person must know of it."""
        lines = []
        if self.binary:
            lines.append(f"skipped {_counted(len(self.binary), 'binary file')}: {_few(self.binary)}")
        lines += [f"skipped a file: {error.message} ({error.fix})" for error in self.undecodable]
        return lines


def read_folder(path: str, globs: Sequence[str] = (), encoding: str | None = None) -> Folder:
    """Every text file under `path` that matches one of `globs` (all, if there are none), named by its path below it."""
    root = Path(path)
    if not root.is_dir():
        if root.exists():
            raise KVRingError(f"{path} is not a folder", f"--file {path} reads it")
        raise KVRingError(f"there is no folder {path}", "check the path")
    documents, binary, undecodable = [], [], []
    wanted = _spec(globs, strict=True)
    for file in _files(root.resolve()):
        name = file.relative_to(root.resolve()).as_posix()
        if globs and not wanted.match_file(name):
            continue
        try:
            data = file.read_bytes()
        except OSError as error:
            raise KVRingError(f"{file} can't be read: {error.strerror}", "check its permissions") from None
        if b"\0" in data[:_SNIFF] and not encoding and encoding_of(data) == "utf-8":
            binary.append(name)
        elif data.strip():
            try:
                documents.append(Document(name, decode(data, name, encoding)))
            except KVRingError as error:
                undecodable.append(error)
    if not documents:
        matching = f" that matches {', '.join(globs)}" if globs else ""
        raise KVRingError(f"{path} holds no text file{matching}", "check --glob, and what .gitignore leaves out")
    return Folder(tuple(documents), tuple(binary), tuple(undecodable))


def _files(root: Path) -> Iterator[Path]:
    """Files under `root` that git would track, sorted by path."""
    found: list[Path] = []

    def walk(folder: Path, rules: Rules) -> None:
        rules = rules + _rules_of(folder)
        for entry in _entries(folder):
            path = Path(entry.path)
            if entry.is_symlink() or entry.name == ".git" or _ignored(path, entry.is_dir(), rules):
                continue
            if entry.is_dir():
                walk(path, rules)
            elif entry.is_file():
                found.append(path)

    walk(root, _rules_above(root))
    yield from sorted(found, key=lambda path: path.relative_to(root).parts)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise KVRingError(f"{folder} can't be read: {error.strerror}", "check its permissions") from None


def _ignored(path: Path, folder: bool, rules: Rules) -> bool:
    for base, spec in reversed(rules):
        said = spec.check_file(path.relative_to(base).as_posix() + ("/" if folder else "")).include
        if said is not None:
            return said
    return False


def _rules_above(root: Path) -> Rules:
    """Of the folders above `root`, if it lies inside a repository."""
    if (root / ".git").exists():
        return []
    above: Rules = []
    for folder in root.parents:
        above = _rules_of(folder) + above
        if (folder / ".git").exists():
            return above
    return []


def _rules_of(folder: Path) -> Rules:
    try:
        lines = (folder / ".gitignore").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [(folder, _spec(lines))]


def _spec(lines: Sequence[str], strict: bool = False) -> GitIgnoreSpec:
    """Like git, it passes over a line of a .gitignore that is no pattern; with `strict` that is an error."""
    from pathspec import GitIgnoreSpec

    good = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            if strict:
                raise KVRingError(f"'{line}' is not a pattern", "write it like *.py or src/**/*.md") from None
        else:
            good.append(line)
    return GitIgnoreSpec.from_lines(good)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
