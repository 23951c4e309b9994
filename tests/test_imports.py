"""The risk: the layers grow into each other. Imports go one way (design.md); model never meets kv or recall."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORDER = [
    ("engine.errors", "engine.units"),
    ("engine.files",),
    ("engine.config", "engine.conflicts", "engine.switches", "engine.limits", "engine.kernel_cache", "engine.pauses"),
    ("engine.platform", "engine.routes", "engine.device_profile"),
    ("engine.weights", "engine.text"),
    ("engine.ops",),
    ("engine.model", "engine.kv", "engine.recall"),
    ("engine.device", "engine.trials", "engine.prefix", "engine.sequence", "engine.sampler", "engine.result"),
    ("engine.scheduler", "engine.prepare", "engine.step", "engine.stats", "engine.watchdog"),
    (
        "engine.runner",
        "engine.step_graph",
        "engine.step_state",
        "engine.layout",
        "engine.lent",
        "engine.self_check",
        "engine.ferry",
    ),
    ("engine.launches", "engine.staged"),
    ("engine.driven",),
    ("engine.triton_runner",),
    ("engine.backend",),
    ("engine.session", "engine.audit", "engine.ring"),
    ("engine.turns",),
    ("engine.engine",),
    ("engine.examine", "engine.faults"),
    ("gates",),
    ("kvring_cli",),
]


def rank(module: str) -> int:
    return max(
        (level for level, names in enumerate(ORDER) for name in names if (module + ".").startswith(name + ".")),
        default=-1,
    )


def imports(path: Path) -> set[str]:
    """Modules imported at run time; those under TYPE_CHECKING do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def sources():
    for package in ("engine", "gates", "kvring_cli"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def test_every_module_has_its_place_and_imports_only_what_comes_before():
    wrong = []
    for module, path in sources():
        own = rank(module)
        assert own >= 0 or module in ("engine", "gates", "kvring_cli"), f"{module} has no place in the order"
        wrong += [f"{module} -> {name}" for name in imports(path) if rank(name) > own >= 0]
    assert not wrong


def test_the_model_and_the_ring_do_not_import_each_other():
    for module, path in sources():
        names = imports(path)
        if module.startswith("engine.model"):
            assert not any(name.startswith(("engine.kv", "engine.recall")) for name in names), module
        if module.startswith(("engine.kv", "engine.recall")):
            assert not any(name.startswith("engine.model") for name in names), module


def test_the_command_line_reaches_the_engine_through_its_facade_only():
    inner = ("runner", "kv.pool", "kv.host", "kv.transfer", "session", "prefix", "turns", "ring")
    below = {f"engine.{name}" for name in inner}
    for module, path in sources():
        if module.startswith(("kvring_cli", "gates")):
            assert not imports(path) & below, module


def test_every_name_that_is_imported_is_there_those_imported_late_too():
    """A command imports what it needs when it runs; a name that moved would be missed by nobody until then."""
    missing = []
    for module, path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "engine",
                "gates",
                "kvring_cli",
            ):
                if "triton" in node.module and importlib.util.find_spec("triton") is None:
                    continue
                target = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names if not hasattr(target, alias.name)):
                    try:
                        importlib.import_module(f"{node.module}.{name}")
                    except ImportError:
                        missing.append(f"{module}: {node.module}.{name}")
    assert not missing
