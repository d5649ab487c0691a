"""Plain text beyond loopback takes two decisions: one for the run, one for its metrics."""

from __future__ import annotations

import pytest

from headwater.common.errors import InsecureAddress
from headwater.common.settings.sources import load
from headwater.common.system.command_line import check_addresses

RUN, METRICS = "0.0.0.0:8500", "0.0.0.0:9464"
LOOPBACK = "127.0.0.1:8500"


@pytest.mark.parametrize(
    ("allowed", "address", "metrics", "remedy"),
    [
        ({}, RUN, None, "--plain-text"),
        ({}, LOOPBACK, METRICS, "--public-metrics"),
        ({"public_metrics": True}, RUN, METRICS, "--plain-text"),
        ({"plain_text": True}, RUN, METRICS, "--public-metrics"),
    ],
)
def test_allowing_one_of_run_and_metrics_does_not_allow_the_other(
    allowed: dict[str, bool], address: str, metrics: str | None, remedy: str
) -> None:
    with pytest.raises(InsecureAddress) as refused:
        check_addresses(load(None, allowed), address, metrics=metrics)
    assert remedy in str(refused.value.remedy)


def test_both_decisions_allow_both_and_loopback_needs_none() -> None:
    both = load(None, {"plain_text": True, "public_metrics": True})
    assert check_addresses(both, RUN, metrics=METRICS) is None
    assert check_addresses(load(None, {}), LOOPBACK, metrics="127.0.0.1:9464") is None
