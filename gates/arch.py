"""arch: a real server warns when it answers over its pool with recall off, and only then."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.switches import SETTINGS
from gates.child import LEASHED, Child, free_port
from gates.context import ROOM, Context
from gates.haystack import Document
from gates.outside import EXACT
from gates.verdict import Check, Report

TOKENS, POOL = 6_000, 2_048
SERVE = (*LEASHED, "kvring_cli.app", "serve")
OWN = ("kv_capacity", "max_context", "retrieve", "prefill", "decode", "prefill_chunk")
CHUNK = 512


def run(context: Context) -> Report:
    """Three servers: recall off over the pool, recall off within it, recall on over it. The fact is in the middle."""
    report = Report("arch", environment=context.environment())
    tokens = context.fitted(TOKENS, report)
    if tokens <= POOL:
        raise ConfigError(f"a prompt of {tokens:,} tokens doesn't outgrow a pool of {POOL:,}", "a longer context")
    document = context.document("keyed", tokens, 5, depths=[0.5], own=False)
    short = context.document("keyed", 600, 5, asked=1, own=False)
    cases = (
        ("off, over the pool", "off", POOL, document, True),
        ("off, pool larger than the prompt", "off", tokens + ROOM, document, False),
        ("on, over the pool", "auto", POOL, document, False),
    )
    for number, (name, retrieve, pool, asked, warns) in enumerate(cases):
        context.say(f"arch: a server with recall {name}", number / len(cases))
        command = [*SERVE, context.config.model, *flags_of(context.config), "--retrieve", retrieve]
        command += ["--kv-capacity", str(pool), "--max-context", str(tokens + ROOM), "--prefill-chunk", str(CHUNK)]
        command += ["--prefill", context.prefill, "--host", "127.0.0.1", "--port", str(port := free_port())]
        with Child(command, port) as child:
            state = child.wait_ready(context.options.timeout)
            if state != "ready":
                lines = " | ".join(child.lines[-3:])
                report.checks.append(Check(f"recall {name}: server", False, f"it {state}: {lines}"))
                continue
            _asked(child, context.options.timeout, name, asked, warns, report)
            if warns:
                _asked(child, context.options.timeout, "off, short prompt", short, False, report)
    return report.judge()


def _asked(child: Child, timeout: float, name: str, document: Document, warns: bool, report: Report) -> None:
    (fact,) = document.asked
    model = child.request("/v1/models")[1]["data"][0]["id"]

    def ask(**more: Any) -> tuple[int, Any]:
        body = {"model": model, "messages": document.messages(fact), "max_tokens": 16, "temperature": 0, **more}
        return child.request("/v1/chat/completions", body, timeout)

    def ceiling() -> str:
        status, value = ask(**EXACT)
        if status != 200:
            raise EngineError(f"recall {name}: exact attention was refused, HTTP {status}: {str(value)[:200]}")
        return _text(value)

    status, value = ask()
    if status != 200:
        report.checks.append(Check(f"recall {name}: answered", False, f"HTTP {status}: {str(value)[:200]}"))
        return
    warnings = [text for text in value.get("kvring", {}).get("warnings", []) if "recall was off" in text]
    detail = f"{len(warnings)} warnings that recall was off"
    what = f"{'' if warns else 'control: '}recall {name}"
    report.checks.append(Check(what, bool(warnings) == warns, detail, not warns))
    if not warns:  # everything was seen, or recalled
        report.answered(f"recall {name}: the answer", fact, _text(value), ceiling)


def _text(value: Any) -> str:
    return value["choices"][0]["message"]["content"] or ""


def flags_of(config: EngineConfig) -> list[str]:
    """The user's settings as flags, but for those that a case sets itself."""
    flags: list[Any] = []
    for setting in SETTINGS:
        value = getattr(config, setting.field)
        if value == setting.default or setting.field in OWN:
            continue
        if setting.boolean:
            flags.append(setting.flag if value else f"--no-{setting.flag[2:]}")
        else:
            flags += [setting.flag, f"{value}B" if setting.field.endswith("_bytes") else str(value)]
    return flags
