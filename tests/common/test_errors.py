"""Errors are rebuilt from their code, and private messages stay on the device."""

from __future__ import annotations

import pytest

from headwater.common.errors import (
    CorruptUpdate,
    HeadwaterError,
    MissingData,
    error_of,
    travelling,
)


def test_an_error_is_rebuilt_from_its_code_and_message() -> None:
    error = error_of(*travelling(CorruptUpdate("pi: half of it")))
    assert type(error) is CorruptUpdate
    assert error.message == "pi: half of it"


@pytest.mark.parametrize("code", ["CorruptUpdate", "Nonsense"])
def test_a_message_from_the_other_side_stays_on_one_line_of_a_log(code: str) -> None:
    error = error_of(code, "short\n2026-11-21 INFO all is well\r\x1b[31m")
    assert str(error).isprintable()
    assert "all is well" in str(error)


def test_an_unknown_code_is_quoted() -> None:
    error = error_of("No\nSense", "text")
    assert type(error) is HeadwaterError
    assert error.message == "No Sense: text"


def test_a_private_message_does_not_travel() -> None:
    code, text = travelling(MissingData("no file /home/ann/letters.csv"))
    assert code == "MissingData"
    assert "ann" not in text


def test_the_message_of_a_foreign_exception_does_not_travel() -> None:
    code, text = travelling(ValueError("bad line: Ann, 37"))
    assert code == "ValueError"
    assert "Ann" not in text
