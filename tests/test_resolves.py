"""The risk: on some system and Python the project can't be installed, builds something from source, or gets a Triton
that its torch doesn't know.

uv resolves for systems that this machine is not; the index is asked, nothing is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvring_cli.doctor.software import KNOWN_PAIRS

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
UNREACHABLE = ("error sending request", "failed to fetch", "dns error", "network connectivity", "connection refused")


def resolve(system: str, python: str, *more: str, project: Path = PROJECT) -> subprocess.CompletedProcess[str]:
    """uv's answer for a system and a Python; skips where the index can't be reached."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--no-header", "--no-annotate", "-q"]
    command += ["--python", sys.executable, "--no-python-downloads"]
    ask = ["--python-platform", system, "--python-version", python, "--only-binary", ":all:", str(project), *more]
    environ = {**os.environ, "UV_HTTP_TIMEOUT": "60", "NO_COLOR": "1"}
    try:
        done = subprocess.run(
            [*command, *ask], capture_output=True, text=True, encoding="utf-8", env=environ, timeout=240
        )
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer in 240 s")
    if done.returncode and any(sign in done.stderr.lower() for sign in UNREACHABLE):
        pytest.skip(f"the package index can't be reached: {done.stderr.strip().splitlines()[-1]}")
    return done


def versions(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", done.stdout, re.M))


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize("python", PYTHONS)
def test_wheels_alone_install_it_on_linux_and_windows_with_the_triton_of_their_torch(python):
    with ThreadPoolExecutor(2) as both:
        linux, windows = both.map(lambda system: versions(resolve(system, python)), ("linux", "windows"))
    assert linux["torch"] == windows["torch"]
    assert minor(windows["triton-windows"]) == minor(linux["triton"])  # what torch itself pins on Linux
    assert KNOWN_PAIRS[minor(linux["torch"])] == minor(linux["triton"]), "what doctor holds a pair on Windows against"
    assert "triton" not in windows and "triton-windows" not in linux


def test_a_project_that_needs_a_source_build_is_seen(tmp_path):
    project = tmp_path / "pyproject.toml"
    wanted = PROJECT.read_text(encoding="utf-8").replace('"numpy>=1.26"', '"numpy==1.26.0"')
    project.write_text(wanted, encoding="utf-8")
    done = resolve("windows", "3.13", project=project)  # numpy has wheels for 3.13 from 2.1 on
    assert done.returncode and "numpy" in done.stderr
