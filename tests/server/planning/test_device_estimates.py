"""Rows of what is known of clients: they are what was put in, and the checkpoint restores them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Vitals
from headwater.server.planning.device_estimates import (
    DEADLINE_SHARE,
    UNKNOWN_DEVICE,
    DeviceEstimate,
    EstimateColumns,
    from_json,
    to_json,
)

NUMBER = st.floats(0, 1e9)
ESTIMATES = st.builds(
    DeviceEstimate,
    num_examples=st.integers(0, 2**40),
    line=st.none() | st.builds(Line, base=NUMBER, each=NUMBER),
    fastest_micro_batch_size=st.none() | st.integers(1, 2**31),
    vitals=st.builds(
        Vitals,
        memory_limit_bytes=st.none() | st.integers(0, 2**53),
        bytes_per_example=st.none() | NUMBER,
        is_on_battery=st.none() | st.booleans(),
        share=st.floats(0.001, 1),
    ),
    deadline_share=st.floats(0.05, DEADLINE_SHARE),
    times_late=st.integers(0, 5),
    waiting_since=st.none() | st.integers(1, 1000),
    is_outdated=st.booleans(),
)


def plain(known: dict[str, DeviceEstimate]) -> dict[str, dict[str, Any]]:
    return to_json(known, EstimateColumns.of(known.values()))


@given(st.lists(ESTIMATES, max_size=4))
def test_a_row_is_the_estimate_that_was_put_in(rows: list[DeviceEstimate]) -> None:
    columns = EstimateColumns.of(rows)
    assert [columns.estimate(at) for at in range(len(columns))] == rows
    table = EstimateColumns.unknown(len(rows) + 1)
    table.put(np.arange(len(rows)), columns)
    assert [table.estimate(at) for at in range(len(table))] == [*rows, UNKNOWN_DEVICE]


@given(st.dictionaries(st.text("ab0", min_size=1, max_size=3), ESTIMATES, max_size=4))
def test_the_checkpoint_restores_estimates_to_the_bit(known: dict[str, DeviceEstimate]) -> None:
    # All but the number of examples, which a connected client tells again.
    restored = from_json(json.loads(json.dumps(plain(known))))
    assert restored == {name: replace(one, num_examples=0) for name, one in known.items()}


def test_a_checkpoint_of_an_earlier_version_still_loads() -> None:
    known = {"pi": DeviceEstimate(line=Line(base=0.5, each=0.25))}
    rows = {name: {**row, "num_left": 7} for name, row in plain(known).items()}
    assert from_json(rows) == known


def test_an_estimate_at_its_defaults_takes_little_room() -> None:
    known = DeviceEstimate(line=Line(base=math.pi, each=math.e), is_outdated=False)
    assert len(json.dumps(plain({"pi": known}))) < 100
