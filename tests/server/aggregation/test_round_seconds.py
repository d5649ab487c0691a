"""A round's seconds as its clients see them: each part by hand, and all of them add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import ReadyReport, Step, UpdateReport, Vitals
from headwater.server.aggregation.round_reports import ReportColumns
from headwater.server.aggregation.round_seconds import LinkSeconds, measured_split, virtual_split
from headwater.server.fleet import Traffic

SECONDS = st.floats(0, 1e6)


def report(name: str, seconds: float, *, rate: float | None = None) -> UpdateReport:
    step = Step(num_examples=1, weight=1, loss=0.0, seconds=seconds, peak_bytes=0)
    return UpdateReport(
        name=name,
        round=1,
        num_examples=1,
        weight=1,
        loss_sum=0.0,
        micro_batch_size=1,
        seconds=seconds,
        steps=(step,),
        reason="quota",
        vitals=Vitals(upload_bytes_per_second=rate, download_bytes_per_second=rate),
    )


def test_on_the_virtual_clock_transfers_follow_from_rates_and_the_rest_is_computation() -> None:
    columns = ReportColumns.of(report("a", 10.0, rate=100.0), report("b", 20.0, rate=50.0))
    found = virtual_split([columns], [], download_bytes=200, upload_bytes=100)
    # a: 2 s down, 1 s up, 7 s of work, waits 10 s; b: 4 s down, 2 s up, 14 s of work.
    assert found == {"down": 3.0, "compute": 10.5, "up": 1.5, "wait": 5.0}


def test_a_server_measures_transfers_and_believes_a_client_its_computation() -> None:
    columns = ReportColumns.of(report("a", 3.0), report("b", 5.0))
    links = {"a": LinkSeconds(down=1.0, up=2.0), "b": LinkSeconds(down=1.0, up=1.0)}
    found = measured_split([columns], [], links, round_seconds=8.0)
    assert found == {"down": 1.0, "up": 1.5, "compute": 4.0, "wait": 1.5}


def test_a_masked_client_computes_from_its_plans_arrival_until_it_is_ready() -> None:
    ready = ReadyReport(name="a", round=1, seconds=5.0)
    links = {"a": LinkSeconds(down=1.0, up=2.0)}
    found = measured_split([], [ready], links, round_seconds=10.0)
    assert found == {"down": 1.0, "up": 2.0, "compute": 4.0, "wait": 3.0}


def test_a_claim_of_more_than_the_round_took_is_cut_to_it() -> None:
    found = measured_split(
        [ReportColumns.of(report("liar", 1e99))],
        [],
        {"liar": LinkSeconds(down=1.0)},
        round_seconds=4.0,
    )
    assert found == {"down": 1.0, "up": 0.0, "compute": 3.0, "wait": 0.0}


def test_where_no_transfer_is_measured_it_is_waiting() -> None:
    found = measured_split([ReportColumns.of(report("a", 3.0))], [], {}, round_seconds=8.0)
    assert found == {"compute": 3.0, "wait": 5.0}


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=5), SECONDS)
def test_the_measured_parts_add_up_to_the_round(
    clients: list[tuple[float, float, float]], round_seconds: float
) -> None:
    columns = ReportColumns.of(*[report(str(n), own) for n, (own, _, _) in enumerate(clients)])
    links = {str(n): LinkSeconds(down=down, up=up) for n, (_, down, up) in enumerate(clients)}
    found = measured_split([columns], [], links, round_seconds=round_seconds)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(round_seconds)


def test_traffic_since_a_moment_counts_a_new_session_whole() -> None:
    before = Traffic(
        bytes_up=5,
        bytes_down=7,
        links={"a": LinkSeconds(down=1.0, up=2.0), "b": LinkSeconds(down=9.0)},
    )
    now = Traffic(
        bytes_up=6,
        bytes_down=9,
        links={"a": LinkSeconds(down=1.5, up=4.0), "b": LinkSeconds(down=0.5)},
    )
    assert now.since(before) == Traffic(
        bytes_up=1,
        bytes_down=2,
        links={"a": LinkSeconds(down=0.5, up=2.0), "b": LinkSeconds(down=0.5)},
    )
