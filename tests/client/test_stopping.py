"""What ends a window before its quota; what was summed is sent, exactly weighted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from client.workplace import Restraint
from tests.tasks import TwoLayers, examples
from tests.workplaces import FakeClock, plan, sums, trained, workplace


def test_at_the_deadline_the_micro_batches_that_fit_are_sent_exactly_weighted() -> None:
    place = workplace(TwoLayers(), examples(20))
    update = trained(place, plan(20, 4, deadline_seconds=13.0))
    assert update.report.reason == "deadline"
    assert len(update.report.steps) == 3  # 4 s each: the fourth would end at 16 s
    assert update.report.weight == 12
    assert torch.equal(update.values_P, sums(place, range(12)))


def test_a_deadline_that_just_fits_cuts_nothing_off() -> None:
    place = workplace(TwoLayers(), examples(20))
    update = trained(place, plan(20, 4, deadline_seconds=20.0))
    assert (update.report.reason, update.report.weight) == ("quota", 20)


def test_asked_to_stop_it_sends_what_it_has() -> None:
    task = TwoLayers()
    place = workplace(task, examples(20), stop=lambda: len(task.seen) >= 2)
    update = trained(place, plan(20, 4))
    assert (update.report.reason, update.report.weight) == ("asked to stop", 8)
    assert torch.equal(update.values_P, sums(place, range(8)))


class Mood:
    """A device that gives shares of its time, one after the other, and counts who asks."""

    def __init__(self, *shares: float) -> None:
        self._shares = shares
        self.num_asked = 0

    def __call__(self) -> Restraint:
        share = self._shares[min(self.num_asked, len(self._shares) - 1)]
        self.num_asked += 1
        return Restraint(share=share, reason="on battery" if share < 1 else "quota")


@pytest.mark.parametrize(
    ("counted", "given", "num_examples"),
    [
        pytest.param(1.0, 0.5, 12, id="half of the quota"),
        pytest.param(0.5, 0.5, 24, id="as much as the plan counts on"),
        pytest.param(0.5, 1.0, 24, id="more than the plan counts on"),
        pytest.param(0.5, 0.25, 12, id="half of what the plan counts on"),
        pytest.param(1.0, 0.6, 12, id="no micro-batch that would pass it: 14.4"),
        pytest.param(1.0, 0.01, 4, id="at least one micro-batch"),
    ],
)
def test_a_device_that_gives_less_than_its_plan_counts_on_ends_there(
    counted: float, given: float, num_examples: int
) -> None:
    place = workplace(TwoLayers(), examples(24), restraint=Mood(given))
    update = trained(place, plan(24, 4, share=counted))
    assert update.report.weight == update.report.num_examples == num_examples
    assert update.report.reason == ("quota" if num_examples == 24 else "on battery")
    assert torch.equal(update.values_P, sums(place, range(num_examples)))


def test_where_the_plan_counts_on_no_share_nothing_is_taken_off() -> None:
    mood = Mood(0.01)
    place = workplace(TwoLayers(), examples(24), restraint=mood)
    update = trained(place, plan(24, 4))
    assert (update.report.weight, update.report.reason) == (24, "quota")
    assert mood.num_asked == 0


def test_a_device_that_goes_on_battery_in_mid_window_stops_there() -> None:
    # Four seconds to a micro-batch: asked at 0 s, 4 s and 8 s. Half of 24 is reached by then.
    place = workplace(TwoLayers(), examples(24), restraint=Mood(1.0, 1.0, 1.0, 0.5))
    update = trained(place, plan(24, 4, share=1.0))
    assert (update.report.num_examples, update.report.reason) == (12, "on battery")


def test_a_device_that_is_back_on_mains_does_its_whole_quota() -> None:
    place = workplace(TwoLayers(), examples(24), restraint=Mood(0.5, 0.5, 1.0))
    update = trained(place, plan(24, 4, share=1.0))
    assert (update.report.num_examples, update.report.reason) == (24, "quota")


def test_the_device_is_asked_about_once_a_second_however_short_the_micro_batches() -> None:
    class Fast(FakeClock):
        def worked(self, num_examples: int) -> None:
            self.now += 0.125 * num_examples

    mood = Mood(1.0)
    place = replace(workplace(TwoLayers(), examples(24), restraint=mood), clock=Fast())
    trained(place, plan(24, 1, share=1.0))
    # 24 micro-batches end at 1/8 s to 3 s; the last one has none behind it to be asked for.
    assert mood.num_asked == 3


def test_restraint_counts_over_all_local_steps() -> None:
    place = workplace(TwoLayers(), examples(24), restraint=Mood(0.5))
    asked = plan(24, 4, share=1.0, local_steps=3, local_learning_rate=2.0**-6)
    update = trained(place, asked)
    assert (update.report.num_examples, update.report.reason) == (12, "on battery")
