"""The risk: compiled kernels of another card, version or user are picked up, or a damaged cache ends every start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine import kernel_cache
from engine.backend import choose_backend

ROOT = Path(__file__).parent.parent
COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.test_kernel_cache import kernel
source = ASTSource(kernel(triton, tl), {"x": "*fp32"}, {})
made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 1})
assert len(made.asm["cubin"]) > 500
"""


def kernel(triton, tl):
    @triton.jit
    def double(x):
        tl.store(x, tl.load(x) * 2.0)

    return double


def test_each_capability_and_version_has_a_folder_of_its_own(tmp_path, monkeypatch):
    folders = [kernel_cache.folder((8, 6), tmp_path), kernel_cache.folder((12, 0), tmp_path)]
    for versions in (
        ("0.1.0", "2.11.0+cu128", "3.6.0"),
        ("0.1.0", "2.11.0+cu128", "3.7.0"),
        ("0.2.0", "2.11.0", "3.6.0"),
    ):
        monkeypatch.setattr(kernel_cache, "versions", lambda versions=versions: versions)
        folders.append(kernel_cache.folder((8, 6), tmp_path))
    assert len(set(folders)) == 5 and all(folder.parent == tmp_path / "triton" for folder in folders)
    assert folders[2].name == "0.1.0-torch2.11.0_cu128-triton3.6.0-sm86"


def test_the_users_own_folder_is_left_alone(tmp_path):
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "broken.json").write_text("{")
    kernel_cache.point((8, 6), environ=environ, root=tmp_path)
    assert environ == {"TRITON_CACHE_DIR": str(tmp_path)} and not kernel_cache.discard(environ)
    assert (tmp_path / "entry" / "broken.json").exists()


def test_ours_is_set_and_follows_the_card(tmp_path):
    environ: dict[str, str] = {}
    for capability in ((8, 6), (9, 0)):  # the second: another engine of this process, or a child's
        kernel_cache.point(capability, environ=environ, root=tmp_path)
        assert Path(environ["TRITON_CACHE_DIR"]) == kernel_cache.folder(capability, tmp_path)


def test_a_folder_that_cannot_be_written_is_replaced_and_said(tmp_path):
    environ, said = {}, []
    (tmp_path / "triton").write_text("a file where a folder should be")
    kernel_cache.point((8, 6), said.append, environ, tmp_path)
    place = Path(environ["TRITON_CACHE_DIR"])
    try:
        assert place.is_dir() and tmp_path not in place.parents and "can't be written" in said[0]
    finally:
        place.rmdir()


def test_it_is_set_before_any_backend_that_may_import_triton(tmp_path, monkeypatch):
    for name in (kernel_cache.VARIABLE, kernel_cache._OURS):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    seen = []

    def factory(runner):
        seen.append(os.environ["TRITON_CACHE_DIR"])

    choose_backend("runner", torch.device("cuda"), [factory], lambda line: None)
    assert seen[0].endswith("-sm86") and Path(seen[0]).is_dir()


def test_a_damaged_cache_is_survived(tmp_path):
    """Each file of a real entry cut short or replaced by noise: swept away, and compiled again."""
    pytest.importorskip("triton", reason="triton has no wheel here")
    given = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in given}
    kernel_cache.point((8, 0), environ=environment, root=tmp_path)
    place = Path(environment["TRITON_CACHE_DIR"])

    def compiled() -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, cwd=ROOT, capture_output=True, text=True
        )

    first = compiled()
    assert first.returncode == 0, first.stderr
    assert kernel_cache.sweep(place) == 0, "a whole one stays"
    (entry,) = (entry for entry in place.iterdir() if any(entry.glob("*.cubin")))
    contents = {file: file.read_bytes() for file in entry.iterdir()}
    kinds = {file.suffix for file in contents}
    assert {".json", ".cubin", ".ptx"} <= kinds
    for file, whole in contents.items():
        for damage in (b"", whole[: len(whole) // 2] if file.suffix in (".json", ".cubin") else b"", None):
            for path, content in contents.items():
                entry.mkdir(exist_ok=True)
                path.write_bytes(content)
            if damage is None:
                file.unlink()
                if file.name.startswith("__grp__"):
                    continue  # without its list an entry isn't looked at
            else:
                file.write_bytes(damage)
            assert kernel_cache.sweep(place) == 1 and not entry.exists(), file.name
    again = compiled()
    assert again.returncode == 0 and entry.exists(), again.stderr
    assert kernel_cache.discard(environment) and not any(place.iterdir())
