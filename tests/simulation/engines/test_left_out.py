"""Devices too slow for the deadline: left out with a reason, invited in turn, back when fast."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_file import read_fleet_file
from headwater.simulation.run import run_engine, run_on_messages

# Two devices that do a thousand examples a second, and two that need ten seconds for one.
FLEET = """
[[device]]
count = 2
examples_per_second = 1000
micro_batch_seconds = 0.001
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000

[[device]]
count = 2
examples_per_second = 0.1
micro_batch_seconds = 0
memory_bytes = 1_000_000_000
upload_bytes_per_second = 1_000_000_000
"""


def settings(folder: Path, name: str, rounds: int, **changes: Any) -> Settings:
    (folder / "fleet.toml").write_text(FLEET)
    return load(
        None,
        {
            "task": "tests/tasks.py:TwoLayers",
            "simulation.fleet": folder / "fleet.toml",
            "rounds": rounds,
            "threads": 1,
            "plan.effective_batch_size": 20,
            "cohort.deadline_seconds": 2.0,
            "cohort.invite_within_rounds": 3,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.001,
            "out": folder / name,
            **changes,
        },
    )


def simulate(chosen: Settings, *, resume: bool = False) -> list[RoundRow]:
    rows: list[RoundRow] = []
    run_engine(chosen, on_round=rows.append, resume=resume)
    return rows


def simulate_on_messages(chosen: Settings) -> list[RoundRow]:
    rows: list[RoundRow] = []
    run_on_messages(chosen, on_round=rows.append, resume=False)
    return rows


WHY = "one example takes 10.0 s of its 1.8 s"


def test_slow_devices_are_left_out_with_a_reason_and_invited_once_in_n_rounds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rows = simulate(settings(tmp_path, "run", 9))
    for name in ("2", "3"):
        invited = [row.round for row in rows if name in row.refused]
        assert len(invited) == 3
        assert [later - earlier for earlier, later in pairwise(invited)] == [3, 3]
        for row in rows:
            # Asked, it comes ten seconds late, as was foreseen.
            assert (name in row.left_out) == (name not in row.refused)
            assert row.left_out.get(name, WHY) == WHY
            assert row.refused.get(name, "LateUpdate").startswith("LateUpdate")
    assert all({client.name for client in row.clients} == {"0", "1"} for row in rows)
    assert f"device 2 is not invited to this round: {WHY}" in caplog.messages
    assert f"round 1: 2 more left out (2: {WHY}; 3: {WHY})" in caplog.messages


def test_a_device_that_became_fast_is_invited_in_the_next_round(tmp_path: Path) -> None:
    """What it tells when it is left out counts for the next round."""
    chosen = settings(tmp_path, "run", 2, **{"cohort.invite_within_rounds": 1000})
    assert simulate(chosen)[1].left_out.keys() == {"2", "3"}
    # The machine under device 2 and 3 is exchanged while the server is down: the run goes on.
    rows: list[RoundRow] = []
    (tmp_path / "fleet.toml").write_text(FLEET.replace("0.1\n", "500\n"))
    read_fleet_file.cache_clear()
    run_engine(chosen.model_copy(update={"rounds": 3}), on_round=rows.append, resume=True)
    assert rows[0].left_out == {}
    assert [client.name for client in rows[0].clients] == ["0", "1", "2", "3"]


def test_slow_devices_are_invited_if_there_are_too_few_fast_ones(
    tmp_path: Path,
) -> None:
    # Device 2 needs ten seconds for an example, so with a deadline of 10.2 its update is in time.
    changes = {
        "cohort.min_clients": 3,
        "cohort.deadline_seconds": 10.2,
        "cohort.invite_within_rounds": 1000,
    }
    for row in simulate(settings(tmp_path, "run", 2, **changes)):
        assert [client.name for client in row.clients] == ["0", "1", "2"]
        assert row.left_out.keys() == {"3"}
        said = "one example, as 3 devices are needed though one example takes 10.0 s of its 9.2 s"
        assert row.clients[2].plan == f"{said}; in one micro-batch"


@pytest.mark.slow
def test_a_run_with_devices_left_out_resumes_with_the_same_plans(tmp_path: Path) -> None:
    simulate(settings(tmp_path, "whole", 7))
    for rounds in range(1, 8):
        simulate(settings(tmp_path, "broken", rounds), resume=rounds > 1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert (whole / MODEL).read_bytes() == (broken / MODEL).read_bytes()
    plans = [
        [
            (row["left_out"], row["refused"], [(c["name"], c["plan"]) for c in row["clients"]])
            for row in read_rows(folder)
        ]
        for folder in (whole, broken)
    ]
    assert plans[0] == plans[1]


def test_a_disconnected_left_out_device_describes_itself_on_its_return_on_both_engines(
    tmp_path: Path,
) -> None:
    """Devices 2 and 3 are connected in rounds 1, 2 and 4 of every four."""
    plans: dict[str, list[Any]] = {}
    for name, run in (("calls", simulate), ("messages", simulate_on_messages)):
        chosen = settings(tmp_path, name, 8)
        slow = FLEET.rindex("[[device]]") + len("[[device]]")
        fleet = f"{FLEET[:slow]}\navailability = [1, 1, 0, 1]{FLEET[slow:]}"
        (tmp_path / "fleet.toml").write_text(fleet)
        read_fleet_file.cache_clear()
        plans[name] = [
            (
                row.num_invited,
                row.left_out,
                row.refused,
                [(client.name, client.plan) for client in row.clients],
            )
            for row in run(chosen)
        ]
        away = [plans[name][number - 1] for number in (3, 7)]
        assert all(round_[:3] == (2, {}, {}) for round_ in away)
        assert any(left_out for _, left_out, *_ in plans[name])
    assert plans["calls"] == plans["messages"]
    models = [(tmp_path / name / MODEL).read_bytes() for name in plans]
    assert models[0] == models[1]


def test_reports_dropped_from_the_cache_are_computed_again_with_the_same_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cohort of one the reports of two are kept, where 4,000 would be."""
    plans = []
    for name in ("kept", "forgotten"):
        chosen = settings(tmp_path, name, 9, **{"cohort.size": 1, "plan.effective_batch_size": 8})
        (tmp_path / "fleet.toml").write_text(FLEET.replace("count", "on_battery = 0.5\ncount"))
        read_fleet_file.cache_clear()
        rows = simulate(chosen)
        plans.append([(row.left_out, row.refused, [c.plan for c in row.clients]) for row in rows])
        monkeypatch.setattr("headwater.simulation.fleet.devices.MIN_CACHE_SIZE", 0)
    assert any(left_out for left_out, *_ in plans[0])
    assert plans[0] == plans[1]
    models = [(tmp_path / name / MODEL).read_bytes() for name in ("kept", "forgotten")]
    assert models[0] == models[1]
