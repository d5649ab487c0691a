"""Errors that travel: rebuilt by their code, shown to nobody who should not see them."""

from __future__ import annotations

import pytest

from headwater.common.errors import CorruptUpdate, HeadwaterError, error_of, travelling


def test_an_error_comes_back_as_itself() -> None:
    found = error_of(*travelling(CorruptUpdate("pi: half of it")))
    assert type(found) is CorruptUpdate
    assert found.message == "pi: half of it"


@pytest.mark.parametrize("code", ["CorruptUpdate", "Nonsense"])
def test_what_the_other_side_wrote_stays_on_one_line_of_a_log(code: str) -> None:
    found = error_of(code, "short\n2026-11-21 INFO all is well\r\x1b[31m")
    assert str(found).isprintable()
    assert "all is well" in str(found)


def test_an_unknown_code_is_quoted() -> None:
    found = error_of("No\nSense", "text")
    assert type(found) is HeadwaterError
    assert found.message == "No Sense: text"
