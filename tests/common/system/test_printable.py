"""Text from outside is shown with escapes, and names are shortened."""

from __future__ import annotations

import pytest

from headwater.common.system.printable import plot_label, printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kitchen-pi äöü 東京", "kitchen-pi äöü 東京"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b\x7f", r"\x9b\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_loses_its_middle_before_and_after_its_escapes() -> None:
    assert printable("abcdefghij", max_characters=8) == "abc..hij"
    assert printable("abcdefgh", max_characters=8) == "abcdefgh"
    assert len(printable("\x1b" * 10_000, max_characters=64)) <= 64


def test_lines_stay_lines() -> None:
    assert printable_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"


def test_a_label_is_no_formula_and_is_not_hidden() -> None:
    assert plot_label("_$x^2$") == r"\$x^2\$"
