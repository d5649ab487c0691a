"""How a device says which members of a session it holds at fault: their names come first.

An error travels as its class and its text, over every kind of link. What the text accuses is a
claim like any other: who answers for it, and when, is decided in ``server.secagg.blame``.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 5
"""Names of up to 128 characters each, in a text that may have 1,000 of them."""


def accusation(names: Sequence[str], what: str) -> str:
    """Return the text that accuses these devices, of whom the first few are named."""
    return f"{', '.join(names[:MOST_NAMED])}: {what}"


def accused_in(text: str) -> frozenset[str]:
    """Return whom a text accuses; of any other text what it begins with, which names nobody."""
    return frozenset(text.partition(": ")[0].split(", ")[:MOST_NAMED])
