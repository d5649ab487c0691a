"""The client's counters, and their Prometheus metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headwater.client.operations.counters import UPDATE_SECONDS, Counters
from headwater.client.operations.prometheus import ClientMetrics
from headwater.common.messages import ReadyReport, Step, UpdateReport, Vitals


def report(seconds: float, num_steps: int = 2, **changes: Any) -> UpdateReport:
    step = Step(num_examples=4, weight=4, loss=1.0, gradient_norm=1.0, seconds=0.1, peak_bytes=70)
    fields: dict[str, Any] = {
        "name": "pi",
        "round": 1,
        "num_examples": 4 * num_steps,
        "weight": 4 * num_steps,
        "loss_sum": 1.0,
        "micro_batch_size": 4,
        "seconds": seconds,
        "steps": (step,) * num_steps,
        "reason": "quota",
    }
    return UpdateReport(**{**fields, **changes})


def samples(counters: Counters, vitals: Vitals, limit_bytes: int | None) -> dict[str, float]:
    metrics = ClientMetrics(counters, lambda: vitals, lambda: limit_bytes)
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for value in sample.labels.values())
            found[sample.name.removeprefix("headwater_client_") + labels] = sample.value
    return found


def test_updates_add_up() -> None:
    counters = Counters()
    counters.add_update(report(0.2))
    counters.add_update(report(4.0, num_steps=3, reason="deadline"))
    found = samples(counters, Vitals(), 1000)
    expected = {
        "updates_total": 2,
        "micro_batches_total": 5,
        "examples_total": 20,
        "peak_bytes": 70,
        "memory_limit_bytes": 1000,
        "stops_total{quota}": 1,
        "stops_total{deadline}": 1,
        "update_seconds_sum": 4.2,
        "update_seconds_count": 2,
        "update_seconds_bucket{0.1}": 0,
        "update_seconds_bucket{0.25}": 1,
        "update_seconds_bucket{2.5}": 1,
        "update_seconds_bucket{5.0}": 2,
        "update_seconds_bucket{+Inf}": 2,
    }
    assert found.items() >= expected.items()


@pytest.mark.parametrize("place", range(len(UPDATE_SECONDS) + 1))
def test_an_update_counts_in_the_first_bucket_that_fits(place: int) -> None:
    bounds = [*UPDATE_SECONDS, 2 * UPDATE_SECONDS[-1]]
    counters = Counters()
    counters.add_update(report(bounds[place]))
    assert counters.num_within.index(1) == place


def test_a_masked_update_adds_no_counts() -> None:
    counters = Counters()
    counters.add_update(ReadyReport(name="pi", round=1))
    found = samples(counters, Vitals(), None)
    assert (found["updates_total"], found["peak_bytes"]) == (1, 0)
    assert (found["micro_batches_total"], found["examples_total"]) == (0, 0)
    assert not any(name.startswith("stops_total") for name in found)


def test_the_first_connection_is_not_a_reconnect() -> None:
    counters = Counters()
    counters.connected()
    assert (counters.num_reconnects, counters.is_connected) == (0, True)
    counters.disconnected()
    assert not counters.is_connected
    counters.connected()
    assert counters.num_reconnects == 1


def test_a_missing_sensor_has_no_metric() -> None:
    found = samples(Counters(), Vitals(temperature_celsius=51.5), None)
    assert found["temperature_celsius"] == 51.5
    assert "battery_ratio" not in found
    assert "memory_limit_bytes" not in found
    assert samples(Counters(), Vitals(battery=0.5), None)["battery_ratio"] == 0.5
