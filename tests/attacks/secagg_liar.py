"""A hostile device in a secure session: its changes, and the sum without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.secagg import Cast, Played

LIAR, OTHER = "d002", "d003"
MODES = ("semi-honest", "active")


def changed(**fields: Any) -> Callable[[tuple[Any, Any]], Any]:
    """Change fields of a reply; a function takes the reply and returns the field's value."""

    def change(said: tuple[Any, Any]) -> tuple[Any, Any]:
        answer, vector = said
        values = {n: value(answer) if callable(value) else value for n, value in fields.items()}
        return answer.model_copy(update=values), vector

    return change


def sum_without(cast: Cast, played: Played, *names: str) -> None:
    """Check the sum against the plain sum without these devices."""
    assert list(played.sum.survived) == [name for name in cast.names if name not in names]
    plain_P, _ = cast.plain_sum(played.sum.survived, played.sum)
    np.testing.assert_array_equal(played.sum.vector_P, plain_P)


def spoil(share: bytes) -> bytes:
    return bytes([share[0] ^ 1, *share[1:]])
