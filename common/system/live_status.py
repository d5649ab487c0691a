"""Shows what a running command does: a block that renews itself in a terminal, otherwise lines.

In a pipe, a file or a journal each event may print a line, and a silence never lasts long: a thread
prints what the command waits for. ``LineSchedule`` decides when a line is due, so that neither
thousands of events a second nor a run of many days floods the log.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from headwater.common.system.stop_signals import before_end

if TYPE_CHECKING:
    from rich.live import Live

FIRST_GAP_SECONDS, MAX_GAP_SECONDS = 1.0, 20.0
GAP_SHARE = 0.01
"""The least time between two events' lines, as a share of the time since the start."""
TICK_SECONDS = 0.5
REFRESHES_PER_SECOND = 4
SEPARATOR = "  "
SHOW_CURSOR = b"\x1b[?25h\r\n"
MIN_BAR_COLUMNS, MAX_BAR_COLUMNS = 8, 40

Block = Callable[[int], Sequence[Text]]
"""Returns the lines of the block for a terminal of so many columns."""


@dataclass(kw_only=True, slots=True)
class LineSchedule:
    """Decides when a line is due.

    An event has its line unless it follows the line before within 1 s, or within 1 % of the time
    since the start, at most 20 s: so after half an hour a line every 20 s, at most. The first event
    and those marked as important always have theirs. A silence ends after ``max_silence_seconds``,
    which doubles with each line about the same wait up to ``longest_silence_seconds``.

    | seconds since the start | least gap | lines so far, at most |
    | --- | --- | --- |
    | 100 | 1 s | 100 |
    | 2,000 | 20 s | 400 |
    | 86,400 | 20 s | 4,600 |
    """

    start: float
    max_silence_seconds: float = 30.0
    longest_silence_seconds: float = 30.0
    _last: float | None = None
    """When the last line of any kind was printed."""
    _last_event: float | None = None
    _num_waits: int = 0

    def is_event_due(self, now: float, *, is_important: bool = False) -> bool:
        """Return whether an event's line is to be printed now, and take it as printed."""
        gap = min(max((now - self.start) * GAP_SHARE, FIRST_GAP_SECONDS), MAX_GAP_SECONDS)
        last = self._last_event
        is_due = is_important or last is None or now - last >= gap
        if is_due:
            self._last = self._last_event = now
            self._num_waits = 0
        return is_due

    def is_wait_due(self, now: float) -> bool:
        """Return whether a line about the wait is to be printed now, and take it as printed."""
        silence = self.max_silence_seconds * 2.0 ** min(self._num_waits, 30)
        last = self.start if self._last is None else self._last
        if now - last < min(silence, self.longest_silence_seconds):
            return False
        self._last, self._num_waits = now, self._num_waits + 1
        return True


class LiveStatus:
    """Shows the state of a command, from entry to exit."""

    def __init__(
        self,
        console: Console,
        *,
        block: Block,
        wait_line: Callable[[], str],
        schedule: LineSchedule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block`` returns the terminal's lines, ``wait_line`` what the command waits for."""
        self._console = console
        self._block = block
        self._wait_line = wait_line
        self._clock = clock
        self._schedule = schedule or LineSchedule(start=clock())
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._skipped: Callable[[], str] | None = None
        """The last event, if its line was not due."""

    @property
    def is_live(self) -> bool:
        """Whether a terminal shows the block; otherwise lines are printed."""
        return self._live is not None

    def event(self, line: Callable[[], str], *, is_important: bool = False) -> None:
        """Print an event's line if one is due; a terminal's block shows the event by itself.

        The last event has its line in any case: see ``print_skipped``.
        """
        if self._live is not None:
            return
        with self._lock:
            is_due = self._schedule.is_event_due(self._clock(), is_important=is_important)
            self._skipped = None if is_due else line
            if is_due:
                self._print(line())

    def print_skipped(self) -> None:
        """Print the last event's line, if it was not due; on leaving this is done in any case."""
        with self._lock:
            line, self._skipped = self._skipped, None
            if line is not None:
                self._print(line())

    def tick(self) -> None:
        """Print what the command waits for, if a line is due."""
        with self._lock:
            if self._schedule.is_wait_due(self._clock()):
                self._print(self._wait_line())

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich.live import Live

            self._live = Live(
                console=self._console,
                get_renderable=lambda: _Rendered(self._block),
                refresh_per_second=REFRESHES_PER_SECOND,
                vertical_overflow="crop",
            )
            self._live.start()
            before_end.append(self._show_cursor)
        else:
            self._thread = threading.Thread(target=self._run, name="status", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        if self._live is not None:
            self._live.stop()  # also shows the cursor again
            before_end.remove(self._show_cursor)
        if self._thread is not None:
            self._thread.join()
        self.print_skipped()

    def _show_cursor(self) -> None:
        """Show the cursor again, from a signal handler: it must not wait for any lock."""
        with contextlib.suppress(OSError, ValueError):
            os.write(self._console.file.fileno(), SHOW_CURSOR)

    def _run(self) -> None:
        while not self._has_ended.wait(TICK_SECONDS):
            self.tick()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)


class _Rendered:
    """The block at the width that the terminal has when it is drawn."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._block(options.max_width)


def pack(parts: Sequence[Text | str], width: int) -> list[Text]:
    """Return the parts in as few lines of ``width`` columns as keep their order.

    No part is divided between lines unless it is wider than a line; then it wraps and loses
    nothing. Empty parts are left out.
    """
    lines: list[Text] = []
    for part in parts:
        text = Text(part) if isinstance(part, str) else part
        if not text.plain:
            continue
        joined = Text.assemble(lines[-1], SEPARATOR, text) if lines else text
        if lines and joined.cell_len <= width:
            lines[-1] = joined
        else:
            lines.append(text)
    return lines


def head(
    title: str, share: float, tail: Sequence[str], width: int, *, is_ascii: bool
) -> list[Text]:
    """Return a title, a bar of which a ``share`` is filled, and a tail, in one line if they fit."""
    after = line_of(tail)
    room = width - len(title) - len(SEPARATOR)
    with_tail = room - len(SEPARATOR) - len(after) if after else room
    if with_tail >= MIN_BAR_COLUMNS:
        room, tail = with_tail, [after]
    bar = _bar(min(room, MAX_BAR_COLUMNS), share, "#-" if is_ascii else "━─")
    return pack([Text(title, style="bold"), bar, *tail], width)


def _bar(columns: int, share: float, signs: str) -> Text:
    """Return a bar; an empty text if there is no room for one."""
    bar = Text()
    if columns >= MIN_BAR_COLUMNS:
        num_full = int(columns * min(share, 1.0))
        bar.append(signs[0] * num_full, style="bar.complete")
        bar.append(signs[1] * (columns - num_full), style="bar.back")
    return bar


def line_of(parts: Sequence[Text | str]) -> str:
    """Return the parts as one line of text."""
    return SEPARATOR.join(str(part) for part in parts if str(part))


def duration(seconds: float) -> str:
    """Return a duration with three figures, or in its two largest units: 0.0123 s, 2 min 5 s."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    seconds = round(seconds)
    for (unit, size), (smaller, part) in pairwise(UNITS):
        if seconds >= size:
            number, rest = divmod(round(seconds / part) * part, size)
            return f"{number:.0f} {unit} {rest / part:.0f} {smaller}"
    raise AssertionError("unreachable: 100 s are over a minute")


UNITS: tuple[tuple[str, int], ...] = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
