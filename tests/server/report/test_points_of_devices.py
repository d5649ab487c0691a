"""The figures of a round's devices: the same from a row, from columns and from a line of JSON."""

from __future__ import annotations

import json
import math

from headwater.common.messages import Plan, Step, UpdateReport
from headwater.server.aggregation.round_reports import AcceptedReports
from headwater.server.operations.round_log import row_to_dict
from headwater.server.report.round_points import RoundParts, newest, parts_of
from headwater.server.rounds.round_row import ClientRows
from tests.round_rows import client, masked, row


def points(parts: RoundParts) -> list[tuple[str, object]]:
    return [(name, parts.point(at)) for at, name in enumerate(parts.names)]


def test_a_live_row_and_its_line_give_the_same_figures() -> None:
    live = row(3, "a", "b", masked_clients=[masked("m")])
    line = json.loads(json.dumps(row_to_dict(live)))
    assert points(parts_of(live)) == points(parts_of(line))
    assert [name for name, _ in points(parts_of(live))] == ["a", "b", "m"]
    found = parts_of(live).of("m")
    assert found
    assert (found["round"], found["k"], found["examples"], found["loss"]) == (3, 5, 20, None)
    assert parts_of(live).of("nobody") is None


def test_reports_give_the_figures_of_their_rows() -> None:
    steps = tuple(
        Step(num_examples=4, weight=4, loss=0.5, seconds=1.0, peak_bytes=peak) for peak in (7, 9, 8)
    )
    reports = {
        name: UpdateReport(
            name=name,
            round=2,
            num_examples=4 * len(done),
            weight=12,
            loss_sum=6.0,
            micro_batch_size=4,
            seconds=3.0,
            steps=done,
            reason="quota",
        )
        for name, done in (("a", steps), ("b", ()))
    }
    plan = {"round": 2, "run_seed": 0, "model_version": 1, "quota": 12, "micro_batch_size": 4}
    accepted = AcceptedReports()
    accepted.add(*reports.values())
    rows = ClientRows(accepted, {name: Plan(**plan, reason=f"why {name}") for name in reports})
    lazy, made = parts_of(row(2, clients=rows)), parts_of(row(2, clients=[*rows]))
    assert points(lazy) == points(made)
    assert (lazy.point(0)["memory"], lazy.point(1)["memory"]) == (9, None)
    assert lazy.point(1)["plan"] == "why b"


def test_a_loss_that_is_not_finite_is_unknown() -> None:
    found = parts_of(row(1, clients=[client("a", loss=math.nan)])).of("a")
    assert found
    assert found["loss"] is None


def test_the_newest_figures_are_those_of_each_devices_last_round() -> None:
    rounds = [parts_of(row(number, *names)) for number, names in ((1, "abc"), (2, "ab"), (3, "a"))]
    found = {name: point["round"] for name, point in newest(rounds)}
    assert found == {"a": 3, "b": 2, "c": 1}


def test_only_some_devices_are_kept() -> None:
    kept = parts_of(row(1, "a", "b", "c")).only({"c", "a", "z"})
    assert [name for name, _ in points(kept)] == ["a", "c"]
