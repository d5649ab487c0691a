"""What ``headwater-client doctor`` found: in what grade, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from headwater.common.errors import HeadwaterError
from headwater.common.system.console import console

Grade = Literal["good", "note", "fault"]

MARKS = {"good": "[green]ok[/]   ", "note": "[yellow]note[/] ", "fault": "[bold red]FAULT[/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one check found; with a fault the device cannot take part."""

    topic: str
    text: str
    grade: Grade = "good"
    remedy: str = ""


def good(topic: str, text: str) -> Finding:
    """Return what is as it should be."""
    return Finding(topic=topic, text=text)


def note(topic: str, text: str, remedy: str) -> Finding:
    """Return what could be better."""
    return Finding(topic=topic, text=text, grade="note", remedy=remedy)


def fault(topic: str, text: str, remedy: str) -> Finding:
    """Return what keeps the device from taking part."""
    return Finding(topic=topic, text=text, grade="fault", remedy=remedy)


def fault_of(topic: str, error: HeadwaterError) -> Finding:
    """Return a fault that has a name and a remedy of its own."""
    return fault(topic, f"{error.code}: {error.message}", error.remedy)


def show(findings: Iterator[Finding]) -> bool:
    """Print what is found as it is found; return whether the device can take part."""
    num_faults = 0
    for found in findings:
        console.print(f"{MARKS[found.grade]} {found.topic:<8} ", end="")
        console.print(found.text, markup=False, soft_wrap=True)
        if found.remedy:
            console.print(f"{'':<15}-> {found.remedy}", markup=False, soft_wrap=True)
        num_faults += found.grade == "fault"
    console.print(
        "this device can take part"
        if num_faults == 0
        else f"what keeps this device from taking part: {num_faults} fault(s)"
    )
    return num_faults == 0
