"""The windows of many devices at once equal those of each device alone."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.flower.state_file import read_sampler
from headwater.client.training.sampler import MAX_SHORT, SamplerState, window
from headwater.simulation.fleet.position_columns import NO_ROUND, PositionColumns
from headwater.simulation.fleet.window_columns import Samplers, places_after, window_positions

NUM_DEVICES, SEED = 4, 3
# Of each device: whether it takes part, its quota, the share that it uses, whether that counts.
WORK = st.tuples(st.booleans(), st.integers(1, 60), st.floats(0, 1), st.booleans())
ROUNDS = st.lists(st.lists(WORK, min_size=NUM_DEVICES, max_size=NUM_DEVICES), max_size=12)
OWNED = st.lists(
    st.integers(1, 40) | st.just(MAX_SHORT + 1), min_size=NUM_DEVICES, max_size=NUM_DEVICES
)


@given(owned=OWNED, rounds=ROUNDS)
def test_windows_and_places_in_columns_are_those_of_each_device_alone(
    owned: list[int], rounds: list[list[tuple[bool, int, float, bool]]]
) -> None:
    columns, alone = PositionColumns(NUM_DEVICES), [SamplerState()] * NUM_DEVICES
    counted = [NO_ROUND] * NUM_DEVICES
    for number, works in enumerate(rounds, start=1):
        parts = [part for part, work in enumerate(works) if work[0]]
        if not parts:
            continue
        quotas = [works[part][1] for part in parts]
        used = [round(works[part][2] * quota) for part, quota in zip(parts, quotas, strict=True)]
        at = np.array(parts)
        samplers = Samplers(
            names=list(map(str, parts)), run_seed=SEED, num_owned=np.array(owned)[at]
        )
        places = columns.settle(at, np.array(counted)[at]).of_existing(samplers.num_owned)
        positions = iter(window_positions(samplers, places, np.array(quotas)).tolist())
        columns.set_pending(at, places, number, places_after(samplers, places, np.array(used)))
        for part, quota, num_used in zip(parts, quotas, used, strict=True):
            state = alone[part].settle(counted[part] or None)
            taken = window(
                state.place, quota=quota, run_seed=SEED, name=str(part), num_examples=owned[part]
            )
            assert [next(positions) for _ in range(quota)] == list(taken.positions)
            after = taken.after(num_used)
            alone[part] = dataclasses.replace(state, place=taken.place).pend(number, after)
            if works[part][3]:
                counted[part] = number
    assert [columns[part] for part in range(NUM_DEVICES)] == alone


@given(owned=OWNED, rounds=ROUNDS)
def test_a_position_written_alone_is_the_one_that_is_read_and_saved(
    owned: list[int], rounds: list[list[tuple[bool, int, float, bool]]]
) -> None:
    columns, states = PositionColumns(NUM_DEVICES), dict[int, SamplerState]()
    for number, works in enumerate(rounds, start=1):
        for part, (_, quota, share, _) in enumerate(works):
            state = states.get(part, SamplerState()).settle(number - 1)
            taken = window(
                state.place, quota=quota, run_seed=SEED, name=str(part), num_examples=owned[part]
            )
            after = taken.after(round(share * quota))
            states[part] = dataclasses.replace(state, place=taken.place).pend(number, after)
            columns[part] = states[part]
    assert {part: columns[part] for part in states} == states
    for part, plain in columns.to_plain():
        assert read_sampler(plain) == states[part]
