"""The device's Prometheus metrics: its tally, and what its sensors say at a scrape.

Imported only where metrics were asked for; what there is no sensor for has no metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

from headwater.client.operations.counters import UPDATE_SECONDS, Counters
from headwater.common.messages import Vitals

PREFIX = "headwater_client_"


class ClientMetrics:
    """What Prometheus collects from."""

    def __init__(
        self, tally: Counters, vitals: Callable[[], Vitals], limit_bytes: Callable[[], int | None]
    ) -> None:
        """Take the counts, and how to ask the sensors and the memory limits."""
        self.registry = CollectorRegistry()
        self._tally = tally
        self._vitals = vitals
        self._limit_bytes = limit_bytes
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield all families."""
        tally, vitals = self._tally, self._vitals()
        gauges = (
            ("is_connected", "1 while the server serves this device", int(tally.is_connected)),
            (
                "peak_bytes",
                "Most memory that the process held in the last update",
                tally.peak_bytes,
            ),
            ("memory_limit_bytes", "What the process may hold", self._limit_bytes()),
            ("temperature_celsius", "Of the hottest part of the CPU", vitals.temperature_celsius),
            ("battery_ratio", "Charge of the battery, 0 to 1", vitals.battery),
        )
        for name, meaning, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, meaning, value=value)
        counters = (
            ("reconnects", "Connections made anew, after the first", tally.num_reconnects),
            ("micro_batches", "Of updates that were not masked", tally.num_micro_batches),
            ("examples", "Summed, of updates that were not masked", tally.num_examples),
            ("updates", "Updates summed", tally.num_updates),
            ("sent_bytes", "Bytes to the server", tally.sent_bytes),
            ("received_bytes", "Bytes from the server", tally.received_bytes),
        )
        for name, meaning, number in counters:
            yield CounterMetricFamily(PREFIX + name, meaning, value=number)
        stops = CounterMetricFamily(
            f"{PREFIX}stops", "Why an update ended where it did", labels=["reason"]
        )
        for reason, number in sorted(tally.stops.copy().items()):
            stops.add_metric([reason], number)
        yield stops
        bounds = [*map(str, map(float, UPDATE_SECONDS)), "+Inf"]
        yield HistogramMetricFamily(
            f"{PREFIX}update_seconds",
            "What an update took",
            buckets=list(zip(bounds, accumulate(tally.num_within), strict=True)),
            sum_value=tally.seconds,
        )
