"""Python, torch, its CUDA, triton, the driver and the packages: are they there, and do they go together?"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from engine.platform import Facts
from engine.platform.nvidia import NO_DRIVER
from kvring_cli.doctor.judge import judge
from kvring_cli.engines import torch_line
from kvring_cli.install import Finding

OLDEST_DRIVER = {
    "linux": {11: "450.80", 12: "525.60", 13: "580.65"},
    "windows": {11: "452.39", 12: "528.33", 13: "580.88"},
}
"""NVIDIA's oldest driver for each CUDA, by its release notes (minor versions of one CUDA go together)."""
KNOWN_PAIRS = {"2.6": "3.2", "2.7": "3.3", "2.8": "3.4", "2.9": "3.5", "2.10": "3.6", "2.11": "3.6"}
KNOWN_PAIRS |= {"2.12": "3.7", "2.13": "3.7"}
"""torch and the triton that it was released with, where torch itself doesn't say (triton-windows)."""
PYTHONS = ((3, 10), (3, 13))
PACKAGES = {
    "numpy": "numpy",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "jinja2": "jinja2",
    "typer": "typer",
    "rich": "rich",
    "pyyaml": "yaml",
    "psutil": "psutil",
    "nvidia-ml-py": "pynvml",
    "platformdirs": "platformdirs",
    "pathspec": "pathspec",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus-client": "prometheus_client",
}
"""What kvring needs beside torch and triton, and the modules of it."""
_DRIVERS = "nvidia.com/drivers"
_NO_LIBRARY = ("WinError 126", "WinError 127", "DLL load failed")
_REDISTRIBUTABLE = "install Microsoft's Visual C++ Redistributable: https://aka.ms/vs/17/release/vc_redist.x64.exe"
"""Without it none of torch's libraries load on Windows, and torch names one of its own as missing."""


def check(facts: Facts) -> Iterator[Finding]:
    yield _python(facts)
    yield _torch(facts)
    yield _triton(facts)
    yield _driver(facts)
    yield _packages()


def _python(facts: Facts) -> Finding:
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    detail = f"{facts.python} at {facts.executable}"
    if version < PYTHONS[0]:
        return Finding("python", "fail", detail, "install Python 3.10 to 3.13")
    newer = version > PYTHONS[1]
    return judge("python", newer, detail + (": newer than what was tried" if newer else ""), "Python 3.10 to 3.13")


def _torch(facts: Facts) -> Finding:
    torch, install = facts.torch, torch_line(facts) if facts.gpus else "pip install torch"
    if torch.version is None:
        return Finding("torch", "fail", "torch is not installed", install)
    if torch.trouble:
        library = facts.system == "windows" and any(sign in torch.trouble for sign in _NO_LIBRARY)
        fix = f"{_REDISTRIBUTABLE}; if that is not it, {install}" if library else install
        return Finding("torch", "fail", f"{torch.version} can't be imported: {torch.trouble}", fix)
    if not facts.gpus:
        return Finding("torch", "ok", f"{torch.version}, CUDA {torch.cuda or 'none'}; no card needs it")
    if torch.cuda is None:
        where = " (on Windows, PyPI's torch is the CPU build)" if facts.system == "windows" else ""
        return Finding("torch", "fail", f"{torch.version} has no CUDA, and a card is here{where}", install)
    if not torch.sees_card:
        detail = f"{torch.version}, CUDA {torch.cuda}: does not find the card"
        return Finding("torch", "fail", detail, "see `driver` below; CUDA_VISIBLE_DEVICES may hide it; restart")
    return Finding("torch", "ok", f"{torch.version}, CUDA {torch.cuda}")


def _triton(facts: Facts) -> Finding:
    name = "triton-windows" if facts.system == "windows" else "triton"
    needed = bool(facts.gpus)
    if facts.triton is None:
        detail = "not installed: torch's own kernels serve" if needed else "not installed; no card needs it"
        return judge("triton", needed, detail, f"pip install {name}")
    held = f"{facts.triton.name} {facts.triton.version}"
    wants = facts.torch.wants or KNOWN_PAIRS.get(_minor(facts.torch.version or ""))
    if wants is None:
        detail = f"{held} beside torch {facts.torch.version}: a pair that nobody tried here"
        least, *_, most = KNOWN_PAIRS
        return judge(
            "triton", needed, detail, f"kvring smoke MODEL tries it; known are those of torch {least} to {most}"
        )
    wrong = _minor(facts.triton.version) != _minor(wants)
    detail = held + (f", but torch {facts.torch.version} was made with {wants}" if wrong else "")
    return judge("triton", wrong, detail, f"pip install '{name}=={_minor(wants)}.*'")


def _driver(facts: Facts) -> Finding:
    driver, cuda = facts.driver, facts.torch.cuda
    if driver.trouble == NO_DRIVER:
        return Finding("driver", "ok", "no NVIDIA driver, no card: kvring computes on the CPU")
    if driver.trouble:
        return Finding("driver", "fail", driver.trouble, f"restart; then install the driver from {_DRIVERS} again")
    if driver.version is None:
        return Finding("driver", "unknown", "it does not say its version", "nvidia-smi shows it")
    detail = driver.version + (f", up to CUDA {driver.cuda}" if driver.cuda else "")
    if cuda is None:
        return Finding("driver", "ok", detail)
    table = OLDEST_DRIVER["windows" if facts.system in ("windows", "wsl2") else "linux"]
    oldest = table.get(int(cuda.split(".")[0]))
    if oldest is None:
        return Finding("driver", "unknown", f"{detail}; what CUDA {cuda} needs is not known here", _DRIVERS)
    if _number(driver.version) < _number(oldest):
        detail += f": older than torch's CUDA {cuda} needs ({oldest})"
        return Finding("driver", "fail", detail, f"install driver {oldest} or newer from {_DRIVERS}")
    compatible = bool(driver.cuda) and _number(driver.cuda or "") < _number(cuda)
    detail += f"; torch's CUDA {cuda} runs in compatibility" if compatible else ""
    return judge("driver", compatible, detail, f"a newer driver from {_DRIVERS}, if a kernel fails to load")


def _packages() -> Finding:
    """Each is imported: one may be there, and a package that it needs in turn be missing."""
    broken = {}
    for name, module in PACKAGES.items():
        try:
            import_module(module)
        except Exception as error:  # a damaged one raises anything
            broken[name] = f"{name} can't be imported ({' '.join(str(error).split()) or type(error).__name__})"
    if not broken:
        return Finding("packages", "ok", f"{len(PACKAGES)} can be imported")
    fix = f"pip install --force-reinstall {' '.join(broken)}"
    return Finding("packages", "fail", "; ".join(broken.values()), fix)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
