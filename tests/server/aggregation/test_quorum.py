"""A round with too few updates says what the operator can do about the clients' errors."""

from __future__ import annotations

import pytest

from headwater.common.errors import (
    AlgorithmMismatch,
    ConnectionLost,
    EmptyUpdate,
    HeadwaterError,
    MaskingRequired,
    NonFiniteUpdate,
    NothingWeighed,
    OutlierUpdate,
    OutOfMemory,
    TooFewClients,
)
from headwater.server.aggregation.quorum import NOTHING_FINITE, check_quorum


@pytest.mark.parametrize(
    ("kinds", "remedy"),
    [
        ([OutOfMemory] * 2, OutOfMemory.remedy),
        ([AlgorithmMismatch], AlgorithmMismatch.remedy),
        ([MaskingRequired], MaskingRequired.remedy),
        ([EmptyUpdate] * 2, NOTHING_FINITE),
        ([EmptyUpdate, NonFiniteUpdate, OutlierUpdate], NOTHING_FINITE),  # the model diverged
        ([EmptyUpdate, OutOfMemory], TooFewClients.remedy),
        ([NothingWeighed] * 2, NothingWeighed.remedy),
        ([OutOfMemory, AlgorithmMismatch], TooFewClients.remedy),
        ([ConnectionLost] * 2, TooFewClients.remedy),  # its remedy is for the device
        ([], TooFewClients.remedy),
    ],
)
def test_the_remedy_is_that_of_the_error_that_all_clients_have(
    kinds: list[type[HeadwaterError]], remedy: str
) -> None:
    errors = {str(number): kind("why") for number, kind in enumerate(kinds)}
    with pytest.raises(TooFewClients) as raised:
        check_quorum(0, needed=1, num_invited=3, num_left_out=0, errors=errors, round_number=2)
    assert raised.value.remedy == remedy


def test_clients_that_answered_with_an_error_are_not_said_to_have_been_late() -> None:
    errors = {"pi": OutOfMemory("one example does not fit")}
    with pytest.raises(TooFewClients, match="0 of 1 client gave a usable answer in time, at least"):
        check_quorum(0, needed=1, num_invited=1, num_left_out=0, errors=errors, round_number=2)
