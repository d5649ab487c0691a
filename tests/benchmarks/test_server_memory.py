"""The cases of the server's memory that the command line names."""

from argparse import ArgumentTypeError

import pytest

from benchmarks.server_memory import Case, case_of


def test_a_case_is_read_as_parameters_clients_and_optimizer() -> None:
    assert case_of("350000000:10:adam") == Case(350_000_000, 10, "adam")


@pytest.mark.parametrize("text", ["", "350M:10:sgd", "10:sgd", "10:0:sgd", "10:1:lion", "1:-1:sgd"])
def test_a_case_that_cannot_be_read_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{text!r} is not"):
        case_of(text)
