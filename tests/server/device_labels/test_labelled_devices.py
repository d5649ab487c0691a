"""Runs with the devices of some labels alone: simulated, masked, over sockets, and by status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwater.common.errors import SettingsError
from headwater.common.messages import DeviceReport
from headwater.common.settings.fields import has_labels
from headwater.common.settings.sources import load
from headwater.server.cli import app
from headwater.server.rounds.round_row import figure_of
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine
from tests.processes import Processes, port_of, rows, write_task

FLEET = """
[[device]]
profile = "pi5-8gb"
labels = "site=lab,kind=pi"
count = 3
[[device]]
profile = "laptop"
labels = "site=home"
count = 2
[[device]]
profile = "laptop"
"""
DIGITS = "examples/digits.py:Digits"


@pytest.mark.parametrize(
    ("own", "wanted", "has"),
    [
        ("site=lab", "site=lab", True),
        ("site=lab,kind=pi", "kind=pi", True),
        ("site=lab", "site=lab,kind=pi", False),
        ("site=home,kind=pi", "site=lab,site=home", True),
        ("site=home", "site=lab,site=home,kind=pi", False),
        ("site=laboratory", "site=lab", False),
        (None, "site=lab", False),
    ],
)
def test_a_device_has_every_label_with_one_of_its_values(
    own: str | None, wanted: str, has: bool
) -> None:
    assert has_labels(own, wanted) is has


@pytest.mark.parametrize("text", ["lab", "site=", "=lab", "site=lab kind=pi", "a=" + "b" * 41])
def test_what_is_no_label_is_refused(text: str) -> None:
    for key in ("cohort.devices", "client.labels"):
        with pytest.raises(SettingsError, match="expected labels as site=lab"):
            load(None, {key: text})


def test_a_device_has_one_value_of_each_label() -> None:
    with pytest.raises(SettingsError, match="one value of each label, found several of site"):
        load(None, {"client.labels": "site=lab,site=home"})
    assert load(None, {"client.labels": ["räume=küche", "kind=pi"]}).client.labels == (
        "räume=küche,kind=pi"
    )


def test_the_wire_takes_labels_and_a_device_without_any() -> None:
    report = DeviceReport(name="a", layout_digest="same", labels="räume=küche,kind=pi")
    assert DeviceReport.model_validate_json(report.model_dump_json()) == report
    assert "labels" not in DeviceReport(name="a", layout_digest="same").model_dump_json(
        exclude_none=True
    )


@pytest.mark.parametrize("text", ["site=lab\n[red]", "site=lab\n", "site=lab,site=home", ",", ""])
def test_the_wire_refuses_labels_that_no_owner_may_write(text: str) -> None:
    with pytest.raises(ValueError, match="labels"):
        DeviceReport(name="a", layout_digest="same", labels=text)


def trained(folder: Path, wanted: str | None, **chosen: object) -> list[set[str]]:
    """Run three simulated rounds; return the clients of each."""
    (folder / "fleet.toml").write_text(FLEET)
    given = {"task": DIGITS, "rounds": 3, "simulation.fleet": folder / "fleet.toml", **chosen}
    settings = with_fleet(load(None, given | {"cohort.devices": wanted}))
    found: list[set[str]] = []
    run_engine(
        settings,
        on_round=lambda row: found.append({*figure_of(row, "name")}),
        resume=False,
    )
    return found


LAB = [{"0", "1", "2"}] * 3


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"plan.accumulation_steps": 1},
        {"secure.aggregation": "semi-honest"},
        {"simulation.engine": "grpc"},
    ],
)
def test_a_simulated_round_is_of_the_labelled_devices(
    tmp_path: Path, how: dict[str, object]
) -> None:
    assert trained(tmp_path, "site=lab", **how) == LAB


def test_several_values_and_several_labels(tmp_path: Path) -> None:
    assert trained(tmp_path, "site=lab,site=home") == [{"0", "1", "2", "3", "4"}] * 3
    assert trained(tmp_path, "site=lab,kind=pi") == LAB
    assert trained(tmp_path, None) == [{str(part) for part in range(6)}] * 3


def test_a_cohort_is_drawn_from_the_labelled_devices(tmp_path: Path) -> None:
    rounds = trained(tmp_path, "site=lab", **{"cohort.size": 2, "cohort.min_clients": 2})
    assert all(len(one) == 2 and one <= LAB[0] for one in rounds)


def test_asynchronous_steps_await_the_labelled_devices(tmp_path: Path) -> None:
    rounds = trained(tmp_path, "site=lab", **{"asynchronous.is_on": True})
    assert set().union(*rounds) == LAB[0]


def test_labels_that_too_few_devices_have_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--devices site=attic fits 0 of 6 devices") as refused:
        trained(tmp_path, "site=attic")
    assert "kind=pi, site=home, site=lab" in str(refused.value.remedy)


@pytest.mark.slow
def test_a_server_waits_for_labelled_devices_and_the_others_for_another_run(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path / "task").spec
    with Processes(tmp_path) as processes:
        server = processes.server(
            *("--devices", "site=lab", "--min-clients", 2, "--rounds", 2), task=task
        )
        port = port_of(server)
        home = processes.client(port, 1, "--label", "site=home", "--name", "home", task=task)
        first = processes.client(port, 0, "--label", "site=lab", "--name", "lab1", task=task)
        server.wait_for("waiting: 1 of 2 clients connected, without 1 that this round is not for")
        assert not (tmp_path / "out" / "rounds.jsonl").read_text()
        second = processes.client(
            port, 1, "--label", "site=lab", "--label", "kind=pi", "--name", "lab2", task=task
        )
        for process in (server, first, second, home):
            process.succeed()
        assert [one["num_invited"] for one in rows(tmp_path / "out")] == [2, 2]
    status = CliRunner().invoke(
        app, ["status", "--out", str(tmp_path / "out"), "--json", "--devices", "site=lab"]
    )
    assert {one["name"]: one["labels"] for one in json.loads(status.output)["devices"]} == {
        "lab1": "site=lab",
        "lab2": "site=lab,kind=pi",
    }
    none = CliRunner().invoke(
        app, ["status", "--out", str(tmp_path / "out"), "--devices", "site=attic"]
    )
    assert none.exit_code == 2
    assert "site=home" in none.output
