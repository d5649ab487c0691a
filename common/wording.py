"""Words of printed lines: a number with its noun, and names in their natural order."""

from __future__ import annotations

import re


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is plural unless the number is 1: ``1,200 devices``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def natural(text: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return a sort key by which ``pi2`` comes before ``pi10``, and a number before a word."""
    parts = re.split(r"([0-9]+)", text)
    numbers = [*map(int, parts[1::2]), 0]
    return tuple(zip(parts[::2], numbers, strict=True)), text
