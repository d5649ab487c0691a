"""The first tensor in which two models differ is named, with both shapes."""

from __future__ import annotations

import pytest

from headwater.common.model.mismatch import (
    FROZEN,
    UNKNOWN,
    Row,
    difference_from_text,
    first_difference,
    mismatch_error,
    to_text,
)

OURS: list[Row] = [("0.weight", (2, 3), "float32"), ("0.bias", (2,), "float32")]


def changed(position: int, row: Row) -> list[Row]:
    return [*OURS[:position], row, *OURS[position + 1 :]]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            changed(0, ("0.weight", (2, 4), "float32")),
            "0.weight has shape (2, 4) in B, (2, 3) in A",
        ),
        (changed(1, ("0.bias", (2,), "float64")), "0.bias is float64 in B, float32 in A"),
        (
            changed(0, ("0.weight", (2, 3), FROZEN + "float32")),
            "0.weight is frozen in B, and trains in A",
        ),
        (OURS[:1], "0.bias of shape (2) is not in B"),
        ([*OURS, ("1.bias", (), "int64")], "1.bias of shape () is not in A"),
        (OURS[::-1], "in B 0.bias stands in place of 0.weight"),
        (OURS, UNKNOWN),
    ],
)
def test_the_first_tensor_that_differs_is_named(theirs: list[Row], text: str) -> None:
    assert first_difference(OURS, theirs, here="A", there="B") == text
    assert difference_from_text(OURS, to_text(theirs), here="A", there="B") == text


def test_a_model_frozen_on_one_side_is_told_the_same_by_both_sides() -> None:
    frozen = changed(0, ("0.weight", (2, 3), FROZEN + "float32"))
    for ours, theirs, here, there in ((OURS, frozen, "A", "B"), (frozen, OURS, "B", "A")):
        error = mismatch_error("they differ", ours, to_text(theirs), here=here, there=there)
        assert error.message == "they differ: 0.weight is frozen in B, and trains in A"
        assert "requires_grad_(False)" in error.remedy


def test_a_name_that_the_other_side_sent_stays_on_one_line_of_a_log() -> None:
    found = difference_from_text(OURS, to_text([("a\nb\x1b[31m", (1,), "x")]), there="B")
    assert found.isprintable()


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["a"]]', '[["a", [null], "b"]]', "[" * 9999])
def test_a_malformed_layout_of_the_other_side_is_no_error(text: str) -> None:
    assert difference_from_text(OURS, text, there="the server's") == UNKNOWN
