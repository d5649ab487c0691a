"""Masked rounds: the order of the requests, and which examples count as used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.secagg.prepare import update_id
from headwater.client.training.sampler import SamplerPosition
from headwater.common.errors import OutOfPhase, TooFewSurvivors, UpdateAlreadyMasked, UpdateNotHeld
from headwater.common.secagg.protocol import (
    CheckRequest,
    MaskRequest,
    SurvivorsRequest,
    UnmaskRequest,
)
from tests.client.secagg.cohort import Between, make_setup, place_of, trained
from tests.faults import FaultPlan
from tests.masked import (
    ACTIONS,
    KEYS,
    TASK,
    AppDevice,
    Device,
    DeviceReply,
    NodeDevice,
    ask,
    is_after,
    opening_of,
    plain_sum,
    plan,
    play,
    ready,
    sum_of,
    train,
)

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


# The order of requests, and restarted processes.


def test_a_phase_out_of_order_is_refused() -> None:
    cohort = trained(3)
    with pytest.raises(OutOfPhase):
        ask(cohort[0], CheckRequest(shares=()))
    play(cohort, make_setup(cohort), until="share_keys")
    for request in (
        MaskRequest(members=("d0", "d1", "d2")),
        SurvivorsRequest(survived=("d0", "d1", "d2"), dropped=()),
        UnmaskRequest(survived=("d0", "d1", "d2"), dropped=()),
    ):
        with pytest.raises(OutOfPhase):
            ask(cohort[0], request)


def test_a_device_without_an_update_refuses_a_session() -> None:
    device = AppDevice(0)
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)
    train(device, plan(is_masked=False))
    with pytest.raises(UpdateNotHeld):
        ask(device, KEYS)


def test_any_plan_of_the_next_round_ends_all_sessions_of_the_last() -> None:
    cohort = trained(3)
    ready(cohort[0], plan(2))
    with pytest.raises(UpdateNotHeld):
        ask(cohort[1], KEYS)
    ask(cohort[0], KEYS.model_copy(update={"round": 2}))


@pytest.mark.parametrize("action", [action for action in ACTIONS if action != "consistency"])
def test_a_restarted_process_leaves_the_session_and_uses_no_example_twice(
    action: str, tmp_path: Path
) -> None:
    """Once its masked vector is with the server, the others' shares open the sum with it."""
    sums = [plain_sum(part, plan())[0] for part in range(5)]
    others = [AppDevice(part) for part in range(1, 5)]
    killed = NodeDevice(0, tmp_path)
    cohort: list[Device] = [killed, *others]
    for device in cohort:
        ready(device, plan())

    def restart(_: DeviceReply) -> None:
        between.device = NodeDevice(0, tmp_path, task=f"././{TASK}")

    between = Between(killed, action, restart)
    played = play([between, *others], opening_of(cohort, plan()))
    is_masked = not is_after("masked_update", action)
    np.testing.assert_array_equal(sum_of(played.sum), sum(sums[0 if is_masked else 1 :]))
    if action == "unmask":
        assert not played.refused
    else:
        assert isinstance(played.refused["d0"], UpdateNotHeld)
    ready(between.device, plan(2))
    assert place_of(between.device) == SamplerPosition(offset=8 if is_masked else 0)


# Which examples are spent.


def test_a_masked_update_s_examples_are_spent_even_if_the_round_fails() -> None:
    behind = plain_sum(0, plan(), place=SamplerPosition(offset=8))[0]
    expected = [behind, *(plain_sum(part, plan())[0] for part in range(1, 4))]
    cohort = trained(4)
    faults = FaultPlan()
    for name in ("d1", "d2", "d3"):
        faults = faults.drop(client=name, after="check_shares")
    with pytest.raises(TooFewSurvivors):
        play(cohort, make_setup(cohort), faults)
    assert [place_of(device).offset for device in cohort] == [8, 0, 0, 0]
    with pytest.raises(UpdateAlreadyMasked):
        ask(cohort[0], KEYS.model_copy(update={"attempt": 2}))
    for device in cohort:  # the round is tried again
        ready(device, plan())
    again = play(cohort, make_setup(cohort, attempt=2)).sum
    np.testing.assert_array_equal(sum_of(again), sum(expected))


def test_an_unmasked_update_may_join_another_session() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(4))
    cohort = trained(4)
    faults = FaultPlan()
    for device in cohort[1:]:
        faults = faults.drop(client=device.name, after="share_keys")
    with pytest.raises(TooFewSurvivors):
        play(cohort, make_setup(cohort), faults)
    opened = play(cohort, make_setup(cohort, attempt=2)).sum
    np.testing.assert_array_equal(sum_of(opened), expected)
    assert [place_of(device).offset for device in cohort] == [8, 8, 8, 8]


def test_the_server_s_round_count_does_not_move_a_spent_place() -> None:
    cohort = trained(3)
    play(cohort, make_setup(cohort))
    for counted in (None, 1):
        ready(cohort[0], plan(2, counted_round=counted))
        assert place_of(cohort[0]) == SamplerPosition(offset=8)


WORK = st.tuples(st.sets(st.integers(0, 9), min_size=1), st.binary(min_size=32, max_size=32))


@given(first=WORK, second=WORK)
def test_two_updates_share_an_id_only_for_the_same_model_and_examples(
    first: tuple[set[int], bytes], second: tuple[set[int], bytes]
) -> None:
    def named(examples: set[int], model_digest: bytes) -> str:
        return update_id(model_digest, examples)

    assert (named(*first) == named(*second)) == (first == second)
    assert update_id(bytes(32), (3, 1, 2)) == update_id(bytes(32), (1, 2, 3))
    assert update_id(bytes(32), (1, 2)) != update_id(bytes(32), (1, 2), [bytes(32)])  # its test
