"""The risk: a document that reaches the model other than it was written, or in part, without anybody saying so."""

from __future__ import annotations

import codecs
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import KVRingError
from kvring_cli.document import Document, decode, join, read_file
from kvring_cli.folder import Folder, read_folder
from kvring_cli.prompt import Prompt

TEXT = "Grüße aus 北京\nzweite Zeile"


def write(path: Path, data: bytes | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def names(folder: Folder) -> list[str]:
    return [document.name for document in folder.documents]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_file_is_read_by_its_byte_order_mark_or_as_utf8(tmp_path, encoding):
    assert read_file(write(tmp_path / "a", TEXT.encode(encoding))).text == TEXT


def test_big_endian_utf16_is_known_by_its_mark(tmp_path):
    assert read_file(write(tmp_path / "a", codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"))).text == TEXT


def test_an_encoding_that_is_named_is_used(tmp_path):
    path = write(tmp_path / "a", "北京".encode("gbk"))
    assert read_file(path, "gbk").text == "北京"
    with pytest.raises(KVRingError) as refused:
        read_file(path)
    assert "--encoding gbk" in refused.value.fix


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"abc\n\xff\xfez", "0xFF at offset 4 (line 2)"),
        (b"ab\xe4", "0xE4 at offset 2"),
        (b"\xef\xbb\xbfx\x80", "0x80 at offset 4"),
    ],
)
def test_bytes_that_are_not_text_are_an_error_with_their_place(tmp_path, data, where):
    path = write(tmp_path / "a.txt", data)
    with pytest.raises(KVRingError) as refused:
        read_file(path)
    assert path in refused.value.message and where in refused.value.message


def test_utf16_without_a_mark_is_recognised_in_the_advice():
    with pytest.raises(KVRingError) as refused:
        decode("für".encode("utf-16-le") * 50, "a")
    assert "utf-16-le" in refused.value.fix


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\0"), min_size=1))
def test_what_was_written_in_utf8_comes_back(text):
    if text.strip() and not text.startswith("\ufeff"):
        assert decode(text.encode(), "a") == text


def test_line_ends_of_every_system_become_one():
    assert decode(b"a\r\nb\rc\n", "a") == "a\nb\nc\n"


@pytest.mark.parametrize("data", [b"", b"\n \n", codecs.BOM_UTF8, codecs.BOM_UTF16_LE])
def test_a_file_without_text_is_refused(tmp_path, data):
    with pytest.raises(KVRingError, match="is empty"):
        read_file(write(tmp_path / "a", data))


def test_missing_files_folders_and_unknown_encodings_are_refused_by_name(tmp_path):
    with pytest.raises(KVRingError, match="there is no file"):
        read_file(str(tmp_path / "nope"))
    with pytest.raises(KVRingError) as refused:
        read_file(str(tmp_path))
    assert "--dir" in refused.value.fix
    with pytest.raises(KVRingError, match="klingon"):
        read_file(write(tmp_path / "a", "x"), "klingon")


def test_a_folder_is_what_git_would_track_in_sorted_order(tmp_path):
    write(tmp_path / ".gitignore", "*.log\nbuild/\n!keep.log\n/only_here.txt\n[bad\n")
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.txt", "z")
    write(tmp_path / "a" / ".gitignore", "secret.*\n!b.log\n")
    write(tmp_path / "a" / "secret.txt", "no")
    write(tmp_path / "a" / "b.log", "a deeper file wins")
    write(tmp_path / "a" / "only_here.txt", "the slash ties it to the top")
    write(tmp_path / "only_here.txt", "no")
    write(tmp_path / "x.log", "no")
    write(tmp_path / "keep.log", "kept")
    write(tmp_path / "build" / "keep.log", "nothing comes back out of an ignored folder")
    write(tmp_path / ".git" / "config", "no")
    assert names(read_folder(str(tmp_path))) == [
        ".gitignore",
        "a/.gitignore",
        "a/b.log",
        "a/only_here.txt",
        "a/z.txt",
        "b.txt",
        "keep.log",
    ]


def test_rules_above_the_folder_count_up_to_the_repository(tmp_path):
    write(tmp_path / ".gitignore", "*")
    repository = tmp_path / "repo"
    (repository / ".git").mkdir(parents=True)
    write(repository / ".gitignore", "*.tmp\n")
    write(repository / "src" / "a.tmp", "no")
    write(repository / "src" / "a.py", "yes")
    assert names(read_folder(str(repository / "src"))) == ["a.py"]


def test_binary_and_undecodable_files_are_left_out_and_said_so(tmp_path):
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.bin", b"\x00\x01\x02")
    write(tmp_path / "latin.txt", "für".encode("latin-1"))
    write(tmp_path / "wide.txt", "für".encode("utf-16"))
    write(tmp_path / "empty.txt", b"")
    folder = read_folder(str(tmp_path))
    assert names(folder) == ["a.txt", "wide.txt"]
    said = "\n".join(folder.skipped())
    assert "1 binary file: b.bin" in said and "latin.txt" in said and "--encoding" in said


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need a privilege there")
def test_a_link_does_not_lead_out_of_the_folder(tmp_path):
    write(tmp_path / "outside.txt", "secret")
    write(tmp_path / "in" / "a.txt", "text")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    assert names(read_folder(str(tmp_path / "in"))) == ["a.txt"]


def test_globs_choose_and_a_folder_without_text_is_refused(tmp_path):
    write(tmp_path / "a.py", "a")
    write(tmp_path / "deep" / "b.py", "b")
    write(tmp_path / "c.md", "c")
    assert names(read_folder(str(tmp_path), ["*.py"])) == ["a.py", "deep/b.py"]
    assert names(read_folder(str(tmp_path), ["deep/*", "*.md"])) == [
        "c.md",
        "deep/b.py",
    ]
    with pytest.raises(KVRingError, match=r"no text file that matches \*\.rs"):
        read_folder(str(tmp_path), ["*.rs"])
    for wrong in (str(tmp_path / "a.py"), str(tmp_path / "nope")):
        with pytest.raises(KVRingError, match="folder"):
            read_folder(wrong)


def test_the_document_stands_before_the_question_with_a_blank_line_between():
    one, two = Document("a.txt", "alpha\n"), Document("b.txt", "beta")
    assert Prompt([one]).user("why?") == "alpha\n\nwhy?"
    assert Prompt([one, two], headers=True).user("why?") == "==== a.txt ====\nalpha\n\n==== b.txt ====\nbeta\n\nwhy?"
    assert Prompt().user("why?") == "why?"
    assert Prompt(system="be brief").messages("why?")[0] == {"role": "system", "content": "be brief"}
    assert join([one], headers=False) == "alpha"


def test_utf_16_without_a_bom_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.txt").write_bytes("plain words".encode("utf-16-le"))
    with pytest.raises(KVRingError) as caught:
        read_file(str(tmp_path / "a.txt"))
    assert "NUL" in caught.value.message and "utf-16-le" in caught.value.fix


def test_a_name_too_long_for_a_path_is_an_error_with_a_fix():
    with pytest.raises(KVRingError):
        read_file("x" * 5000)


def test_answers_never_overwrite_the_questions(tmp_path):
    from kvring_cli.commands.batch import keep_inputs

    questions = tmp_path / "q.jsonl"
    questions.write_text("{}")
    keep_inputs(str(tmp_path / "other"), [str(questions)])
    with pytest.raises(KVRingError, match="is an input"):
        keep_inputs(str(questions), [str(questions)])
