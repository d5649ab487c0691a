"""The client's Prometheus metrics: its counters, and its sensors' values at the time of a scrape.

Imported only if metrics are requested. A sensor that does not exist has no metric.
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
    """The collector that Prometheus's library reads at each scrape."""

    def __init__(
        self,
        counters: Counters,
        vitals: Callable[[], Vitals],
        limit_bytes: Callable[[], int | None],
    ) -> None:
        """``vitals`` reads the sensors, ``limit_bytes`` the lowest memory limit."""
        self.registry = CollectorRegistry()
        self._counters = counters
        self._vitals = vitals
        self._limit_bytes = limit_bytes
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families."""
        counters, vitals = self._counters, self._vitals()
        gauges = (
            ("is_connected", "1 while this device is connected", int(counters.is_connected)),
            ("peak_bytes", "Peak memory of the process in the last update", counters.peak_bytes),
            ("memory_limit_bytes", "Memory that the process may use", self._limit_bytes()),
            ("temperature_celsius", "The CPU's hottest sensor", vitals.temperature_celsius),
            ("battery_ratio", "Charge of the battery, 0 to 1", vitals.battery),
        )
        for name, meaning, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(PREFIX + name, meaning, value=value)
        totals = (
            ("reconnects", "Connections after the first", counters.num_reconnects),
            ("micro_batches", "Micro-batches of unmasked updates", counters.num_micro_batches),
            ("examples", "Examples summed in unmasked updates", counters.num_examples),
            ("updates", "Updates summed", counters.num_updates),
            ("sent_bytes", "Bytes sent to the server", counters.sent_bytes),
            ("received_bytes", "Bytes received from the server", counters.received_bytes),
        )
        for name, meaning, number in totals:
            yield CounterMetricFamily(PREFIX + name, meaning, value=number)
        stops = CounterMetricFamily(
            f"{PREFIX}stops", "Unmasked updates by the reason why they ended", labels=["reason"]
        )
        for reason, number in sorted(counters.stops.copy().items()):
            stops.add_metric([reason], number)
        yield stops
        bounds = [*map(str, map(float, UPDATE_SECONDS)), "+Inf"]
        yield HistogramMetricFamily(
            f"{PREFIX}update_seconds",
            "Training time of an update",
            buckets=list(zip(bounds, accumulate(counters.num_within), strict=True)),
            sum_value=counters.seconds,
        )
