"""Words of printed lines: numbers with their nouns, bytes, durations, and names in their order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

MAX_NAMES = 5
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is plural unless the number is 1: ``1,200 devices``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(amount: float) -> str:
    """Return bytes with three digits: 950 B, 3.1 MB, 12 GB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if amount >= size:
            scaled = amount / size
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{amount:.0f} B"


def natural(text: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return a sort key by which ``pi2`` comes before ``pi10``, and a number before a word."""
    parts = re.split(r"([0-9]+)", text)
    numbers = [*map(int, parts[1::2]), 0]
    return tuple(zip(parts[::2], numbers, strict=True)), text


def duration_text(seconds: float) -> str:
    """Return a duration as a whole number of its largest unit: 12 s, 3 min, 5 h, 2 d."""
    for unit, size in UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def names_text(names: Sequence[str], number: int) -> str:
    """Return the first few of ``number`` names: "a, b, c, d, e and 12 more"."""
    shown = ", ".join(names[:MAX_NAMES])
    num_more = number - len(names[:MAX_NAMES])
    return f"{shown} and {num_more} more" if num_more else shown


def in_shell(word: str | Path) -> str:
    """Return a path or a word as a shell takes it: quoted where it has spaces, say."""
    return shlex.quote(str(word))


def figure_text(value: float) -> str:
    """Return a loss or a metric: four decimals, and five digits of a large one."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.5g}"
