"""What a run shows of its rounds: the block of a terminal, each round's line, and its wait."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headwater.common.errors import ConnectionLost, TooFewClients
from headwater.common.messages import Plan
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.operations.round_display import RoundDisplay, main_metric
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow
from tests.python_tasks import Signs
from tests.round_rows import client, masked, row


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def display(clock: Clock | None = None, **settings: Any) -> RoundDisplay:
    chosen = Settings.model_validate({"rounds": 200, **settings})
    return RoundDisplay(chosen, clock=clock or Clock())


def full_row(number: int = 12, **changes: Any) -> RoundRow:
    """Return a round with large figures and long names."""
    clients = [client(f"kitchen-raspberry-pi-{at:02}", seconds=float(at)) for at in range(20)]
    plain: dict[str, Any] = {
        "clients": clients,
        "num_clients": 20,
        "num_invited": 24,
        "num_examples": 12_480,
        "weight": 12_480,
        "num_examples_left_out": 74,
        "left_out": {"nas": "too slow", "watch": "too slow"},
        "bytes_up": 812_000_000,
        "bytes_down": 915_000_000,
        "metrics": {"train_accuracy": 0.5, "test_loss": 0.4, "test_accuracy": 0.9512},
    }
    return row(number, **{**plain, **changes})


def drawn(shown: RoundDisplay, width: int) -> list[str]:
    out = io.StringIO()
    console = Console(width=width, file=out)
    for line in shown.block(width):
        console.print(line)
    return out.getvalue().splitlines()


def running(clock: Clock | None = None) -> RoundDisplay:
    """Return a display after 12 rounds of 10 s each."""
    clock = clock or Clock()
    shown = display(clock)
    shown.begun(1, {})
    for number in range(1, 13):
        clock.now = 10.0 * number
        shown.on_round(full_row(number))
    return shown


FIGURES = (
    "round 12 of 200",
    "10 s a round",
    "31 min 20 s left",
    "loss 0.5",
    "test accuracy 95.1%",
    "12,480 examples",
    "20 of 24 devices",
    "slowest kitchen-raspberry-pi-19: 19 s",
    "74 left out, and 2 slow devices",
)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_every_figure_is_whole_at_any_width(width: int) -> None:
    lines = drawn(running(), width)
    assert max(map(len, lines)) <= width
    for figure in FIGURES:
        assert any(figure in line for line in lines), figure
    assert not any("…" in line for line in lines)


def test_at_80_columns_the_block_has_four_lines_and_a_bar() -> None:
    lines = drawn(running(), 80)
    assert len(lines) == 4
    assert "━" in lines[0]


def test_a_row_whose_weight_is_in_tokens_shows_both_units() -> None:
    shown = display()
    shown.begun(1, {})
    text = shown.round_line(full_row(1, num_examples=20, weight=81_920))
    assert "20 examples, 81,920 tokens" in text


def test_a_weight_in_units_of_the_task_s_is_shown_as_the_task_counts_it() -> None:
    class OfClasses(Signs):
        weight_unit = 2.0**-16

    shown = display()
    shown.loaded(OfClasses())
    shown.begun(1, {})
    text = shown.round_line(full_row(1, num_examples=20, weight=25 << 15))
    assert "20 examples, weight 12.5" in text


def test_a_weight_that_is_the_data_set_s_size_is_no_number_of_tokens() -> None:
    shown = display(cohort={"weighting": "dataset"})
    shown.begun(1, {})
    assert "tokens" not in shown.round_line(full_row(1, num_examples=20, weight=81_920))


def test_a_masked_round_has_its_slowest_device_too() -> None:
    shown = display()
    shown.begun(1, {})
    text = shown.round_line(row(1, clients=[], masked_clients=[masked("a"), masked("b")]))
    assert "slowest a: 2 s" in text
    assert "K 5" in text


def test_a_pause_is_named_and_is_in_no_forecast() -> None:
    clock = Clock()
    shown = running(clock)
    shown.paused(True)
    clock.now += 3600.0
    paused = "paused by an operator, begins with headwater-server unpause; since 1 h"
    assert shown.wait_line().startswith(f"round 13 of 200: {paused}")
    shown.paused(False)
    assert "waits for" in shown.wait_line()
    clock.now += 10.0
    shown.on_round(full_row(13))
    lines = drawn(shown, 120)
    assert any("10 s a round" in line for line in lines)


def test_seconds_of_a_virtual_clock_are_marked() -> None:
    shown = display()
    shown.begun(1, {})
    assert "slowest pi: 1 s (virtual)" in shown.round_line(row(1, "pi", virtual_seconds=1.0))


def test_the_round_line_shows_a_noise_scale_that_is_followed() -> None:
    shown = display()
    shown.begun(1, {})
    known = {"noise_scale": 1234.5, "target": 600}
    followed = row(1, "pi", target_by="noise scale", **known)
    assert "noise scale 1,234" in shown.round_line(followed)
    assert "noise" not in shown.round_line(row(1, "pi", target_by="examples", **known))


def test_the_round_line_says_how_many_devices_stopped_early_and_why() -> None:
    shown = display()
    shown.begun(1, {})
    reasons = ["on battery", "quota", "on battery", "finish"]
    clients = [client(f"pi{at}", reason=reason) for at, reason in enumerate(reasons)]
    text = shown.round_line(row(1, clients=clients))
    assert "2 devices stopped early: on battery" in text
    assert "stopped early" not in shown.round_line(row(1, clients=clients[1::2]))
    some = [*clients, client("hot", reason="hot")]
    assert "3 devices stopped early: on battery 2, hot 1" in shown.round_line(row(1, clients=some))


def test_names_of_a_hostile_device_are_shown_as_they_are() -> None:
    shown = display()
    shown.begun(1, {})
    hostile = row(1, clients=[client("[/x]\x1b[2J")], metrics={"train_[/bold]\x9b": 1.0})
    shown.on_round(hostile)
    for text in (shown.round_line(hostile), "\n".join(drawn(shown, 80))):
        assert r"slowest [/x]\x1b[2J: 1 s" in text
        assert r"train [/bold]\x9b 1" in text
        assert not {"\x1b", "\x9b"} & {*text}


def opened(*names: str) -> OpenRound:
    plan = Plan(round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2)
    total = CohortSum(ModelLayout(trainable=()))
    return OpenRound(plans=dict.fromkeys(names, plan), total=total, owned={})


def test_the_wait_of_each_part_of_a_round_is_named() -> None:
    clock = Clock()
    shown = display(clock, cohort={"min_clients": 3})
    clock.now = 40.0
    connecting = "round 1 of 200: waits for 3 devices to be connected, since 40 s"
    assert shown.wait_line() == connecting
    masked = display(cohort={"min_clients": 2}, secure={"aggregation": "semi-honest"})
    assert "waits for 3 devices to be connected" in masked.wait_line()
    shown.begun(1, {})
    assert shown.wait_line() == "round 1 of 200: plans the round since 0 s"
    asked = opened(*"abcdefgh")
    shown.asked(asked)
    clock.now = 140.0
    asked.refuse("a", ConnectionLost("a is gone"))
    waits = "1 of 8 devices answered; awaits b, c, d, e, f and 2 more since 1 min 40 s"
    assert shown.wait_line() == f"round 1 of 200: {waits}"
    for name in "bcdefgh":
        asked.refuse(name, ConnectionLost("gone"))
    assert "8 of 8 devices answered" in shown.wait_line()
    shown.closed(asked)
    assert "steps and evaluates the model" in shown.wait_line()
    shown.aborted(TooFewClients("none answered"))
    assert "aborted (TooFewClients), begins again" in shown.wait_line()


def test_a_long_wait_is_part_of_the_block_and_a_short_one_is_not() -> None:
    clock = Clock()
    shown = display(clock)
    shown.begun(1, {})
    shown.asked(opened("pi"))
    assert not any("awaits pi" in line for line in drawn(shown, 80))
    clock.now = 2.0
    assert any("awaits pi" in line for line in drawn(shown, 80))


def test_a_round_that_is_not_evaluated_keeps_the_last_test_metric_in_the_block() -> None:
    shown = display()
    shown.begun(1, {})
    shown.on_round(full_row(1))
    shown.on_round(full_row(2, metrics={"train_accuracy": 0.6}))
    assert any("test accuracy 95.1%" in line for line in drawn(shown, 80))


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"train_accuracy": 0.5, "test_loss": 2.0}, "test loss 2"),
        ({"test_loss": 2.0, "test_recall": 0.25}, "test recall 0.25"),
        ({"held_out_accuracy": 1.0}, "held out accuracy 100.0%"),
        ({"train_loss": 3.0}, ""),
        ({}, ""),
    ],
)
def test_the_main_metric_is_the_test_s_and_not_the_loss(
    metrics: dict[str, float], text: str
) -> None:
    assert main_metric(metrics) == text


def test_a_run_that_has_ended_shows_no_time_left() -> None:
    shown = display(rounds=12)
    shown.begun(1, {})
    shown.on_round(full_row(12))
    assert not any("left" in line and "a round" in line for line in drawn(shown, 80))


def test_a_run_without_a_last_round_shows_no_share_and_no_time_left() -> None:
    clock = Clock()
    shown = display(clock, rounds="forever")
    shown.begun(1, {})
    clock.now = 2.0
    shown.on_round(row(1, "pi"))
    assert shown.round_line(row(1, "pi")).startswith("round 1  loss")
    assert shown.block(200)[0].plain.startswith("round 1  2 s a round")
    assert shown.wait_line().startswith("round 2: waits")
    text = " ".join(drawn(shown, 200)) + shown.round_line(row(1, "pi"))
    assert "s left" not in text
    assert "forever" not in text


def test_no_round_after_the_last_one_is_awaited() -> None:
    clock = Clock()
    shown = display(clock, rounds=12)
    shown.on_round(full_row(12))
    clock.now += 60.0
    assert shown.wait_line().startswith("round 12 of 12: all rounds are done since")
