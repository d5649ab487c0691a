"""Names the first tensor in which two models differ.

A digest of the layout shows that two models differ; a person needs to know where.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from headwater.common.errors import LocalParametersMismatch, ModelMismatch
from headwater.common.parsed_text import json_of

# A tensor's name, shape and dtype; the dtype is empty where it need not agree.
Row = tuple[str, tuple[int, ...], str]
IS_FROZEN = "is frozen in"
MAX_TEXT = 1 << 18  # about 4,000 tensors; a frame holds four times as much
MAX_NAME, MAX_NAMES = 300, 6
LOCAL = "local "
"""Begins the dtype of a parameter that stays on the device, and is in no vector or image."""
FROZEN = "frozen "
"""Begins the dtype of a buffer, and of a parameter that does not train."""
UNKNOWN = "the tensor in which they differ is not known"


def rows_of(state: Mapping[str, Tensor]) -> list[Row]:
    """Return the rows of a state_dict. Its dtypes need not agree: loading converts them."""
    return [(name, tuple(tensor.shape), "") for name, tensor in state.items()]


def first_difference(
    ours: Sequence[Row], theirs: Sequence[Row], *, here: str = "the task's model", there: str
) -> str:
    """Describe the first tensor that differs, in our order; ``UNKNOWN`` if none does.

    | difference | text, for there = "the file" |
    | --- | --- |
    | shape | 2.weight has shape (10, 64) in the file, (10, 128) in the task's model |
    | dtype | 2.weight is float64 in the file, float32 in the task's model |
    | frozen on one side | 2.weight is frozen in the file, and trains in the task's model |
    | only ours | 2.bias of shape (10) is not in the file |
    | only theirs | 3.bias of shape (4) is not in the task's model |
    | order | in the file 2.bias stands in place of 2.weight |
    """
    by_name = {name: (shape, dtype) for name, shape, dtype in theirs}
    for name, shape, dtype in ours:
        if name not in by_name:
            return f"{name} of shape {_text(shape)} is not in {there}"
        other_shape, other_dtype = by_name[name]
        if other_shape != shape:
            return f"{name} has shape {_text(other_shape)} in {there}, {_text(shape)} in {here}"
        if other_dtype.startswith(FROZEN) != dtype.startswith(FROZEN):
            where, elsewhere = (there, here) if other_dtype.startswith(FROZEN) else (here, there)
            return f"{name} {IS_FROZEN} {where}, and trains in {elsewhere}"
        if other_dtype != dtype:
            found, own = other_dtype.removeprefix(FROZEN), dtype.removeprefix(FROZEN)
            return f"{name} is {found} in {there}, {own} in {here}"
    names = {name for name, _, _ in ours}
    for name, shape, _ in theirs:
        if name not in names:
            return f"{name} of shape {_text(shape)} is not in {here}"
    for (name, _, _), (other, _, _) in zip(ours, theirs, strict=False):
        if name != other:
            return f"in {there} {other} stands in place of {name}"
    return UNKNOWN


def to_text(rows: Iterable[Row]) -> str:
    """Return a layout's rows as they travel to the other side; empty above ``MAX_TEXT``."""
    text = json.dumps(list(rows), separators=(",", ":"))
    return text if len(text) <= MAX_TEXT else ""


def of_text(text: str) -> list[Row]:
    """Read rows; a text that is empty or malformed gives none."""
    try:
        return [
            (_printable(name), tuple(int(size) for size in shape), _printable(dtype))
            for name, shape, dtype in json_of(text)
        ]
    except (ValueError, TypeError, RecursionError):
        return []


def difference_from_text(
    ours: Sequence[Row], text: str, *, here: str = "the task's model", there: str
) -> str:
    """Describe the first tensor that differs from rows in a text; ``UNKNOWN`` if it has none."""
    theirs = of_text(text)
    return first_difference(ours, theirs, here=here, there=there) if theirs else UNKNOWN


def mismatch_error(
    text: str, ours: Sequence[Row], theirs: str, *, here: str, there: str, remedy: str | None = None
) -> ModelMismatch:
    """Return the error of two layouts that differ; ``theirs`` are rows in a text.

    ``LocalParametersMismatch`` if other parameters stay on the devices, and both are named.
    """
    rows = of_text(theirs)
    own, other = _local_names(ours), _local_names(rows)
    if rows and own != other:
        return LocalParametersMismatch(
            f"{text}: on a device stay {_some(other)} in {there}, and {_some(own)} in {here}"
        )
    difference = difference_from_text(ours, theirs, here=here, there=there)
    if IS_FROZEN in difference and remedy is None:
        remedy = "freeze the same parameters on both sides: requires_grad_(False) in new_model"
    return ModelMismatch(f"{text}: {difference}", remedy=remedy)


def _local_names(rows: Sequence[Row]) -> list[str]:
    return [name for name, _, dtype in rows if dtype.startswith(LOCAL)]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no parameters"
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _printable(text: object) -> str:
    """Return a text of the other side as it may stand in a log: on one line, and short."""
    return "".join(sign if sign.isprintable() else " " for sign in str(text)[:MAX_NAME])


def _text(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
