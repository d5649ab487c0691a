"""What curves.png shows of a run, and that all of it can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headwater.server.operations.curves import FEW_ROUNDS, curves, short_number
from headwater.server.operations.round_log import row_to_dict
from tests.round_rows import client, masked, row


def rows_of(num_rounds: int, *names: str, **changes: Any) -> list[dict[str, Any]]:
    return [row_to_dict(row(number, *names, **changes)) for number in range(1, num_rounds + 1)]


def panel(rows: Sequence[dict[str, Any]], title: str) -> Any:
    (found,) = [axes for axes in curves(rows).axes if axes.get_title().startswith(title)]
    return found


def lines(axes: Any) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def test_the_loss_is_drawn_over_the_time_of_the_rounds() -> None:
    axes = panel(rows_of(4, "pi", seconds=1800.0), "loss over time")
    assert axes.get_xlabel() == "time, hours"
    assert list(axes.get_lines()[0].get_xdata()) == [0.5, 1.0, 1.5, 2.0]


def test_in_a_simulation_the_time_is_virtual() -> None:
    axes = panel(rows_of(3, "0", seconds=0.001, virtual_seconds=20.0), "loss over time")
    assert axes.get_xlabel() == "virtual time, seconds"
    assert list(axes.get_lines()[0].get_xdata()) == [20.0, 40.0, 60.0]


def test_left_out_examples_and_devices_are_drawn() -> None:
    rows = rows_of(2, "pi", num_examples_left_out=74, left_out={"nas": "slow"}, refused={"a": "x"})
    found = lines(panel(rows, "left out"))
    assert found == {"examples": [74, 74], "devices: too slow, lost or refused": [2, 2]}


def test_rows_of_an_older_run_count_their_left_out_examples() -> None:
    rows = rows_of(1, clients=[client("pi", num_refused=3), client("nas", num_refused=4)])
    del rows[0]["num_examples_left_out"]
    assert lines(panel(rows, "left out"))["examples"] == [7]


def titles(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [axes.get_title() for axes in curves(rows).axes]


def test_a_panel_with_nothing_to_show_is_left_out() -> None:
    full = titles(rows_of(3, "pi", num_examples_left_out=1))
    assert len(full) == 8
    assert titles(rows_of(3, "pi")) == [title for title in full if title != "left out per round"]
    assert len(titles(rows_of(3, "pi", metrics={}))) == 6
    assert "loss over time" not in titles(rows_of(3, "pi", loss=None, metrics={}))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("examples/digits.py:Digits", "digits.py:Digits, 2 devices, 3 rounds"),
        ("python:Mine", "Mine, 2 devices, 3 rounds"),
        (None, "2 devices, 3 rounds"),
    ],
)
def test_the_title_names_the_task_the_devices_and_the_rounds(task: str | None, said: str) -> None:
    rows = rows_of(3, "a", masked_clients=[masked("m")])
    assert curves(rows, task=task).get_suptitle() == said


def test_k_of_few_rounds_is_drawn_as_bars_from_0() -> None:
    axes = panel(rows_of(FEW_ROUNDS, "pi"), "accumulation steps")
    assert [bar.get_height() for bar in axes.patches] == [2] * FEW_ROUNDS
    assert axes.get_ylim()[0] == 0
    assert not panel(rows_of(FEW_ROUNDS + 1, "pi"), "accumulation steps").patches


FLEET = [f"device-{part:02}" for part in range(100)]


def fleet_rows() -> list[dict[str, Any]]:
    clients = [
        client(name, seconds=float(part + 1), weight=part)
        for part, name in enumerate(FLEET, start=1)
    ]
    return rows_of(3, clients=clients)


def test_of_100_devices_the_slowest_five_are_named_and_the_rest_is_one_line() -> None:
    found = lines(panel(fleet_rows(), "seconds per device"))
    slowest = [f"device-{part:02}" for part in (99, 98, 97, 96, 95)]
    assert list(found) == [*slowest, "median of 95 others"]
    assert found["device-99"] == [101.0, 101.0, 101.0]
    assert found["median of 95 others"] == [49.0, 49.0, 49.0]


def test_of_100_devices_the_eight_largest_shares_and_the_rest_are_bars() -> None:
    axes = panel(fleet_rows(), "share")
    widths = [bar.get_width() for bar in axes.patches]
    assert len(widths) == 9
    assert sum(widths) == pytest.approx(100)
    assert widths[0] == pytest.approx(100 * 100 / 5050)
    assert axes.texts[-1].get_text().startswith(" 92 others, 0.92% each: ")


def test_a_few_devices_are_all_named() -> None:
    rows = rows_of(2, "pi", "nas", "laptop")
    assert set(lines(panel(rows, "seconds"))) == {"pi", "nas", "laptop"}
    assert len(panel(rows, "share").patches) == 3


def test_masked_rounds_show_the_plans_shares() -> None:
    rows = rows_of(1, clients=[], masked_clients=[masked("a"), masked("b")])
    assert [bar.get_width() for bar in panel(rows, "share").patches] == [50, 50]


def test_a_noise_scale_is_drawn_only_if_it_is_followed() -> None:
    fixed = rows_of(2, "pi", target=5, target_by="examples", noise_scale=40.0)
    followed = rows_of(2, "pi", target=5, target_by="noise scale", noise_scale=40.0)
    assert set(lines(panel(fixed, "weight"))) == {"effective batch"}
    assert lines(panel(followed, "weight"))["noise scale"] == [40.0, 40.0]


def test_a_metric_s_name_is_no_formula_and_is_not_hidden() -> None:
    rows = rows_of(2, "pi", metrics={r"train_$\frac$": 1.0, "_secret\x1b": 2.0})
    assert set(lines(panel(rows, "metrics"))) == {r"train \$\frac\$", r"secret\x1b"}


@pytest.mark.parametrize(
    ("loss", "weight"), [(0.5, 6), (2.2654, 123_456_789), (1.2e-7, 99_999), (-0.01234, 1)]
)
def test_no_tick_s_label_is_cut_off_or_lies_on_another_panel(loss: float, weight: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rows = [
        row_to_dict(row(number, *FLEET[:3], loss=loss / number, weight=weight * number))
        for number in range(1, 12)
    ]
    figure = curves(rows)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    width, height = canvas.get_width_height()
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        # A tick beyond the view has a label too, which is not drawn.
        labels = [one for one in axes.get_xticklabels() if left <= one.get_position()[0] <= right]
        labels += [one for one in axes.get_yticklabels() if low <= one.get_position()[1] <= high]
        others = [one.get_window_extent() for one in figure.axes if one is not axes]
        for label in (*labels, axes.xaxis.label, axes.title):
            box = label.get_window_extent()
            assert box.x0 >= 0
            assert box.y0 >= 0
            assert box.x1 <= width
            assert box.y1 <= height
            assert not any(box.overlaps(other) for other in others), label.get_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.025, "0.025"),
        (2.2654, "2.265"),
        (9999, "9999"),
        (12_345, "12.35k"),
        (3e6, "3M"),
        (1e-7, "1e-07"),
        (2.5e13, "25T"),
    ],
)
def test_a_tick_s_label_is_short(value: float, text: str) -> None:
    assert short_number(value) == text
    assert len(text) <= 6
