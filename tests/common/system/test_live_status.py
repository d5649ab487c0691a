"""Lines are printed at a sane rate, and a terminal's lines hold whole figures."""

from __future__ import annotations

import io
import itertools
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from headwater.common.system.live_status import (
    SHOW_CURSOR,
    LineSchedule,
    LiveStatus,
    duration,
    head,
    line_of,
    pack,
)
from headwater.common.system.stop_signals import before_end


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def piped(clock: FakeClock, schedule: LineSchedule | None = None) -> tuple[LiveStatus, io.StringIO]:
    """Return a status that writes to a pipe; its thread is not started."""
    out = io.StringIO()
    status = LiveStatus(
        Console(file=out),
        block=lambda _: [],
        wait_line=lambda: f"waits at {clock.now:g}",
        schedule=schedule,
        clock=clock,
    )
    return status, out


def test_a_long_silence_is_ended_by_a_line_every_30_seconds() -> None:
    clock = FakeClock()
    status, out = piped(clock)
    for second in range(121):
        clock.now = float(second)
        status.tick()
    assert out.getvalue().splitlines() == [f"waits at {at}" for at in (30, 60, 90, 120)]


def test_there_is_a_line_every_30_seconds_whatever_the_events() -> None:
    clock = FakeClock()
    status, out = piped(clock)
    lines = [0.0]
    for tick in range(40_000):
        clock.now = tick / 2
        status.tick()
        if tick % 97 == 0:  # an event every 48.5 s, then in bursts
            status.event(lambda: "event")
        if tick % 5000 < 500:
            status.event(lambda: "event")
        if out.tell():
            lines.append(clock.now)
            out.seek(0)
            out.truncate()
    assert max(later - earlier for earlier, later in itertools.pairwise(lines)) <= 30.0


def test_thousands_of_events_a_second_print_at_most_a_line_a_second() -> None:
    clock = FakeClock()
    status, out = piped(clock)
    for event in range(20_000):
        clock.now = event / 4000
        status.event(lambda: f"event {event}")  # noqa: B023 - called at once
    printed = out.getvalue().splitlines()
    assert printed == ["event 0", "event 4000", "event 8000", "event 12000", "event 16000"]


def test_a_day_of_rounds_prints_at_most_the_documented_lines() -> None:
    schedule = LineSchedule(start=0.0)
    printed = {100: 0, 2000: 0, 86_400: 0}
    for second in range(86_400):
        is_due = schedule.is_event_due(float(second))
        for end in printed:
            printed[end] += is_due and second < end
    assert printed[100] == 100
    assert printed[2000] <= 400
    assert printed[86_400] <= 4600


def test_the_first_event_and_an_important_one_are_always_printed() -> None:
    clock = FakeClock()
    status, out = piped(clock)
    status.event(lambda: "first")
    status.event(lambda: "second")
    status.event(lambda: "last", is_important=True)
    assert out.getvalue().splitlines() == ["first", "last"]


def test_the_last_event_has_its_line_when_the_display_ends_and_only_once() -> None:
    status, out = piped(FakeClock())
    with status:
        for word in ("first", "second", "third"):
            status.event(partial(str, word))
        assert out.getvalue().splitlines() == ["first"]
        status.print_skipped()
    assert out.getvalue().splitlines() == ["first", "third"]


def test_lines_about_one_long_wait_become_rarer_if_allowed() -> None:
    clock = FakeClock()
    status, out = piped(clock, LineSchedule(start=0.0, longest_silence_seconds=100.0))
    for second in range(300):
        clock.now = float(second)
        status.tick()
    assert out.getvalue().splitlines() == [f"waits at {at}" for at in (30, 90, 190, 290)]


def test_markup_in_a_line_is_printed_as_it_is() -> None:
    status, out = piped(FakeClock())
    status.event(lambda: "metric [/x] 1")
    assert out.getvalue() == "metric [/x] 1\n"


def shown(parts: list[str], width: int) -> list[str]:
    return [line.plain for line in pack(parts, width)]


def test_parts_share_lines_and_none_is_divided() -> None:
    parts = ["loss 0.5", "", "12 examples", "3 of 4 devices"]
    assert shown(parts, 80) == ["loss 0.5  12 examples  3 of 4 devices"]
    assert shown(parts, 21) == ["loss 0.5  12 examples", "3 of 4 devices"]
    assert shown(parts, 20) == ["loss 0.5", "12 examples", "3 of 4 devices"]
    assert shown(parts, 3) == parts[:1] + parts[2:]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_head_fits_its_width_and_keeps_its_parts(width: int) -> None:
    lines = [
        line.plain
        for line in head(
            "round 12 of 200", 0.06, ["3 s a round", "9 min left"], width, is_ascii=True
        )
    ]
    assert max(map(len, lines)) <= width
    for part in ("round 12 of 200", "3 s a round", "9 min left"):
        assert any(part in line for line in lines)
    assert (len(lines) == 1) == (width >= 80)


def test_a_full_bar_has_no_empty_part() -> None:
    (line,) = head("runs", 1.0, [], 30, is_ascii=True)
    assert line.plain == "runs  " + "#" * 24


def test_without_utf_8_the_bar_is_ascii() -> None:
    assert all(line.plain.isascii() for line in head("a", 0.5, [], 80, is_ascii=True))
    assert not all(line.plain.isascii() for line in head("a", 0.5, [], 80, is_ascii=False))


def test_a_line_joins_texts_and_strings() -> None:
    assert line_of(["a", Text("b"), ""]) == "a  b"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01234, "0.0123 s"),
        (99.94, "99.9 s"),
        (100, "1 min 40 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_in_a_terminal_the_block_is_drawn_and_the_cursor_is_restored() -> None:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80, height=10)
    status = LiveStatus(terminal, block=lambda _: [Text("round 1")], wait_line=str)

    def interrupted() -> None:
        with status:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert status.is_live
    assert "round 1" in out.getvalue()
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


def test_a_process_that_ends_at_once_shows_the_cursor_first(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        terminal = Console(file=out, force_terminal=True, width=80, height=10)
        with LiveStatus(terminal, block=lambda _: [], wait_line=str):
            for restore in before_end:
                restore()
            assert (tmp_path / "out").read_bytes().endswith(SHOW_CURSOR)
    assert not before_end


def test_no_color_leaves_no_colour_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80, height=10)
    bar = head("round 1 of 2", 0.5, [], 80, is_ascii=False)
    with LiveStatus(terminal, block=lambda _: bar, wait_line=str):
        pass
    assert "━" in out.getvalue()
    assert "\x1b[3" not in out.getvalue()
