"""A conversation that a feature has with devices beside plans, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A phase: its action, which names it on the wire, and the two kinds of ``WireMessage``."""

    action: str
    request: type[Any]
    reply: type[Any]
    """It has the ``name`` of the client that sends it."""
