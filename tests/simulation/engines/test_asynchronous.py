"""Asynchronous rounds under the virtual clock: each step takes the updates that came first."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.asynchronous.staleness import times_of
from headwater.server.operations.round_log import read_rows, row_to_dict
from headwater.server.rounds.checkpoint import load as load_checkpoint
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.reports.fault_summary import fault_lines
from headwater.simulation.run import run_engine
from tests.tasks import TwoLayers, gradient_sum

NUM_EXAMPLES = 24  # of each device of the task
FLEET = "".join(
    f"[[device]]\ncount = 2\nexamples_per_second = {rate}\nmicro_batch_seconds = 0.01\n"
    "upload_bytes_per_second = 1_000_000\nmemory_bytes = 2_000_000_000\n"
    for rate in (10, 40, 160)
)
ALL_EXAMPLES = {"plan.accumulation_steps": 1, "plan.micro_batch_size": NUM_EXAMPLES}


def settings_of(folder: Path, faults: str = "", /, **chosen: Any) -> Settings:
    folder.mkdir(parents=True)
    (folder / "fleet.toml").write_text(FLEET + faults)
    return with_fleet(
        load(
            None,
            {
                "task": "tests/tasks.py:TwoLayers",
                "rounds": 8,
                "threads": 1,
                "check_task": False,
                "simulation.fleet": folder / "fleet.toml",
                "plan.accumulation_steps": 2,
                "plan.micro_batch_size": 4,
                "optimizer.name": "sgd",
                "optimizer.learning_rate": 0.001,
                "asynchronous.is_on": True,
                "asynchronous.buffer": 2,
                **chosen,
            },
        )
    )


class Versions(Observer):
    """Keeps the parameters of each model of a run."""

    def __init__(self) -> None:
        self.models: list[Tensor] = []

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._model = model
        self.models.append(self._flat())

    def stepped(self, row: object) -> None:
        self.models.append(self._flat())

    def _flat(self) -> Tensor:
        return torch.nn.utils.parameters_to_vector(self._model.parameters()).detach().clone()


def run(settings: Settings, *, resume: bool = False, observer: Observer | None = None) -> Any:
    """Run the settings; return the rows as they would be read from rounds.jsonl."""
    rows: list[RoundRow] = []
    run_engine(settings, on_round=rows.append, resume=resume, observer=observer or Observer())
    return [json.loads(json.dumps(row_to_dict(row))) for row in rows]


def test_each_step_is_the_discounted_mean_of_gradients_at_the_models_that_were_sent(
    tmp_path: Path,
) -> None:
    versions = Versions()
    rows = run(settings_of(tmp_path / "run", **ALL_EXAMPLES), observer=versions)
    for row, (before_P, after_P) in zip(rows, pairwise(versions.models), strict=True):
        above_P, below = np.zeros(len(before_P)), 0
        for name, version in row["model_versions"].items():
            own = TwoLayers().train_examples(data=None, part=int(name), num_parts=6)
            times = times_of(row["round"] - 1 - version, 0.5)
            above_P += times * gradient_sum(versions.models[version], own, range(NUM_EXAMPLES))
            below += times * NUM_EXAMPLES
        expected_P = before_P.double().numpy() - 0.001 * above_P / below
        # Each gradient is a float32 sum of whole numbers, or of few bits more: 2^-20 is ample.
        assert after_P.numpy() == pytest.approx(expected_P, rel=2**-20, abs=2**-20)
    assert max(row["staleness_max"] for row in rows) >= 3


def test_a_buffer_of_all_clients_gives_the_model_of_synchronous_rounds(tmp_path: Path) -> None:
    buffered = settings_of(tmp_path / "buffered", **{"asynchronous.buffer": 6})
    plain = settings_of(
        tmp_path / "plain", **{"asynchronous.is_on": False, "asynchronous.buffer": None}
    )
    models = Versions(), Versions()
    rows, plain_rows = run(buffered, observer=models[0]), run(plain, observer=models[1])
    keys = ("round", "num_examples", "weight", "loss", "virtual_seconds", "learning_rate")
    for row, plain_row in zip(rows, plain_rows, strict=True):
        assert [row[key] for key in keys] == pytest.approx([plain_row[key] for key in keys])
        assert (row["staleness_max"], plain_row["staleness_max"]) == (0, None)
    assert all(map(torch.equal, models[0].models, models[1].models))


def test_a_run_is_the_same_in_each_bit_when_it_is_repeated(tmp_path: Path) -> None:
    text = "[[absence]]\nshare = 1\nchance = 0.3\nseconds = 0.3\n"
    first, second = (settings_of(tmp_path / name, text, rounds=5) for name in ("first", "second"))
    models = Versions(), Versions()
    rows, again = run(first, observer=models[0]), run(second, observer=models[1])
    keys = ("virtual_seconds", "model_versions", "weight", "loss", "staleness_mean")
    assert [[row[key] for key in keys] for row in rows] == [
        [row[key] for key in keys] for row in again
    ]
    assert all(map(torch.equal, models[0].models, models[1].models))


def test_a_fast_device_waits_for_no_slow_one(tmp_path: Path) -> None:
    rows = run(settings_of(tmp_path / "run"))
    # A slow device takes 8 examples at 10 a second.
    assert sum(row["virtual_seconds"] for row in rows) < 0.8
    assert {name for row in rows for name in row["model_versions"]} == {"2", "3", "4", "5"}


def test_an_answer_that_comes_late_is_in_the_step_and_counts_by_its_staleness(
    tmp_path: Path,
) -> None:
    text = "[[absence]]\ndevices = [5]\nlast_round = 1\nseconds = 0.3\n"
    settings = settings_of(tmp_path / "run", text)
    rows = run(settings)
    late = next(row for row in rows if "5" in row["model_versions"])
    assert late["model_versions"]["5"] == 0
    assert late["staleness_max"] == late["round"] - 1 >= 2
    assert fault_lines(rows, settings) == [("absences", "1 device, replies: 1, too late: 0")]


def test_an_answer_beyond_the_largest_staleness_is_refused_counted_and_used_again(
    tmp_path: Path,
) -> None:
    text = "[[absence]]\ndevices = [5]\nlast_round = 1\nseconds = 0.3\n"
    settings = settings_of(tmp_path / "run", text, **{"asynchronous.max_staleness": 1})
    rows = run(settings)
    refusing = next(row for row in rows if "5" in row["refused"])
    assert refusing["refused"]["5"].startswith("StaleUpdate: 5: its update is of model 0")
    assert refusing["num_stale"] >= 1
    assert fault_lines(rows, settings) == [("absences", "1 device, replies: 1, too late: 1")]


def test_no_example_is_lost_or_counted_twice_over_a_resumed_run(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", rounds=4, out=tmp_path / "run")
    longer = settings.model_copy(update={"rounds": 9})
    rows = [*run(settings), *run(longer, resume=True)]
    assert [row["round"] for row in rows] == [*range(1, 10)]
    saved = load_checkpoint(tmp_path / "run")
    assert saved is not None
    used = dict.fromkeys(map(str, range(6)), 0)
    for row in rows:
        for client in row["clients"]:
            used[client["name"]] += client["num_examples"]
    counted = saved.progress.counted
    for name, number in used.items():
        state = saved.progress.simulated.get(str(1000 + int(name)))
        if state is None:
            assert number == 0
            continue
        walk = state["walk"]
        is_counted = walk["pending_round"] == counted.get(name)
        place = walk["pending_place" if is_counted else "place"]
        assert NUM_EXAMPLES * place["epoch"] + place["offset"] == number


def test_devices_that_vanish_are_planned_again(tmp_path: Path) -> None:
    rows = run(settings_of(tmp_path / "run", "[[dropout]]\nshare = 1\nchance = 0.4\n"))
    assert len(rows) == 8
    assert any("ConnectionLost" in why for row in rows for why in row["refused"].values())


def test_at_most_the_cohort_s_size_is_at_work_at_a_time(tmp_path: Path) -> None:
    rows = run(settings_of(tmp_path / "run", **{"cohort.size": 3}))
    assert {row["num_at_work"] for row in rows} == {1}
    assert {len(row["clients"]) for row in rows} == {2}


def test_quotas_of_a_buffer_sum_to_the_target(tmp_path: Path) -> None:
    chosen = {
        "plan.accumulation_steps": None,
        "plan.micro_batch_size": None,
        "plan.effective_batch_size": 16,
        "rounds": 30,
    }
    rows = run(settings_of(tmp_path / "run", **chosen))
    mean = sum(row["num_examples"] for row in rows) / len(rows)
    assert 8 <= mean <= 32


def test_the_default_buffer_is_three_quarters_of_the_clients_that_are_not_away(
    tmp_path: Path,
) -> None:
    away = "[[absence]]\ndevices = [5]\nlast_round = 1\nseconds = 1000\n"
    settings = settings_of(tmp_path / "run", away, **{"asynchronous.buffer": None, "rounds": 4})
    rows = run(settings)
    # Of six clients, and of five when one has been at work for more than a step.
    assert [len(row["model_versions"]) for row in rows] == [5, 5, 4, 4]


def test_the_files_of_a_run_show_the_model_of_each_update(tmp_path: Path) -> None:
    run(settings_of(tmp_path / "run", rounds=3, out=tmp_path / "run"))
    for number, row in enumerate(read_rows(tmp_path / "run")):
        versions = row["model_versions"].values()
        assert all(0 <= version <= number for version in versions)
        stale = [number - version for version in versions]
        assert (row["staleness_mean"], row["staleness_max"]) == (sum(stale) / 2, max(stale))


def test_modes_that_add_devices_up_are_refused_by_name(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "run", **{"simulation.compute": "fused"})
    with pytest.raises(SettingsError, match="each update arrives by itself"):
        run(settings)
