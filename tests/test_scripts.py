"""The risk: a start script that runs other words than it was given, or closes before anybody could read why."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.errors import ConfigError
from kvring_cli.scripts import KINDS, MARK, cmd_word, powershell_word, render, to_paste, write
from tests.models import phantom_folder

ROOT = Path(__file__).parent.parent
ODD = [
    "C:\\Users\\Zoë O'Brien 中文\\py thon.exe",
    "100%PATH%",
    "a&b|c<d>e^f",
    "!x!",
    "(x)",
    "C:\\dir \\",
    "$HOME `x`",
    "‘’",
]
WORDS = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters='"'), min_size=1)


def from_cmd(line):
    """What a program gets from a line of a batch file, by Microsoft's rules: percents first, then the C runtime's."""
    line = line.replace("%%", "\1")
    assert "%" not in line
    words, word, quoted, index = [], "", False, 0
    while index < len(line):
        slashes = len(line[index:]) - len(line[index:].lstrip("\\"))
        index += slashes
        if index < len(line) and line[index] == '"':
            word += "\\" * (slashes // 2)
            if slashes % 2:
                word += '"'
            else:
                quoted = not quoted
            index += 1
        elif slashes:
            word += "\\" * slashes
        elif line[index] == " " and not quoted:
            words.append(word)
            word, index = "", index + 1
        else:
            assert quoted, "an unquoted character is cmd's to interpret"
            word, index = word + line[index], index + 1
    return [one.replace("\1", "%") for one in [*words, word]]


def from_powershell(line):
    """The literal strings of a PowerShell line."""
    words = []
    while line:
        found = re.match("'((?:[^'‘’‚‛]|['‘’‚‛]{2})*)'(?: |$)", line)
        assert found, line
        words.append(re.sub("['‘’‚‛](['‘’‚‛])", r"\1", found[1]))
        line = line[found.end() :]
    return words


@given(st.lists(WORDS, min_size=1))
def test_cmd_gets_every_word_as_it_was(words):
    assert from_cmd(" ".join(map(cmd_word, words))) == words


@given(st.lists(WORDS, min_size=1))
def test_powershell_gets_every_word_as_it_was(words):
    doubled = [re.sub(r"(\\+)$", r"\1\1", word) if re.search(r"\s", word) else word for word in words]
    assert from_powershell(" ".join(map(powershell_word, words))) == doubled  # then the C runtime halves them


@given(st.lists(WORDS, min_size=1))
def test_sh_gets_every_word_as_it_was(words):
    line = next(line for line in render(".sh", words).decode().split("\n") if line.endswith('"$@"'))
    assert shlex.split(line) == [*words, "$@"]


@given(WORDS)
@example("C:\\models\\模型.gguf")
@example("C:\\my models\\a,b;c&(d).gguf")
def test_a_line_to_paste_reaches_windows_programs_as_it_was(word):
    """sh's single quotes are letters of the name to cmd, and sh quotes every backslash."""
    shown = to_paste(["kvring", word], windows=True).removeprefix("kvring ")
    plain = not set(word) & set(" \t,;&|<>^()!'`$@#{}[]%*?~")
    assert shown == word if plain and shown[0] != '"' else from_cmd(shown.replace("%", "%%")) == [word]


def test_a_batch_file_is_utf8_without_a_mark_and_ascii_until_it_says_so():
    data = render(".bat", ODD)
    lines = data.decode().split("\r\n")
    assert not data.startswith(b"\xef\xbb\xbf") and b"\n" not in data.replace(b"\r\n", b"")
    assert lines[2] == "chcp 65001 >nul" and all(line.isascii() for line in lines[:3])
    run = next(line for line in lines if line.endswith(" %*"))
    assert from_cmd(run.removesuffix(" %*")) == ODD
    after = lines[lines.index(run) + 1 :]
    assert after[0] == 'set "code=%errorlevel%"' and after.index("pause") < after.index("exit /b %code%")
    assert 'if "%code%"=="0" exit /b 0' in after  # and not `if errorlevel 1`, which a crash's negative code passes
    assert "(" not in "".join(line for line in lines if line.startswith(("if ", "for ")))  # a ) in a path would end it


def test_a_powershell_script_says_that_it_is_utf8_and_waits_on_error():
    data = render(".ps1", ODD)
    assert data.startswith(b"\xef\xbb\xbf") and b"\n" not in data.replace(b"\r\n", b"")
    lines = data.decode("utf-8-sig").split("\r\n")
    run = next(line for line in lines if line.startswith("& "))
    assert run.endswith(" @args") and len(from_powershell(run[2:].removesuffix(" @args"))) == len(ODD)
    assert lines[lines.index(run) + 1] == "$code = $LASTEXITCODE" and "exit $code" in lines
    assert any("Read-Host" in line for line in lines[lines.index(run) :])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_shell_cannot_be_given_is_refused(kind):
    for word in ("a\nb", "a\0b", "a\rb", *([] if kind == ".sh" else ['a"b'])):
        with pytest.raises(ConfigError):
            render(kind, ["/python", word])


def test_only_a_script_of_its_own_is_overwritten(tmp_path):
    script, foreign = tmp_path / "start.SH", tmp_path / "start.bat"
    for port in ("1", "2"):
        write(script, ["/python", port])
    assert MARK in script.read_text() and "/python 2" in script.read_text()
    foreign.write_text("@echo mine\n")
    with pytest.raises(ConfigError, match="is not a start script"):
        write(foreign, ["/python"])
    assert foreign.read_text() == "@echo mine\n" and sorted(os.listdir(tmp_path)) == ["start.SH", "start.bat"]
    with pytest.raises(ConfigError, match=r"\.bat, \.cmd, \.ps1, \.sh"):
        write(tmp_path / "start.txt", ["/python"])
    (tmp_path / "folder.sh").mkdir()
    with pytest.raises(ConfigError, match="is not a start script"):
        write(tmp_path / "folder.sh", ["/python"])
    for nowhere in (tmp_path / "no" / "start.sh", foreign / "start.sh"):
        with pytest.raises(ConfigError, match="is no folder"):
            write(nowhere, ["/python"])


@pytest.fixture
def place(tmp_path):
    """A folder of spaces, quotes and Chinese, with a trap in it: a package named like ours."""
    place = tmp_path / "mein 'Ort' 中文 $x"
    (place / "engine").mkdir(parents=True)
    (place / "engine" / "__init__.py").write_text("raise SystemExit('imported from the script\\'s folder')")
    return place


def script(place, *words):
    interpreter = place / "py thon"
    interpreter.symlink_to(sys.executable)
    file = place / "start.sh"
    write(file, [str(interpreter), "-m", "kvring_cli.app", *words])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])}
    return subprocess.Popen([file], cwd=place, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.name == "nt", reason="sh is not Windows' shell")
def test_the_shell_script_serves_a_model_in_an_odd_place(place):
    if sys.version_info < (3, 11):
        shutil.rmtree(place / "engine")  # PYTHONSAFEPATH is not known yet
    model = shutil.copytree(phantom_folder(), place / "mo del & 模型")
    sizes = ["--port", "0", "--max-context", "2048", "--kv-capacity", "2560"]
    with script(place, "serve", str(model), *sizes) as process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("listening on "):
                    break
            assert lines and lines[-1].startswith("listening on "), "".join(lines)
        finally:
            for child in psutil.Process(process.pid).children():
                child.send_signal(signal.SIGINT)
            assert process.wait(20) in (0, 130)


@pytest.mark.skipif(os.name == "nt", reason="sh is not Windows' shell")
def test_a_shell_script_whose_python_is_gone_says_so_and_what_helps(place):
    gone = str(place / "no 'such' py")
    write(place / "start.sh", [gone, "-m", "kvring_cli.app"])
    done = subprocess.run([place / "start.sh"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 127 and done.stderr.startswith(f"error: there is no {gone}\nfix: ")


@pytest.mark.skipif(os.name == "nt", reason="sh is not Windows' shell")
def test_the_shell_script_passes_on_how_it_failed_and_does_not_wait_without_a_person(place):
    began = time.monotonic()
    with script(place, "serve", "no such model") as process:
        assert "error: there is no model 'no such model'" in process.stderr.read()
        assert process.wait(20) == 1 and time.monotonic() - began < 20
