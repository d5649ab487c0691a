"""When masked plans are answered: from public figures alone."""

from __future__ import annotations

from headwater.common.settings import schema as settings
from headwater.server.secagg.planning.answer_times import (
    MIN_ANSWER_SECONDS,
    UNMEASURED_ANSWER_SECONDS,
    answer_times,
)
from tests.server.planning.planned import Candidate, assign, device

FACTOR = 1.25
FOUR_OF_EIGHT = settings.PlanSettings(accumulation_steps=4, micro_batch_size=8)


def times_of(*devices: Candidate, chosen: settings.PlanSettings = FOUR_OF_EIGHT) -> list[float]:
    assigned = assign(devices, chosen, target=64)
    times = answer_times(assigned, assigned.micro_batch_size, factor=FACTOR)
    return [time for time in times if time is not None]


def test_a_plan_with_k_set_is_answered_after_its_predicted_time_with_room() -> None:
    slow = device("slow", base=0.5, each=1.0)
    assert times_of(slow) == [FACTOR * (4 * 0.5 + 32 * 1.0)]


def test_a_plan_with_a_finish_time_is_answered_after_that_with_room() -> None:
    chosen = settings.PlanSettings()
    assigned = assign([device("one", each=1.0), device("two", each=1.0)], chosen, target=64)
    finish = assigned.finish_seconds(assigned.micro_batch_size).tolist()
    found = times_of(device("one", each=1.0), device("two", each=1.0), chosen=chosen)
    assert found == [FACTOR * one for one in finish]


def test_a_client_of_unknown_speed_gets_the_time_of_the_slowest() -> None:
    assert times_of(device("slow", each=1.0), device("fast", each=0.5), device("unknown")) == [
        FACTOR * 32,
        FACTOR * 16,
        FACTOR * 32,
    ]
    assert times_of(device("unknown")) == [FACTOR * UNMEASURED_ANSWER_SECONDS]


def test_a_small_window_gets_more_than_the_scheduler_s_noise() -> None:
    assert times_of(device("fast", each=1e-6)) == [MIN_ANSWER_SECONDS]


def test_plain_plans_have_no_time_for_their_answer() -> None:
    assigned = assign([device(each=1.0)], FOUR_OF_EIGHT, target=64)
    assert answer_times(assigned, assigned.micro_batch_size, factor=None) == [None]
