"""Metrics of the devices of each label: plain means, and no group that betrays few devices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headwater.common.messages import EvaluateReport
from headwater.common.settings.sources import load
from headwater.server.device_labels.metrics_by_label import LEAST_DEVICES, by_label
from headwater.server.operations.round_log import rows_in
from headwater.server.rounds.evaluation import EvaluatedRound, on_devices
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine


def report(name: str, labels: str | None) -> EvaluateReport:
    return EvaluateReport(name=name, weight=1, loss_sum=1.0, labels=labels)


def told(*labels: str | None) -> dict[str, list[int]]:
    """Return the devices of each label that has metrics, by their numbers."""
    reports = [report(f"{number}", text) for number, text in enumerate(labels)]
    found = by_label(reports)
    return {label: [int(one.name) for one in group] for label, group in found.items()}


def test_the_devices_of_a_label_are_told_where_they_and_the_rest_are_enough() -> None:
    lab, home = ["site=lab"] * 3, ["site=home"] * 3
    assert told(*lab, *home) == {"site=home": [3, 4, 5], "site=lab": [0, 1, 2]}
    assert told(*lab, *home, *[None] * 3).keys() == {"site=home", "site=lab"}
    assert told(*lab, *home[:2]) == {}
    assert told(*lab, *home[:2], None) == {"site=lab": [0, 1, 2]}


def test_a_label_of_all_devices_and_one_of_few_are_not_told() -> None:
    assert told(*["kind=pi"] * 6) == {}
    assert told(*["kind=pi"] * 6, "kind=laptop") == {}
    assert told(*["kind=pi"] * 5) == {}
    assert told() == {}


def test_labels_whose_difference_is_one_device_are_not_told_together() -> None:
    both, one = ["kind=pi,site=lab"] * 3, ["site=lab"]
    assert told(*both, *one, *[None] * 6).keys() == {"kind=pi"}


@given(
    st.lists(
        st.lists(st.sampled_from(["a=1", "b=1", "c=1", "d=1"]), unique=True).map(sorted),
        max_size=24,
    )
)
def test_no_part_that_sums_and_differences_tell_apart_is_of_few(devices: list[list[str]]) -> None:
    groups = told(*(",".join(labels) or None for labels in devices))
    parts = Counter(
        tuple(number in group for group in groups.values()) for number in range(len(devices))
    )
    assert not groups or min(parts.values()) >= LEAST_DEVICES
    for label, group in groups.items():
        assert group == [n for n, labels in enumerate(devices) if label in labels]


def test_the_metrics_of_a_label_are_those_of_its_devices_alone() -> None:
    reports = [
        EvaluateReport(
            name=f"{number}",
            weight=number + 1,
            loss_sum=2.0 * number,
            metric_sums={"accuracy": 0.5 * number},
            labels="site=lab" if number % 2 else None,
        )
        for number in range(8)
    ]

    def tested(some: list[EvaluateReport]) -> EvaluatedRound:
        return on_devices(
            some,
            task=object(),  # type: ignore[arg-type]  # it shows its metrics as they are
            round_number=1,
            most_weight={f"{number}": 100 for number in range(8)},
        )

    found = tested(reports).metrics_by_label
    assert found == {"site=lab": tested(reports[1::2]).metrics | {"num_devices": 4}}


FLEET = """
[[device]]
profile = "laptop"
labels = "site=lab"
count = 3
[[device]]
profile = "pi5-8gb"
labels = "site=home"
count = 4
[[device]]
profile = "laptop"
count = 3
"""


def test_a_run_writes_the_metrics_of_each_label_beside_those_of_all(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(FLEET)
    rounds: list[RoundRow] = []
    chosen = {
        "task": "examples/digits.py:Digits",
        "rounds": 1,
        "threads": 1,
        "out": tmp_path / "out",
        "evaluation.on_devices": True,
        "simulation.fleet": fleet,
    }
    run_engine(with_fleet(load(None, chosen)), on_round=rounds.append, resume=False)
    (row,) = rounds
    assert {key: one["num_devices"] for key, one in row.metrics_by_label.items()} == {
        "site=home": 4,
        "site=lab": 3,
    }
    losses = [one["held_out_loss"] for one in row.metrics_by_label.values()]
    assert min(losses) != max(losses)
    (written,) = rows_in(tmp_path / "out")
    assert written["metrics_by_label"] == row.metrics_by_label
