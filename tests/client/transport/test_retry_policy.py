"""What a client says of a connection that broke, and how long it tries again."""

from __future__ import annotations

import math

import pytest

from headwater.client.transport.retry_policy import (
    MAX_BACKOFF_SECONDS,
    STANDBY_BACKOFF_SECONDS,
    ConnectionBroken,
    RetryPolicy,
    TaskChanges,
)
from headwater.common.errors import ConnectionLost

# The words of gRPC 1.81.
TO_TLS = (
    "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed"
)
TO_PLAIN = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: WRONG_VERSION_NUMBER"
TO_OTHER_NAME = "Custom verification check failed with error: Hostname Verification Check failed."
TO_NOBODY = "Failed to connect to remote host: Connection refused"


@pytest.mark.parametrize(
    ("text", "has_tls", "hint"),
    [
        (TO_TLS, False, "the server may want TLS: --tls-ca"),
        (TO_PLAIN, True, "the server may be without TLS"),
        (TO_OTHER_NAME, True, "its certificate was made for other names"),
        (TO_NOBODY, False, None),
        (TO_NOBODY, True, None),
        (TO_TLS, True, None),
    ],
)
def test_a_client_that_differs_from_its_server_in_tls_is_told_what_to_change(
    text: str, has_tls: bool, hint: str | None
) -> None:
    broken = ConnectionBroken(text, had_contact=False)
    retries = RetryPolicy(["pi:1"], 60.0, has_tls=has_tls)
    found = retries.hint(broken)
    assert (found or "").startswith(hint or "")
    assert (found is None) == (hint is None)
    assert retries.hint(ConnectionBroken(text, had_contact=True)) is None
    impatient = RetryPolicy(["pi:1"], 0.0, has_tls=has_tls)
    with pytest.raises(ConnectionLost) as lost:
        impatient.wait_seconds(broken)
    assert (hint or "check the address and that the server runs") in lost.value.remedy


def test_a_client_that_had_a_contact_is_not_told_to_change_tls() -> None:
    retries = RetryPolicy(["pi:1"], 60.0, has_tls=False)
    retries.wait_seconds(ConnectionBroken(TO_TLS, had_contact=True))
    assert retries.hint(ConnectionBroken(TO_TLS, had_contact=False)) is None


@pytest.mark.parametrize(
    ("addresses", "most"),
    [(["pi:1"], MAX_BACKOFF_SECONDS), (["pi:1", "nas:1"], STANDBY_BACKOFF_SECONDS)],
)
def test_a_client_that_knows_a_standby_waits_for_seconds_only(
    addresses: list[str], most: float
) -> None:
    retries = RetryPolicy(addresses, 1e6, has_tls=False)
    broken = ConnectionBroken(TO_NOBODY, had_contact=False)
    waits = [retries.wait_seconds(broken) for _ in range(20)]
    assert most / 2 <= max(waits) <= most


def test_a_device_changes_its_task_without_a_pause_after_it_has_trained() -> None:
    changes = TaskChanges()
    assert [changes.wait_seconds(has_trained=True) for _ in range(20)] == [0.0] * 20


def test_a_device_that_trains_none_of_its_tasks_waits_longer_at_each_change() -> None:
    changes = TaskChanges()
    waits = [changes.wait_seconds(has_trained=False) for _ in range(10)]
    assert waits[:4] == [0.0, 0.2, 0.4, 0.8]
    assert waits[-1] == MAX_BACKOFF_SECONDS
    assert changes.wait_seconds(has_trained=True) == 0.0
    assert changes.wait_seconds(has_trained=False) == 0.2


def test_the_same_reason_is_news_once_a_minute_and_after_each_contact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    policy = RetryPolicy(["a:1", "b:2"], math.inf, has_tls=False)
    refused, lost = (ConnectionBroken("refused", had_contact=had) for had in (False, True))
    assert policy.is_news(refused, "ipv4:10.0.0.1:8500: refused")
    assert not policy.is_news(refused, "ipv4:10.0.0.1:8501: refused")
    assert policy.is_news(refused, "no route")
    assert not policy.is_news(refused, "no route")
    now += 60
    assert policy.is_news(refused, "no route")
    assert policy.is_news(lost, "no route")
    assert policy.is_news(lost, "no route")
