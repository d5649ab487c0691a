"""``--best``, ``--stop-when`` and ``evaluate`` with a real server and real devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.common.model.trained_model import BEST, MODEL, load_model, read_model
from tests.processes import Processes, port_of, rows, write_task

pytestmark = pytest.mark.slow

PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 8, "--min-clients", 2)
# The training loss falls, so that its maximum does not rise for long.
FOLLOW = ("--best", "min:train_loss", "--stop-when", "max:train_loss", "--patience", 3)
MANY = 100_000


def test_a_server_stops_when_the_metric_does_and_its_best_model_can_be_tested_and_loaded(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path).spec
    out = tmp_path / "out"
    with Processes(tmp_path) as processes:
        server = processes.server(*PLAN, *FOLLOW, "--rounds", MANY, task=task)
        devices = [processes.client(port_of(server), part, task=task) for part in (0, 1)]
        server.succeed()
        for device in devices:
            device.succeed()
        assert "train_loss has not improved in 3 evaluations" in server.text()
        ended = rows(out)
        losses = [row["loss"] for row in ended]
        assert losses.index(max(losses)) == len(ended) - 4
        record, _ = read_model(out / BEST)
        assert record.best == {
            "metric": "train_loss",
            "value": min(losses),
            "round": losses.index(min(losses)) + 1,
        }
        assert "finished" in processes.run("server", "status", "--out", out).text()

        again = processes.server("--resume", "--out", out, task=task)
        again.succeed()
        assert "a larger --patience with --resume goes on" in again.text()
        assert rows(out) == ended

        tested = processes.complete(
            *("server", "evaluate", "--out", out, "--best", "--json"),
            *("--task", task, "--data", tmp_path),
        )
        [result] = json.loads(tested.stdout)["results"]
        assert result["num_examples"] == 50
        assert 0 < result["loss"] < 10
    assert not load_model(out, task).training
    assert read_model(out / MODEL)[0].rounds == len(ended)
