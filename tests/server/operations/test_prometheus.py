"""The server's metrics: names, sums, and the bound on labelled devices."""

from __future__ import annotations

from collections import Counter

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headwater.common.errors import TooFewClients
from headwater.common.model.layout import ModelLayout
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.operations import prometheus as exporter
from headwater.server.operations.prometheus import (
    IDLE_ROUNDS,
    DeviceMetrics,
    ServerGauges,
    ServerMetrics,
    labelled_devices,
)
from headwater.server.rounds.open_round import OpenRound
from tests.round_rows import masked, row

NOW = ServerGauges(
    num_connected=3,
    bytes_up=10,
    bytes_down=20,
    staged_bytes=30,
    is_paused=True,
    refusals=Counter(IdentityRefused=2, CorruptUpdate=1),
    num_history_failures=0,
    num_devices_not_noted=0,
)


def samples(metrics: ServerMetrics) -> dict[str, float]:
    page = generate_latest(metrics.registry).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = "".join(f"{{{value}}}" for value in sample.labels.values())
            found[sample.name.removeprefix("headwater_server_") + labels] = sample.value
    return found


def test_rounds_add_up() -> None:
    metrics = ServerMetrics(lambda: NOW)
    metrics.on_round(row(1, "a", "b"))
    metrics.aborted(TooFewClients("none"))
    metrics.on_round(row(2, "a", loss=0.25, masked_clients=[masked("m")]))
    found = samples(metrics)
    expected = {
        "rounds_total": 2,
        "rounds_aborted_total": 1,
        "examples_total": 18,
        "loss": 0.25,
        "accuracy": 0.75,
        "effective_batch_examples": 6,
        "learning_rate": 0.1,
        "round_seconds_count": 2,
        # 3 s each, of which one was spent waiting for devices.
        "round_seconds_sum": 4.0,
        "device_accumulation_steps{a}": 2,
        "device_accumulation_steps{m}": 5,
        "device_seconds{m}": 2.0,
        "device_peak_bytes{b}": 100,
        "unlabelled_devices": 0,
    }
    assert found.items() >= expected.items()


def test_a_scrape_shows_the_servers_state() -> None:
    found = samples(ServerMetrics(lambda: NOW))
    expected = {
        "connected_devices": 3,
        "received_bytes_total": 10,
        "sent_bytes_total": 20,
        "staged_bytes": 30,
        "is_paused": 1,
        "refusals_total{IdentityRefused}": 2,
    }
    assert found.items() >= expected.items()
    assert "loss" not in found


def test_refusals_of_rounds_and_streams_are_added() -> None:
    metrics = ServerMetrics(lambda: NOW)
    opened = OpenRound(
        plans={},
        total=CohortSum(ModelLayout(trainable=())),
        owned={},
    )
    opened.refusals["CorruptUpdate"] += 4
    metrics.closed(opened)
    assert samples(metrics)["refusals_total{CorruptUpdate}"] == 5


def figures(round_number: int) -> DeviceMetrics:
    return DeviceMetrics(round=round_number, accumulation_steps=1, seconds=1.0, peak_bytes=1)


def test_labelled_devices_are_bounded_and_the_rest_counted() -> None:
    most = exporter.MAX_LABELLED
    first = {f"d{number}": figures(1) for number in range(most)}
    kept, num_without = labelled_devices({}, first, round_number=1)
    assert (kept, num_without) == (first, 0)
    kept, num_without = labelled_devices(
        kept, {"d0": figures(2), "x": figures(2), "y": figures(2)}, round_number=2
    )
    assert kept == {**first, "d0": figures(2)}
    assert num_without == 2


def test_an_idle_device_loses_its_labels() -> None:
    now = 1 + IDLE_ROUNDS
    kept, _ = labelled_devices({"gone": figures(1), "here": figures(2)}, {}, round_number=now)
    assert kept == {"here": figures(2)}
