"""A speed that is measured again under masks: on zeros, and never on a device's own examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.masked_rounds.masked_description import zeros_like


@pytest.mark.parametrize(
    "value",
    [
        (torch.ones(2, 3), 7),
        [torch.arange(4), torch.ones((), dtype=torch.float64)],
        {"image": np.ones((2, 2), np.float32), "label": np.int64(3).item()},
        (torch.ones(3), {"mask": torch.ones(3, dtype=torch.bool), "weight": 0.5}),
    ],
)
def test_zeros_have_the_shapes_and_kinds_of_an_example_and_none_of_its_values(value: Any) -> None:
    def flat(one: Any) -> list[Any]:
        if isinstance(one, dict):
            return [part for item in one.values() for part in flat(item)]
        if isinstance(one, list | tuple):
            return [part for item in one for part in flat(item)]
        return [one]

    found = zeros_like(value)
    assert type(found) is type(value)
    for zero, own in zip(flat(found), flat(value), strict=True):
        assert type(zero) is type(own)
        assert getattr(zero, "shape", None) == getattr(own, "shape", None)
        assert getattr(zero, "dtype", None) == getattr(own, "dtype", None)
        assert not np.any(np.asarray(zero))


@pytest.mark.parametrize("value", ["a text", (torch.ones(1), "a path"), {"x": object()}, None])
def test_what_is_no_number_has_no_zeros(value: Any) -> None:
    assert zeros_like(value) is None
