"""The server's Prometheus metrics: of the rounds so far, and of the server at each scrape.

Each label of a device is a time series that Prometheus keeps for good, so at most ``MAX_LABELLED``
devices have metrics of their own. A device keeps them until it has taken part in no round for
``IDLE_ROUNDS`` rounds; ``unlabelled_devices`` counts the last round's devices without any.
Imported only if metrics are enabled.
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
from headwater.common.system.printable import printable, printable_name
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow, figure_of

PREFIX = "headwater_server_"
MAX_LABELLED = 200
MAX_LABEL_CHARACTERS = 128  # as long as a device's name may be
IDLE_ROUNDS = 100
# A round takes tenths of a second on a LAN, and up to an hour with slow links and deadlines.
ROUND_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
ACCURACY = "test_accuracy"
DEVICE_METRICS = {
    "accumulation_steps": "K in the device's last round",
    "seconds": "Seconds that the device took in its last round",
    "peak_bytes": "Peak memory of the device's process in its last round",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerGauges:
    """The server's values at a scrape."""

    num_connected: int
    bytes_up: int
    bytes_down: int
    staged_bytes: int
    is_paused: bool
    refusals: Counter[str]
    num_history_failures: int
    num_devices_not_noted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMetrics:
    """One device's values in the last round that it took part in."""

    round: int
    accumulation_steps: int
    seconds: float
    peak_bytes: int | None
    """None in masked rounds: only the device knows."""


def device_metrics(row: RoundRow) -> dict[str, DeviceMetrics]:
    """Return each device's values in a round; in a masked round K is the plan's."""
    names = ("name", "accumulation_steps", "seconds", "peak_bytes")
    return {
        name: DeviceMetrics(
            round=row.round, accumulation_steps=steps, seconds=seconds, peak_bytes=peak_bytes
        )
        for name, steps, seconds, peak_bytes in zip(
            *(figure_of(row, name) for name in names), strict=True
        )
    }


def labelled_devices(
    before: dict[str, DeviceMetrics], new: dict[str, DeviceMetrics], *, round_number: int
) -> tuple[dict[str, DeviceMetrics], int]:
    """Return the devices with labels after a round, and how many of the round have none."""
    labelled = {
        name: metrics
        for name, metrics in before.items()
        if name in new or metrics.round > round_number - IDLE_ROUNDS
    }
    num_without = 0
    for name, metrics in new.items():
        if name in labelled or len(labelled) < MAX_LABELLED:
            labelled[name] = metrics
        else:
            num_without += 1
    return labelled, num_without


class ServerMetrics(Observer):
    """Counts the rounds, and yields all metrics at a scrape."""

    def __init__(self, gauges: Callable[[], ServerGauges]) -> None:
        """``gauges`` returns the server's values at each scrape."""
        self.registry = CollectorRegistry()
        self._gauges = gauges
        self._lock = threading.Lock()
        self._row: RoundRow | None = None
        self._num_rounds = self._num_aborted = self._num_examples = 0
        self._refusals: Counter[str] = Counter()
        self._devices: dict[str, DeviceMetrics] = {}
        self._num_unlabelled = 0
        self._seconds = Histogram(
            f"{PREFIX}round_seconds",
            "Duration of a committed round from plans to commit, without the wait for devices",
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

    def on_round(self, row: RoundRow) -> None:
        self._seconds.observe(max(row.seconds - row.seconds_split.get("wait", 0.0), 0.0))
        with self._lock:
            self._row = row
            self._num_rounds += 1
            self._num_examples += row.num_examples
            self._devices, self._num_unlabelled = labelled_devices(
                self._devices, device_metrics(row), round_number=row.round
            )

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics except the histogram, which registers itself."""
        now = self._gauges()
        with self._lock:
            row, refusals = self._row, self._refusals + now.refusals
            devices, num_unlabelled = dict(self._devices), self._num_unlabelled
            counts = self._num_rounds, self._num_aborted, self._num_examples
        yield _counter("rounds", "Rounds committed by this process", counts[0])
        yield _counter("rounds_aborted", "Rounds that were aborted", counts[1])
        yield _counter("examples", "Examples summed in committed rounds", counts[2])
        yield _counter("received_bytes", "Bytes received from devices", now.bytes_up)
        yield _counter("sent_bytes", "Bytes sent to devices", now.bytes_down)
        refused = CounterMetricFamily(
            f"{PREFIX}refusals", "Streams and updates refused, by error", labels=["code"]
        )
        for code, number in sorted(refusals.items()):
            refused.add_metric([printable_name(code)], number)
        yield refused
        yield _gauge("connected_devices", "Devices connected now", now.num_connected)
        yield _gauge("staged_bytes", "Bytes of uploads held in RAM now", now.staged_bytes)
        yield _gauge("is_paused", "1 while an operator has paused the run", int(now.is_paused))
        yield _counter(
            "history_failures", "Writes of the history that failed", now.num_history_failures
        )
        yield _counter(
            "devices_not_noted",
            "Connections of devices beyond the number that the server keeps records of",
            now.num_devices_not_noted,
        )
        if row is not None:
            yield from _round_metrics(row)
        for name, meaning in DEVICE_METRICS.items():
            family = GaugeMetricFamily(f"{PREFIX}device_{name}", meaning, labels=["device"])
            for device, values in sorted(devices.items()):
                if (value := getattr(values, name)) is not None:
                    label = printable(device, max_characters=MAX_LABEL_CHARACTERS)
                    family.add_metric([label], value)
            yield family
        yield _gauge(
            "unlabelled_devices",
            f"Devices of the last round without metrics of their own; {MAX_LABELLED} have them",
            num_unlabelled,
        )


def _round_metrics(row: RoundRow) -> Iterable[Metric]:
    yield _gauge("round", "The last committed round", row.round)
    if row.epsilon is None:
        yield _gauge("loss", "Training loss per unit of weight, of the last round", row.loss)
    else:
        yield _gauge("privacy_epsilon", f"Spent so far by each {row.privacy_unit}", row.epsilon)
    if ACCURACY in row.metrics:
        yield _gauge("accuracy", "On the server's test examples, 0 to 1", row.metrics[ACCURACY])
    yield _gauge("effective_batch_examples", "Examples in the last round", row.num_examples)
    yield _gauge("learning_rate", "Of the last step", row.learning_rate)


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, meaning, value=value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, meaning, value=value)
