"""A run's progress as text: the block that a terminal shows, and a line for each round elsewhere.

``RoundDisplay`` observes the rounds and only takes note: another thread draws the block, so that a
simulation of thousands of rounds a second does not wait for its own display.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping

from rich.filesize import decimal
from rich.text import Text
from torch import nn

from headwater.common.errors import RoundAborted
from headwater.common.messages import DeviceReport
from headwater.common.settings.schema import Settings
from headwater.common.system.live_status import duration, head, line_of, pack
from headwater.common.system.printable import printable, printable_name
from headwater.common.task import Task, weight_unit
from headwater.common.wording import counted, names_text
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow

# The seconds a round are the mean over the last points, which are at least this far apart.
MAX_POINTS, POINT_SECONDS = 60, 0.5
# A shorter wait is not shown in a terminal: it would only flicker.
SHOWN_WAIT_SECONDS = 1.0
MAX_NAMES = 5
SPLITS = ("test_", "held_out_", "train_")
NOT_METRICS = ("train_loss",)
ON_TIME = ("quota", "finish")  # the reasons for which a device stops as planned
PAUSED = "paused by an operator, begins with headwater-server unpause;"


class RoundDisplay(Observer):
    """The state of a run, as its observers know it, and its text."""

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float], is_ascii: bool = False
    ) -> None:
        self._rounds = settings.num_rounds
        """The last round; None if there is none."""
        self._num_awaited = settings.num_clients_needed
        # With data set weighting a weight is the size of the device's data, in no unit of its own.
        self._has_tokens = settings.cohort.weighting == "samples"
        self._weight_unit = 1.0
        self._clock = clock
        self._is_ascii = is_ascii
        self._round = 0
        self._row: RoundRow | None = None
        self._metrics: Mapping[str, float] = {}
        """Those of the last round that was evaluated, which has more than the other rounds."""
        self._points: deque[tuple[float, int]] = deque(maxlen=MAX_POINTS)
        self._opened: OpenRound | None = None
        self._work = ""
        self._since = clock()

    # What the rounds report.

    def loaded(self, task: Task) -> None:
        self._weight_unit = weight_unit(task)

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._round = round_number

    def paused(self, is_paused: bool) -> None:
        if not is_paused:  # the time of the pause is in no forecast
            seconds = self._clock() - self._since
            moved = [(at + seconds, number) for at, number in self._points]
            self._points = deque(moved, maxlen=MAX_POINTS)
        self._enter(PAUSED if is_paused else "")

    def begun(self, round_number: int, reports: Mapping[str, DeviceReport]) -> None:
        self._round = round_number - 1
        self._points = self._points or deque([(self._clock(), self._round)], maxlen=MAX_POINTS)
        self._enter("plans the round")

    def asked(self, opened: OpenRound) -> None:
        self._opened = opened
        self._enter("")

    def closed(self, opened: OpenRound) -> None:
        self._opened = None
        self._enter("steps and evaluates the model")

    def aborted(self, error: RoundAborted) -> None:
        self._opened = None
        self._enter(f"aborted ({error.code}), begins again")

    def on_round(self, row: RoundRow) -> None:
        now = self._clock()
        self._row, self._round = row, row.round
        if len(row.metrics) >= len(self._metrics):
            self._metrics = row.metrics
        if len(self._points) < 2 or now - self._points[-1][0] >= POINT_SECONDS:
            self._points.append((now, row.round))
        self._enter("")

    def _enter(self, work: str) -> None:
        self._work, self._since = work, self._clock()

    # Its text.

    def block(self, width: int) -> list[Text]:
        """Return the run's state in lines of ``width`` columns."""
        row = self._row
        title, pace = self._title(self._round), self._pace(row)
        if self._rounds is None:
            lines = pack([Text(title, style="bold"), *pace], width)
        else:
            share = self._round / self._rounds
            lines = head(title, share, pace, width, is_ascii=self._is_ascii)
        if row is not None:
            lines += pack([*self._figures(row, self._metrics), *details(row)], width)
        if self._round != self._rounds and self._clock() - self._since >= SHOWN_WAIT_SECONDS:
            lines += pack([Text(self.wait_line(), style="dim")], width)
        return lines

    def round_line(self, row: RoundRow) -> str:
        """Return a committed round as one line."""
        pace = [] if row.round == self._rounds else self._pace(row)
        return line_of(
            [
                self._title(row.round, is_aligned=True),
                *self._figures(row, row.metrics),
                *pace,
                *details(row),
            ]
        )

    def wait_line(self) -> str:
        """Return what the run waits for, and since when."""
        since = f"since {duration(float(round(self._clock() - self._since)))}"
        if self._round == self._rounds:
            return f"{self._title(self._round)}: all rounds are done {since}"
        head = f"{self._title(self._round + 1)}:"
        opened = self._opened
        if self._work:
            return f"{head} {self._work} {since}"
        if opened is None:
            awaited = counted(self._num_awaited, "device")
            return f"{head} waits for {awaited} to be connected, {since}"
        missing = [name for name in opened.plans if not _has_answered(opened, name)]
        asked = len(opened.plans)
        devices = counted(asked, "device")
        if not missing:
            return f"{head} {asked} of {devices} answered; sums their updates {since}"
        names = printable(names_text(missing[:MAX_NAMES], len(missing)))
        num_answered = asked - len(missing)
        return f"{head} {num_answered} of {devices} answered; awaits {names} {since}"

    def _title(self, number: int, *, is_aligned: bool = False) -> str:
        """Return a round's number, and of how many if there is a last one."""
        if self._rounds is None:
            return f"round {number}"
        width = len(str(self._rounds)) if is_aligned else 0
        return f"round {number:>{width}} of {self._rounds}"

    def _figures(self, row: RoundRow, metrics: Mapping[str, float]) -> list[str]:
        is_in_tokens = self._has_tokens and row.weight != row.num_examples
        examples = counted(row.num_examples, "example")
        weight = counted(row.weight, "token")
        if self._weight_unit != 1:
            weight = f"weight {row.weight * self._weight_unit:,.6g}"
        name, seconds = row.slowest
        virtual = "" if row.virtual_seconds is None else " (virtual)"
        return [
            row.loss_text(),
            spent(row),
            main_metric(metrics),
            f"{examples}, {weight}" if is_in_tokens else examples,
            f"{row.num_clients:,} of {counted(row.num_invited, 'device')}",
            f"slowest {printable_name(name)}: {duration(seconds)}{virtual}",
            left_out(row),
            *evaluation_figures(
                row.num_held_out_clients,
                len(row.not_evaluated),
                row.num_test_left_out + row.num_held_out_left_out,
            ),
        ]

    def _pace(self, row: RoundRow | None) -> list[str]:
        """Return the seconds a round and the time left; nothing before the first round."""
        if row is None:
            return []
        (begin, first), (end, last) = self._points[0], self._points[-1]
        seconds = (end - begin) / (last - first) if last > first else row.seconds
        pace = [f"{duration(seconds)} a round"]
        if self._rounds is None or row.round >= self._rounds:
            return pace
        left = seconds * (self._rounds - row.round)
        return [*pace, f"{duration(_rounded(left))} left"]


def _has_answered(opened: OpenRound, name: str) -> bool:
    return name in opened.accepted or name in opened.ready or name in opened.refused


def _rounded(seconds: float) -> float:
    """Return a forecast with two figures below a minute, else in whole seconds."""
    return float(f"{seconds:.2g}") if seconds < 60 else float(round(seconds))


def main_metric(metrics: Mapping[str, float]) -> str:
    """Return a round's most telling metric: of the test before the training, accuracy before loss.

    The training's own loss is shown in any case; a round without any other metric gives "".
    """
    names = [name for name in metrics if name.startswith(SPLITS) and name not in NOT_METRICS]
    found = min(names, key=lambda name: (*_rank(name), name), default="")
    value = metrics.get(found)
    if value is None:
        return ""
    shown = printable_name(found.replace("_", " "))
    is_share = found.endswith("accuracy") and 0 <= value <= 1
    return f"{shown} {value:.1%}" if is_share else f"{shown} {value:.4g}"


def _rank(name: str) -> tuple[int, bool, bool]:
    """Return a metric's place: the lowest is shown."""
    split = next(at for at, split in enumerate(SPLITS) if name.startswith(split))
    kind = name.removeprefix(SPLITS[split])
    return split, kind != "accuracy", kind == "loss"


def brief_line(row: RoundRow) -> str:
    """Return a round's loss and main metric."""
    return line_of([row.loss_text(), main_metric(row.metrics), spent(row)])


def spent(row: RoundRow) -> str:
    """Return the privacy spent so far, and a clip norm that follows a quantile.

    Nothing in a run without noise.
    """
    if row.epsilon is None:
        return ""
    clip = "" if row.clip_share is None else f", clip norm {row.clip_norm:.3g}"
    return f"epsilon {row.epsilon:.3g} at delta {row.delta:g} for each {row.privacy_unit}{clip}"


def left_out(row: RoundRow) -> str:
    """Return how many examples and devices a round left out, and what it clipped or found long."""
    devices = len(row.left_out)
    text = f"{row.num_examples_left_out:,} left out"
    if devices:
        text += f", and {counted(devices, 'slow device')}"
    if row.num_outliers:
        text += f"; {counted(row.num_outliers, 'device')} far beyond the others"
    if row.num_clipped:
        text += f"; {counted(row.num_clipped, 'masked number')} clipped"
    return text


def evaluation_figures(num_clients: int | None, num_missing: int, num_left_out: int) -> list[str]:
    """Return on how many devices the model was tested, and the examples that no test could use."""
    return [
        ""
        if num_clients is None
        else f"tested on {num_clients} of {num_clients + num_missing} devices",
        f"{num_left_out:,} left out of the tests" if num_left_out else "",
    ]


def details(row: RoundRow) -> list[str]:
    """Return the figures of a round that matter less: K, early stops, noise scale and bytes."""
    low, high = row.k_range
    is_shown = row.target_by == "noise scale" and row.noise_scale is not None
    return [
        "" if math.isnan(row.loss) else f"K {low}" if low == high else f"K {low} to {high}",
        stops(row),
        f"noise scale {row.noise_scale:,.0f}" if is_shown else "",
        f"up {decimal(row.bytes_up)}, down {decimal(row.bytes_down)}",
    ]


def stops(row: RoundRow) -> str:
    """Return how many devices stopped before their plan's end, and why; nothing if none did.

    Of a masked or private round only the devices know.
    """
    early = Counter(printable_name(one) for one in row.stop_reasons if one not in ON_TIME)
    if not early:
        return ""
    why = ", ".join(f"{reason} {number}" for reason, number in early.most_common())
    only = next(iter(early)) if len(early) == 1 else why
    return f"{counted(early.total(), 'device')} stopped early: {only}"
