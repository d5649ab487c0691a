"""The server's Prometheus metrics: what a round came to, and how the server stands at a scrape.

Units end the names. Only so many devices have figures of their own (``MOST_LABELLED``), because
each label is a time series for good: the first that took part keep them, one that had no part for
``IDLE_ROUNDS`` rounds makes room, and how many had to do without in the last round is told.
Imported only where metrics were asked for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headwater.common.errors import RoundAborted
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow

PREFIX = "headwater_server_"
MAX_LABELLED = 200
IDLE_ROUNDS = 100
# A round of a LAN takes tenths of a second, one of slow links and deadlines up to an hour.
ROUND_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
ACCURACY = "test_accuracy"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerGauges:
    """What is asked of the server at each scrape."""

    num_connected: int
    bytes_up: int
    bytes_down: int
    staged_bytes: int
    is_paused: bool
    refusals: Counter[str]
    num_history_failures: int
    num_devices_not_noted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    """One device's part in the last round in which it had one."""

    round: int
    accumulation_steps: int
    seconds: float
    peak_bytes: int


def figures_of(row: RoundRow) -> dict[str, DeviceFigures]:
    """Return each device's figures; in a masked round K is that of its plan."""
    plain = {
        client.name: DeviceFigures(
            round=row.round,
            accumulation_steps=client.accumulation_steps,
            seconds=client.seconds,
            peak_bytes=client.peak_bytes,
        )
        for client in row.clients
    }
    return plain | {
        client.name: DeviceFigures(
            round=row.round,
            accumulation_steps=client.planned_steps,
            seconds=client.seconds,
            peak_bytes=client.peak_bytes,
        )
        for client in row.masked_clients
    }


def labelled_devices(
    before: dict[str, DeviceFigures], new: dict[str, DeviceFigures], *, round_number: int
) -> tuple[dict[str, DeviceFigures], int]:
    """Return the devices that have labels after a round, and how many of it have none."""
    kept = {
        name: figures
        for name, figures in before.items()
        if name in new or figures.round > round_number - IDLE_ROUNDS
    }
    num_without = 0
    for name, figures in new.items():
        if name in kept or len(kept) < MAX_LABELLED:
            kept[name] = figures
        else:
            num_without += 1
    return kept, num_without


class ServerMetrics(Observer):
    """An ``Observer`` of the rounds, and what Prometheus collects from."""

    def __init__(self, now: Callable[[], ServerGauges]) -> None:
        """Take how to ask the server how it stands."""
        self.registry = CollectorRegistry()
        self._now = now
        self._lock = threading.Lock()
        self._row: RoundRow | None = None
        self._num_rounds = self._num_aborted = self._num_examples = 0
        self._refusals: Counter[str] = Counter()
        self._devices: dict[str, DeviceFigures] = {}
        self._num_unlabelled = 0
        self._seconds = Histogram(
            f"{PREFIX}round_seconds",
            "Of a committed round, from its plans to its commit; waiting for devices not counted",
            buckets=ROUND_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def closed(self, opened: OpenRound) -> None:
        with self._lock:
            self._refusals += opened.refusals

    def aborted(self, error: RoundAborted) -> None:
        with self._lock:
            self._num_aborted += 1

    def committed(self, row: RoundRow) -> None:
        self._seconds.observe(max(row.seconds - row.seconds_split.get("wait", 0.0), 0.0))
        with self._lock:
            self._row = row
            self._num_rounds += 1
            self._num_examples += row.num_examples
            self._devices, self._num_unlabelled = labelled_devices(
                self._devices, figures_of(row), round_number=row.round
            )

    def collect(self) -> Iterable[Metric]:
        """Yield all families but the histogram, which registers itself."""
        now = self._now()
        with self._lock:
            row, refusals = self._row, self._refusals + now.refusals
            devices, num_unlabelled = dict(self._devices), self._num_unlabelled
            counts = self._num_rounds, self._num_aborted, self._num_examples
        yield _counter("rounds", "Rounds committed by this process", counts[0])
        yield _counter("rounds_aborted", "Rounds that came to nothing", counts[1])
        yield _counter("examples", "Examples summed in committed rounds", counts[2])
        yield _counter("received_bytes", "Bytes from devices", now.bytes_up)
        yield _counter("sent_bytes", "Bytes to devices", now.bytes_down)
        refused = CounterMetricFamily(
            f"{PREFIX}refusals", "Streams and updates refused, by error", labels=["code"]
        )
        for code, number in sorted(refusals.items()):
            refused.add_metric([code], number)
        yield refused
        yield _gauge("connected_devices", "Devices connected now", now.num_connected)
        yield _gauge("staged_bytes", "Bytes of uploads held in RAM now", now.staged_bytes)
        yield _gauge("is_paused", "1 while an operator holds rounds back", int(now.is_paused))
        yield _counter(
            "history_failures", "Writes of the history that failed", now.num_history_failures
        )
        yield _counter(
            "devices_not_noted", "Connections beyond the devices noted", now.num_devices_not_noted
        )
        if row is not None:
            yield from _of_round(row)
        yield from _of_devices(devices, num_unlabelled)


def _of_round(row: RoundRow) -> Iterable[Metric]:
    yield _gauge("round", "The last committed round", row.round)
    yield _gauge("loss", "Training loss per unit of weight, of the last round", row.loss)
    if ACCURACY in row.metrics:
        yield _gauge("accuracy", "On the server's test examples, 0 to 1", row.metrics[ACCURACY])
    yield _gauge("effective_batch_examples", "Examples in the last round", row.num_examples)
    yield _gauge("learning_rate", "Of the last step", row.learning_rate)


def _of_devices(devices: dict[str, DeviceFigures], num_unlabelled: int) -> Iterable[Metric]:
    for name, meaning in (
        ("accumulation_steps", "K in the device's last round"),
        ("seconds", "What the device took in its last round"),
        ("peak_bytes", "Most memory that the device's process held in its last round"),
    ):
        family = GaugeMetricFamily(f"{PREFIX}device_{name}", meaning, labels=["device"])
        for device, figures in sorted(devices.items()):
            family.add_metric([device], getattr(figures, name))
        yield family
    yield _gauge(
        "unlabelled_devices",
        f"Devices of the last round without figures of their own: {MAX_LABELLED} have them",
        num_unlabelled,
    )


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, meaning, value=value)
