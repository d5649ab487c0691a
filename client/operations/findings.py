"""A finding of ``headwater-client doctor``: its grade and its remedy, and how it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headwater.common.errors import HeadwaterError
from headwater.common.system.console import console
from headwater.common.system.printable import printable, printable_lines

Grade = Literal["good", "note", "fault"]

MARKS = {"good": "[green]ok[/]   ", "note": "[yellow]note[/] ", "fault": "[bold red]FAULT[/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check; a device with a fault cannot take part."""

    topic: str
    text: str
    grade: Grade = "good"
    remedy: str = ""


def good(topic: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(topic=topic, text=text)


def note(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding that could be improved, and how."""
    return Finding(topic=topic, text=text, grade="note", remedy=remedy)


def fault(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps the device from taking part, and its remedy."""
    return Finding(topic=topic, text=text, grade="fault", remedy=remedy)


def fault_of(topic: str, error: HeadwaterError) -> Finding:
    """Return a fault with an error's code, message and remedy."""
    return fault(topic, f"{error.code}: {error.message}", error.remedy)


def show(findings: Iterator[Finding]) -> bool:
    """Print each finding as soon as it is made; return whether the device can take part."""
    num_faults = 0
    for finding in findings:
        console.print(f"{MARKS[finding.grade]} {finding.topic:<8} ", end="")
        console.print(printable_lines(finding.text), markup=False, soft_wrap=True)
        if finding.remedy:
            console.print(f"{'':<15}-> {printable(finding.remedy)}", markup=False, soft_wrap=True)
        num_faults += finding.grade == "fault"
    console.print(
        f"this device cannot take part: {num_faults} fault(s)"
        if num_faults
        else "this device can take part"
    )
    return num_faults == 0
