"""The engine ray: blocks of devices on a cluster, with the bits of one process; machines may go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine
from tests.processes import until
from tests.python_tasks import SIGNS
from tests.ray_sessions import Started, cluster, finish

pytestmark = pytest.mark.slow

WORKER = "ray::RayWorker"
CLIENTS, ROUNDS = 12, 24
# A round takes some time, so that machines come and go between rounds and within them.
TASK = """
import time
from tests.tasks import TwoLayers


class Slow(TwoLayers):
    def loss_sum(self, model, batch):
        time.sleep(0.01)
        return super().loss_sum(model, batch)
"""


@pytest.fixture(scope="module")
def two_workers() -> Iterator[tuple[str, Started]]:
    with cluster() as found:
        yield found


def settings_of(folder: Path, **chosen: Any) -> Settings:
    """Write the settings of a run, and return them."""
    (folder / "task.py").write_text(TASK)
    found = load(
        None,
        {
            "task": f"{folder}/task.py:Slow",
            "simulation.clients": CLIENTS,
            "threads": 1,
            "rounds": 3,
            "plan.accumulation_steps": 2,
            "plan.micro_batch_size": 4,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.001,
            **chosen,
        },
    )
    (folder / "settings.toml").write_text(found.to_toml())
    return found


def simulate_here(settings: Settings, out: Path) -> bytes:
    """Run the settings in this process, and return the model."""
    chosen = with_fleet(settings.model_copy(update={"out": out}))
    run_engine(chosen, on_round=lambda row: None, resume=False)
    return (out / MODEL).read_bytes()


def test_blocks_on_two_nodes_have_the_bits_of_one_process(
    tmp_path: Path, two_workers: tuple[str, Started]
) -> None:
    address, nodes = two_workers
    settings = settings_of(tmp_path, **{"simulation.compute": "fused", "task": SIGNS})
    started = Started(address=address)
    try:
        process = started.simulate(
            *("--config", tmp_path / "settings.toml"), out=tmp_path / "ray", engine="ray"
        )
        said = finish(process)
        assert process.returncode == 0, said
        assert "on 2 nodes" in said
        assert (tmp_path / "ray" / MODEL).read_bytes() == simulate_here(settings, tmp_path / "here")
        rows = read_rows(tmp_path / "ray")
        assert [(row["num_nodes"], row["num_clients"]) for row in rows] == [(2, CLIENTS)] * 3
        until(lambda: not nodes.named(WORKER), what=lambda: f"the end of {nodes.named(WORKER)}")
    finally:
        started.end()


def test_a_run_goes_on_with_the_nodes_that_are_left_and_those_that_join(
    tmp_path: Path, two_workers: tuple[str, Started]
) -> None:
    """Two of two are killed and one is added, in mid-run: the same steps as dropouts explain.

    It is the last test of the cluster, whose first two nodes are gone then.
    """
    address, nodes = two_workers
    settings_of(
        tmp_path, **{"simulation.compute": "one-by-one", "rounds": ROUNDS, "cohort.min_clients": 1}
    )
    out = tmp_path / "ray"

    def num_rounds() -> int:
        assert process.poll() is None, finish(process)
        return len(read_rows(out)) if (out / "rounds.jsonl").exists() else 0

    def uses_two_again() -> bool:
        return num_rounds() > 10 and any(row["num_nodes"] == 2 for row in read_rows(out)[10:])

    started = Started(address=address)
    try:
        process = started.simulate(*("--config", tmp_path / "settings.toml"), out=out, engine="ray")
        until(lambda: num_rounds() > 2, what=lambda: f"{num_rounds()} rounds")
        head, first, second = sorted(nodes.named("raylet"), key=lambda one: one.create_time())
        first.kill()
        until(lambda: num_rounds() > 10, what=lambda: f"{num_rounds()} rounds")
        keeper = nodes.processes[0].stdin
        assert keeper is not None
        keeper.write("\n")
        keeper.flush()
        until(uses_two_again, what=lambda: f"{[row['num_nodes'] for row in read_rows(out)]}")
        second.kill()
        said = finish(process)
        assert process.returncode == 0, said
        assert head.is_running()
    finally:
        started.end()
    rows = read_rows(out)
    assert len(rows) == ROUNDS
    assert [row["num_nodes"] for row in rows[:3]] == [2] * 3
    assert {row["num_nodes"] for row in rows} == {1, 2}
    dropouts = []
    for row in rows:
        gone = sorted(row["refused"])
        assert row["num_clients"] + len(gone) == CLIENTS
        assert all(
            why.startswith("WorkerDied: its worker was lost") for why in row["refused"].values()
        )
        if gone:
            where = {"first_round": row["round"], "last_round": row["round"]}
            dropouts.append({"devices": [int(name) for name in gone], **where})
    assert dropouts
    lines = [
        "\n".join(["[[dropout]]", *(f"{key} = {json.dumps(one[key])}" for key in one)])
        for one in dropouts
    ]
    (tmp_path / "faults.toml").write_text("\n".join(lines))
    alone = settings_of(
        tmp_path,
        **{
            "simulation.compute": "one-by-one",
            "rounds": ROUNDS,
            "cohort.min_clients": 1,
            "simulation.faults": str(tmp_path / "faults.toml"),
        },
    )
    assert simulate_here(alone, tmp_path / "here") == (out / MODEL).read_bytes()


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"secure.aggregation": "semi-honest"}, "masked rounds are made of messages"),
        ({"simulation.workers": 2}, "for --engine in-process alone"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(chosen: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load(None, {"simulation.engine": "ray", **chosen})
