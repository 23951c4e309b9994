"""The risk: a kernel runs in the interpreter and can't be compiled for somebody's card. No GPU is needed to see it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel here")
ROOT = Path(__file__).parent.parent
RUNS = (["80"], ["90"])
"""In processes beside each other. `.ci/run` does 8.6, 8.9 and 12.0, other head dims, dtypes and KV dtypes."""


def test_every_kernel_compiles_for_cards_that_are_not_here(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([*command, *run], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        for run in RUNS
    ]
    launched = set()
    for path in (ROOT / "engine" / "ops").glob("triton_*.py"):
        launched |= set(re.findall(r"\b(_\w+)\[\(", path.read_text(encoding="utf-8")))
    assert len(launched) >= 18
    for run, process in zip(RUNS, started, strict=True):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err[-3000:]
        assert launched <= set(json.loads(out)), f"{run}: tests/compile_kernels.py never launches these"
