"""Which troubles are seen in a run's figures, and at which point."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headwater.common.settings.schema import AlertSettings
from headwater.server.alerts.conditions import MIN_LOSSES, WatchedRun, troubles
from headwater.server.transport.device_records import DeviceRecord

NOW, HOUR, DAY = 1e9, 3600.0, 86_400.0
CHOSEN = AlertSettings()


def device(name: str, **given: Any) -> DeviceRecord:
    return DeviceRecord(name=name, **{"last_seen": NOW - 2 * DAY, "last_round": 3, **given})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"last_round_at": NOW - 1799}, {}),
        ({"last_round_at": NOW - 2 * HOUR, "round": 7}, {("no-round", "")}),
        ({"last_round_at": NOW - 2 * HOUR, "is_paused": True}, {}),
        ({"spent": (3.5, 4.0)}, {}),
        ({"spent": (3.6, 4.0)}, {("budget", "")}),
        ({"shares": {"a": 0.5, "b": 0.5}}, {}),
        ({"shares": {"a": 0.51, "b": 0.49}}, {("share", "a")}),
        ({"shares": {"a": 1.0}}, {}),
        ({"losses": [1.0] * 39 + [math.inf]}, {("loss", "")}),
        ({"losses": [1.0] * MIN_LOSSES + [1.6] * MIN_LOSSES}, {("loss", "")}),
        ({"losses": [1.0] * MIN_LOSSES + [1.4] * MIN_LOSSES}, {}),
        ({"losses": [1.0] * MIN_LOSSES + [9.0] * 5}, {}),
        ({"losses": [math.nan] * 100}, {}),
        ({"devices": [device("a"), device("b", is_connected=True)]}, {("device-lost", "a")}),
        ({"devices": [device("a", last_seen=NOW - 0.9 * DAY)]}, {}),
        ({"devices": [device("refused", last_round=None)]}, {}),
        ({"devices": [device("revoked", refusal_code="CertificateRevoked")]}, {}),
        ({"certificates": {"the server": NOW + 15 * DAY}}, {}),
        ({"certificates": {"the server": NOW + 13 * DAY}}, {("certificate", "the server")}),
        ({"free_bytes": 10**9 - 1, "folder": "runs/a"}, {("disk", "runs/a")}),
        ({"free_bytes": 10**9}, {}),
    ],
    ids=str,
)
def test_troubles_are_seen_where_they_begin(
    given: dict[str, Any], found: set[tuple[str, str]]
) -> None:
    state = WatchedRun(**{"now": NOW, "last_round_at": NOW, **given})
    assert troubles(state, CHOSEN).keys() == set(found)


def test_the_words_say_how_much() -> None:
    state = WatchedRun(
        now=NOW,
        last_round_at=NOW - 2 * HOUR,
        round=7,
        devices=[device("pi")],
        certificates={"the server": NOW - 1},
        free_bytes=5 * 10**8,
        folder="runs/a",
    )
    assert [*troubles(state, CHOSEN).values()] == [
        "no round for 2 h, the last was 7",
        "pi is away for 2 d",
        "the certificate of the server has ended",
        "500 MB are left on the disk of runs/a",
    ]
