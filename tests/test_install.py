"""The risk: an install that is not whole starts all the same, or a whole one is called broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvring_cli.install import PACKAGES, SHOWN, check_files, check_install, check_phantom, owner
from tests.models import phantom_folder

ROOT = Path(__file__).parent.parent
ASK = """
import json, sys
from kvring_cli.install import check_install
found = [[one.name, one.status] for one in check_install()]
print(json.dumps([sys.modules["kvring_cli"].__file__, *found]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment with the built wheel in it, in a path with spaces and Chinese characters."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in filter(lambda name: (ROOT / name).exists(), PACKAGES):  # profiles comes with the cards
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", built, source], check=True)
    place = tmp_path_factory.mktemp("ein Ort") / "有 空格的 路径"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    interpreter = place / ("Scripts" if os.name == "nt" else "bin") / Path(sys.executable).name
    wheel = next(built.glob("*.whl"))
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # pip would find kvring there
    subprocess.run([*pip, "--python", interpreter, "install", "--no-deps", "--no-index", wheel], check=True, env=bare)
    needs = json.dumps([path for path in sys.path if path.endswith("site-packages")])
    packages = next(place.rglob("site-packages"))
    (packages / "needs.pth").write_text(f"import sys; sys.path += {needs}\n", encoding="utf-8")
    return interpreter


@pytest.fixture
def packages(python, tmp_path):
    """The packages of a copy of that environment, to be damaged."""
    place = shutil.copytree(python.parent.parent, tmp_path / "copy", symlinks=True)
    return next(Path(place).rglob("site-packages"))


def judge(packages: Path):
    distribution = importlib.metadata.Distribution.at(next(packages.glob("kvring-*.dist-info")))
    return check_files(distribution, packages / "kvring_cli")


def test_a_wheel_names_itself_by_its_bytes_wherever_it_is_installed(python, packages):
    def origin(interpreter):
        code = "from kvring_cli.version import origin; print(origin())"
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [interpreter, "-c", code], capture_output=True, text=True, cwd="/", env=environ, check=True
        ).stdout

    copied = (
        packages.parents[2] / "bin" / python.name if os.name != "nt" else packages.parents[1] / "Scripts" / python.name
    )
    first = origin(python)
    assert re.fullmatch(r"wheel [0-9a-f]{12}\n", first) and origin(copied) == first
    record = next(packages.glob("kvring-*/RECORD"))
    record.write_text(record.read_text().replace("engine/units.py,sha256=", "engine/units.py,sha256=x"))
    assert origin(copied) != first


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_an_install_is_whole_wherever_it_lies_and_stays_so_when_it_has_run(python, packages, tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for _ in range(2):  # the first run writes bytecode
        done = subprocess.run([python, "-c", ASK], capture_output=True, cwd=tmp_path, env=environ, check=True)
        where, *found = json.loads(done.stdout)
        assert Path(where).is_relative_to(python.parent.parent)
        assert found == [["install", "ok"], ["phantom", "ok"]]
    assert judge(packages).status == "ok"


@pytest.mark.parametrize(
    "name",
    ["engine/runner.py", "gates/phantom/model.safetensors", "kvring_cli/server/page/page.js", "kvring-*/METADATA"],
)
def test_a_flipped_byte_in_any_kind_of_file_is_named(packages, name):
    file = next(packages.glob(name))
    flip(file)
    found = judge(packages)
    assert (
        found.status == "fail" and f"{file.relative_to(packages).as_posix()} is changed" in found.detail and found.fix
    )


def test_a_flipped_byte_in_the_command_itself_is_named(packages):
    flip(packages.parents[2] / "bin" / "kvring" if os.name != "nt" else packages.parents[1] / "Scripts" / "kvring.exe")
    assert "kvring is changed" in judge(packages).detail.replace(".exe", "")


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_copy_that_stopped_half_way_is_named(packages, damage):
    damage(packages / "engine" / "kv" / "pool.py")
    assert "engine/kv/pool.py is" in judge(packages).detail


@pytest.mark.parametrize(
    "name", ["engine/old.py", "gates/phantom/more.json", "engine/__pycache__/gone.cpython-311.pyc"]
)
def test_a_file_that_the_wheel_did_not_bring_is_named(packages, name):
    file = packages / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("x = 1")
    assert f"{name} is not the wheel's" in judge(packages).detail


def test_bytecode_of_its_own_is_no_stranger(packages):
    (packages / "engine" / "__pycache__").mkdir(exist_ok=True)
    (packages / "engine" / "__pycache__" / "runner.cpython-399.opt-1.pyc").write_bytes(b"x")
    assert judge(packages).status == "ok"


@pytest.mark.parametrize(
    "record", ["", "a,b\n", "engine/runner.py,,\n", "engine/units.py,md5=a,1\n", "\0,,\n", "\udcff"]
)
def test_a_damaged_record_is_never_ok(packages, record):
    next(packages.glob("kvring-*/RECORD")).write_text(record, errors="surrogateescape")
    found = judge(packages)
    assert found.status == "fail" and found.fix


def test_a_record_that_lost_its_end_is_named(packages):
    record = next(packages.glob("kvring-*/RECORD"))
    record.write_text("".join(line for line in record.open() if not line.startswith(("engine/", "gates/"))))
    assert "engine/__init__.py is not the wheel's" in judge(packages).detail


def test_many_faults_are_counted_and_few_are_listed(packages):
    files = list((packages / "engine" / "kv").glob("*.py"))
    for file in files:
        file.unlink()
    found = judge(packages).detail
    assert found.count(" is missing") == SHOWN and f" and {len(files) - SHOWN} more" in found


def test_a_source_tree_is_unknown_not_ok():
    assert owner(ROOT / "kvring_cli") is None
    assert [found.status for found in check_install()] == ["unknown", "ok"]


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_a_damaged_phantom_is_named(tmp_path, damage):
    folder = Path(shutil.copytree(phantom_folder(), tmp_path / "phantom"))
    assert check_phantom(folder).status == "ok"
    damage(folder / "model.safetensors")
    found = check_phantom(folder)
    assert found.status == "fail" and "model.safetensors" in found.detail


@pytest.mark.parametrize("hashes", ["", "rubbish", "a b c", f"{'0' * 64}  tokenizer.json\n"])
def test_a_phantom_without_its_hashes_is_not_ok(tmp_path, hashes):
    folder = Path(shutil.copytree(phantom_folder(), tmp_path / "phantom"))
    (folder / "phantom.sha256").write_text(hashes)
    assert check_phantom(folder).status == "fail"
