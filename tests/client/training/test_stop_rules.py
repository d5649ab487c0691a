"""The rules that end a window before or after its quota; the sum so far is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headwater.client.device.interfaces import TimeShare
from headwater.client.features import train_round
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.sampler import SamplerPosition, window
from headwater.client.training.stop_rules import SUMMED_PART, StopRules, num_until_finish
from headwater.client.training.window import sum_window
from headwater.common.messages import MAX_STEPS, Plan, Step, Update
from tests.tasks import TwoLayers, examples
from tests.training_contexts import FakeClock, plan, sums, trained, training_context, whole


def test_micro_batches_done_before_the_deadline_are_sent_with_their_exact_weight() -> None:
    context = training_context(TwoLayers(), examples(20))
    update = trained(context, plan(20, 4, deadline_seconds=13.0))
    assert update.report.reason == "deadline"
    assert len(update.report.steps) == 3  # 4 s each: the fourth would end at 16 s
    assert update.report.weight == 12
    assert torch.equal(update.values_P, sums(context, range(12)))


def test_a_deadline_that_just_suffices_ends_nothing_early() -> None:
    context = training_context(TwoLayers(), examples(20))
    update = trained(context, plan(20, 4, deadline_seconds=20.0))
    assert (update.report.reason, update.report.weight) == ("quota", 20)


def test_a_stop_request_sends_the_sum_so_far() -> None:
    task = TwoLayers()
    context = training_context(task, examples(20), should_stop=lambda: len(task.seen) >= 2)
    update = trained(context, plan(20, 4))
    assert (update.report.reason, update.report.weight) == ("asked to stop", 8)
    assert torch.equal(update.values_P, sums(context, range(8)))


def test_a_stop_request_is_the_reason_also_when_the_finish_time_has_come() -> None:
    task = TwoLayers()
    context = training_context(task, examples(40), should_stop=lambda: len(task.seen) >= 4)
    chosen = plan(40, 8, finish_seconds=30.0)  # 32 examples, the fewest, are done after 32 s
    assert trained(context, chosen).report.reason == "asked to stop"


class CountedClock(FakeClock):
    """Counts how often the time is read."""

    num_read = 0

    def seconds(self) -> float:
        self.num_read += 1
        return super().seconds()


@pytest.mark.parametrize(("limit", "expected"), [({}, 1), ({"deadline_seconds": 1e6}, 2)])
def test_a_micro_batch_reads_the_time_when_it_ends_and_once_more_for_a_deadline(
    limit: dict[str, float], expected: int
) -> None:
    reads = []
    for num_steps in (10, 20):
        clock = CountedClock()
        context = replace(training_context(TwoLayers(), examples(20)), clock=clock)
        trained(context, plan(num_steps, 1, **limit))
        reads.append(clock.num_read)
    assert (reads[1] - reads[0]) / 10 == expected


class Mood:
    """Returns given time shares in turn, and counts the calls."""

    def __init__(self, *shares: float) -> None:
        self._shares = shares
        self.num_asked = 0

    def __call__(self) -> TimeShare:
        share = self._shares[min(self.num_asked, len(self._shares) - 1)]
        self.num_asked += 1
        return TimeShare(share=share, reason="on battery" if share < 1 else "quota")


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
def test_a_time_share_below_the_plan_s_ends_the_window_early(
    counted: float, given: float, num_examples: int
) -> None:
    context = training_context(TwoLayers(), examples(24), time_share=Mood(given))
    update = trained(context, plan(24, 4, share=counted))
    assert update.report.weight == update.report.num_examples == num_examples
    assert update.report.reason == ("quota" if num_examples == 24 else "on battery")
    assert torch.equal(update.values_P, sums(context, range(num_examples)))


def test_a_plan_without_a_share_is_not_limited_by_the_time_share() -> None:
    mood = Mood(0.01)
    context = training_context(TwoLayers(), examples(24), time_share=mood)
    update = trained(context, plan(24, 4))
    assert (update.report.weight, update.report.reason) == (24, "quota")
    assert mood.num_asked == 0


def test_a_time_share_that_falls_during_a_window_ends_it() -> None:
    # A micro-batch takes four seconds: read at 0 s, 4 s and 8 s. Half of 24 is reached by then.
    context = training_context(TwoLayers(), examples(24), time_share=Mood(1.0, 1.0, 1.0, 0.5))
    update = trained(context, plan(24, 4, share=1.0))
    assert (update.report.num_examples, update.report.reason) == (12, "on battery")


def test_a_time_share_that_recovers_allows_the_whole_quota() -> None:
    context = training_context(TwoLayers(), examples(24), time_share=Mood(0.5, 0.5, 1.0))
    update = trained(context, plan(24, 4, share=1.0))
    assert (update.report.num_examples, update.report.reason) == (24, "quota")


def test_the_time_share_is_read_about_once_a_second() -> None:
    class Fast(FakeClock):
        def worked(self, size: float) -> None:
            self.now += 0.125 * size

    mood = Mood(1.0)
    context = replace(training_context(TwoLayers(), examples(24), time_share=mood), clock=Fast())
    trained(context, plan(24, 1, share=1.0))
    # 24 micro-batches end at 1/8 s to 3 s; after the last one the share is not read.
    assert mood.num_asked == 3


def test_the_time_share_limits_all_local_steps_together() -> None:
    context = training_context(TwoLayers(), examples(24), time_share=Mood(0.5))
    chosen = plan(24, 4, share=1.0, local_steps=3, local_learning_rate=2.0**-6)
    update = trained(context, chosen)
    assert (update.report.num_examples, update.report.reason) == (12, "on battery")


class Paced(FakeClock):
    """Seconds an example takes in the first micro-batch, the second and so on; then the last's."""

    def __init__(self, *paces: float) -> None:
        super().__init__()
        self._paces = list(paces)

    def worked(self, size: float) -> None:
        pace = self._paces.pop(0) if len(self._paces) > 1 else self._paces[0]
        self.now += pace * size


def paced(chosen: Plan, *paces: float, num_examples: int = 100) -> Update:
    """Train at these paces, from the beginning of an epoch."""
    context = training_context(TwoLayers(), examples(num_examples))
    taken = window(
        SamplerPosition(),
        quota=chosen.quota,
        num_more=chosen.max_examples - chosen.quota,
        run_seed=0,
        name=context.name,
        num_examples=num_examples,
    )
    update = train_round(chosen, taken, replace(context, clock=Paced(*paces)))
    assert torch.equal(update.values_P, sums(context, taken.positions[: update.report.weight]))
    return update


def sizes(update: Update) -> list[int]:
    return [step.num_examples for step in update.report.steps]


@pytest.mark.parametrize(
    ("pace", "done", "reason"),
    [
        pytest.param(1.0, [8, 8, 8, 8, 8], "quota", id="as planned"),
        pytest.param(1.25, [8, 8, 8, 8], "finish", id="slower: 40 / 1.25 = 32"),
        pytest.param(1.2, [8, 8, 8, 8, 1], "finish", id="slower: 33.3, cut to the nearest"),
        pytest.param(0.9, [8, 8, 8, 8, 8, 4], "quota", id="faster: 44.4"),
        pytest.param(0.5, [8, 8, 8, 8, 8, 8], "quota", id="no more than a fifth more"),
        pytest.param(5.0, [8, 8, 8, 8], "finish", id="no fewer than four fifths"),
    ],
)
def test_a_device_faster_or_slower_than_planned_ends_at_the_finish_time(
    pace: float, done: list[int], reason: str
) -> None:
    update = paced(plan(40, 8, finish_seconds=40.0), pace)
    assert sizes(update) == done
    assert update.report.reason == reason


def test_a_pace_that_changes_during_a_window_moves_its_end() -> None:
    update = paced(plan(40, 4, finish_seconds=40.0), 1.0, 1.0, 1.0, 1.0, 1.0, 1.5)
    # 20 s for the first 20. Then the mean of the last eight steps counts.
    assert update.report.seconds == pytest.approx(40.0, abs=1.5)
    assert 20 + 20 / 1.5 - 1 <= update.report.num_examples <= 20 + 20 / 1.5 + 1


def test_a_faster_device_adds_part_of_a_micro_batch_to_its_quota() -> None:
    assert sizes(paced(plan(40, 40, finish_seconds=40.0), 0.9)) == [40, 4]


def test_a_faster_device_uses_no_example_twice() -> None:
    update = paced(plan(40, 8, finish_seconds=40.0), 0.5, num_examples=43)
    assert update.report.num_examples == 43


def test_a_resumed_window_ends_where_an_uninterrupted_one_does() -> None:
    """Training time before the restart counts; time between does not."""
    chosen, task = plan(40, 8, finish_seconds=40.0), TwoLayers()
    context = replace(training_context(task, examples(40)), clock=Paced(1.25))
    cut_short = replace(context, should_stop=lambda: len(task.seen) >= 2)
    taken = whole(examples(40), chosen.quota)
    begun = sum_window(chosen, taken, cut_short, StopRules(chosen, cut_short, 0.0))
    assert begun.num_examples == 16
    context.clock.worked(80)
    total = sum_window(chosen, taken, context, StopRules(chosen, context, 0.0), resumed=begun)
    assert (total.num_examples, total.reason) == (32, "finish")


def test_without_a_finish_time_a_slow_device_does_its_whole_quota() -> None:
    assert sizes(paced(plan(40, 8), 5.0)) == [8, 8, 8, 8, 8]


def test_the_deadline_comes_before_the_finish() -> None:
    update = paced(plan(40, 8, finish_seconds=40.0, deadline_seconds=30.0), 2.0)
    assert (sizes(update), update.report.reason) == ([8], "deadline")


def test_a_lower_time_share_ends_a_window_before_its_finish_time() -> None:
    context = training_context(TwoLayers(), examples(40), time_share=Mood(0.5))
    update = trained(context, plan(40, 4, share=1.0, finish_seconds=40.0))
    assert (update.report.num_examples, update.report.reason) == (20, "on battery")


def test_time_between_micro_batches_counts_in_the_pace() -> None:
    """Otherwise no quota would be done in its planned time."""

    class Slow(FakeClock):
        def seconds(self) -> float:
            self.now += 1.0
            return self.now

    context = replace(training_context(TwoLayers(), examples(40)), clock=Slow())
    report = trained(context, plan(40, 4)).report
    in_steps = math.fsum(step.seconds for step in report.steps)
    # Two clock readings are outside the window: the first and the last of the training.
    assert report.seconds - in_steps == 2.0


@given(
    quota=st.integers(1, 60),
    size=st.integers(1, 20),
    finish=st.floats(1.0, 200.0),
    paces=st.lists(st.floats(0.2, 5.0), min_size=1, max_size=80),
)
def test_a_window_has_between_min_and_max_examples_at_any_pace(
    quota: int, size: int, finish: float, paces: list[float]
) -> None:
    chosen = plan(quota, min(size, quota), finish_seconds=finish)
    report = paced(chosen, *paces).report
    assert chosen.min_examples <= report.num_examples <= chosen.max_examples
    assert (report.reason == "finish") == (report.num_examples < quota)


@given(
    quota=st.integers(1, 60),
    size=st.integers(1, 20),
    pace=st.floats(0.4, 2.5),
    shift=st.floats(0, 1),
)
def test_at_a_steady_pace_a_window_ends_within_half_an_example_of_the_finish(
    quota: int, size: int, pace: float, shift: float
) -> None:
    finish = quota + shift
    chosen = plan(quota, min(size, quota), finish_seconds=finish)
    report = paced(chosen, pace).report
    ends_near = abs(report.seconds - finish) <= pace / 2 * (1 + 1e-9)
    is_over = report.seconds > finish
    first = report.steps[0].num_examples
    at_least = is_over and report.num_examples in {chosen.min_examples, first}
    at_most = not is_over and report.num_examples == chosen.max_examples
    assert ends_near or at_least or at_most


def steps_of(paces: Sequence[tuple[int, float]]) -> list[Step]:
    return [
        Step(num_examples=n, weight=n, loss=0.0, gradient_norm=0.0, seconds=s, peak_bytes=0)
        for n, s in paces
    ]


STEPS = st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1e3)), min_size=0, max_size=20)


@given(
    taken=STEPS,
    quota=st.integers(1, 2**40),
    finish=st.none() | st.floats(1e-3, 1e6),
    passed=st.floats(0, 1e7),
    num_done=st.integers(1, 2**40),
)
def test_num_until_finish_fits_the_remaining_time_or_is_the_minimum(
    taken: list[tuple[int, float]], quota: int, finish: float | None, passed: float, num_done: int
) -> None:
    chosen = plan(quota, 1, finish_seconds=finish)
    steps = steps_of(taken)
    found = num_until_finish(chosen, steps, passed_seconds=passed, num_done=num_done)
    recent = taken[-8:]
    seconds = math.fsum(s for _, s in recent)
    if found is None:
        assert finish is None or seconds < 1e-290  # none, or nothing that a clock could tell
        return
    assert finish is not None
    assert seconds > 0
    assert found >= max(chosen.min_examples - num_done, 0)
    pace = seconds / sum(n for n, _ in recent)
    past = passed + found * pace - finish
    is_fewest = found == max(chosen.min_examples - num_done, 0)
    assert is_fewest or past <= pace / 2 + 1e-9 * (finish + found * pace)


@given(quota=st.integers(1, 2**40), size=st.integers(1, 2**31), finish=st.none() | st.just(9.0))
def test_max_examples_is_a_fifth_above_the_quota_within_the_steps_of_a_report(
    quota: int, size: int, finish: float | None
) -> None:
    chosen = plan(quota, size, finish_seconds=finish)
    more = chosen.max_examples - quota
    if finish is None:
        assert (chosen.min_examples, more) == (quota, 0)
        return
    assert chosen.min_examples == quota - quota // 5
    assert 0 <= more <= quota / 5
    num_steps = chosen.accumulation_steps + math.ceil(more / size)
    assert num_steps <= max(MAX_STEPS, chosen.accumulation_steps)
    assert more == quota // 5 or num_steps == max(MAX_STEPS, chosen.accumulation_steps)


class SlowTask(TwoLayers):
    """Takes time for each example, also for those that it raises at or whose loss is NaN."""

    def __init__(self, clock: FakeClock, *, seconds: float, kind: str) -> None:
        super().__init__()
        self._clock, self._seconds, self._kind = clock, seconds, kind

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss, number = super().loss_sum(model, batch)
        self._clock.now += self._seconds * number
        if self._kind == "raises":
            raise ValueError
        return loss * {"nan": math.nan, "huge": 1e38}.get(self._kind, 1.0), number


@pytest.mark.parametrize("kind", ["fine", "nan", "huge", "raises"])
@pytest.mark.parametrize("seconds", [0.0, 1.0, 9.0])
def test_a_masked_window_ends_before_its_plan_is_answered_or_is_whole_where_its_data_fail(
    kind: str, seconds: float
) -> None:
    """An example takes up to nine seconds; the plan of 48 is answered after 60."""
    data = examples(48)
    context, taken = training_context(TwoLayers(), data), whole(data, 48)
    clock = FakeClock()
    task = SlowTask(clock, seconds=seconds, kind=kind)
    context = replace(context, task=task, clock=clock, batches=Batches(task, context.examples))
    chosen = plan(48, 4, is_masked=True, answer_seconds=60.0)
    rules = StopRules(chosen, context, 0.0)
    total = sum_window(chosen, taken, context, rules)
    if kind != "fine":
        assert total.num_examples + len(total.refused) == 48
        assert len(total.steps) <= 2
        return
    assert clock.now <= SUMMED_PART * 60.0
    if seconds == 0.0:
        assert (total.reason, total.num_examples) == ("quota", 48)


def test_a_slow_micro_batch_shortens_the_last_one_of_a_masked_window() -> None:
    """The first 16 examples take 2 s each, so that 54 - 32 s are left for 11 of the other 16."""
    data = examples(32)
    context, taken = training_context(TwoLayers(), data), whole(data, 32)
    clock = FakeClock()
    task = SlowTask(clock, seconds=1.0, kind="fine")
    context = replace(context, task=task, clock=clock, batches=Batches(task, context.examples))
    chosen = plan(32, 16, is_masked=True, answer_seconds=60.0)
    total = sum_window(chosen, taken, context, StopRules(chosen, context, 0.0))
    assert [step.num_examples for step in total.steps] == [16, 11]
    assert total.reason == "deadline"


def test_what_passes_before_a_masked_window_begins_is_not_its_time() -> None:
    data = examples(8)
    context, taken = training_context(TwoLayers(), data), whole(data, 8)
    clock = FakeClock()
    clock.now = 100.0  # the transfer of a simulated device
    context = replace(context, clock=clock)
    chosen = plan(8, 2, is_masked=True, answer_seconds=10.0)
    total = sum_window(chosen, taken, context, StopRules(chosen, context, 0.0))
    assert (total.reason, total.num_examples) == ("quota", 8)
