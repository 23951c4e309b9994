"""Reports as JUnit XML: a suite a gate, a case an arm and a check, and one for the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Tree

from gates.verdict import Arm, Report


def to_junit(reports: Sequence[Report]) -> str:
    """An arm fails where it is not what its kind must be: a control green, any other not."""
    root = Tree.Element("testsuites", name="kvring gate")
    for report in reports:
        cases = [(f"arm {arm.label}", _fault(arm), arm.seconds) for arm in report.arms if arm.kind != "shown"]
        cases += [(check.name, "" if check.ok else check.detail, 0.0) for check in report.checks]
        cases.append(("verdict", "" if not report.exit_code else "; ".join(report.reasons), 0.0))
        failures = sum(bool(fault) for _, fault, _ in cases)
        suite = Tree.SubElement(
            root,
            "testsuite",
            name=report.gate,
            tests=str(len(cases) + len(report.not_run)),
            failures=str(failures),
            skipped=str(len(report.not_run)),
            time=f"{report.seconds:.3f}",
        )
        for name, fault, seconds in cases:
            case = Tree.SubElement(suite, "testcase", classname=report.gate, name=name, time=f"{seconds:.3f}")
            if fault:
                Tree.SubElement(case, "failure", type=report.verdict, message=_clean(fault))
        for what in report.not_run:
            Tree.SubElement(Tree.SubElement(suite, "testcase", classname=report.gate, name=_clean(what)), "skipped")
    Tree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Tree.tostring(root, encoding="unicode") + "\n"


def _fault(arm: Arm) -> str:
    right = arm.red if arm.kind == "control" else arm.green
    return "" if right else f"{arm.hits} of {arm.trials}, silent wrong {arm.silent_wrong}"


def _clean(text: str) -> str:
    """Without the control characters that XML can't hold: a model may say anything."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
