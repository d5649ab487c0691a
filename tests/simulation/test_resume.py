"""A resumed run equals the uninterrupted run, byte for byte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from headwater.common.errors import CheckpointCorrupt, SettingsError
from headwater.common.model.trained_model import MODEL, read_model
from headwater.common.settings.schema import Settings
from headwater.server.operations.round_log import ROUNDS, read_rows
from headwater.server.rounds import checkpoint
from headwater.server.rounds.checkpoint import FILE
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.open_round import OpenRound
from headwater.simulation.cli import app
from headwater.simulation.run import run_engine

ROUNDS_IN_ALL = 5
# Values that the machine has measured: only these may differ. (The keys of a secure session are
# random, and so is the number of digits of some of what is sent.)
MEASURED = {
    "ring_masked",
    "seconds",
    "seconds_split",
    "updates_per_hour",
    "ended_at",
    "bytes_up",
    "bytes_down",
}

RUNS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": {"name": "adam", "learning_rate": 0.01}},
    "momentum with warmup and schedule": {
        "optimizer": {"name": "sgd", "learning_rate": 0.01, "arguments": {"momentum": 0.9}},
        "schedule": {
            "name": "MultiStepLR",
            "arguments": {"milestones": [1, 2], "gamma": 0.5},
            "warmup_rounds": 2,
        },
    },
    "sampled cohort": {
        "cohort": {"size": 2},
        "optimizer": {"name": "AdamW", "arguments": {"betas": [0.8, 0.9], "amsgrad": True}},
    },
    "muon": {"optimizer": {"name": "muon", "learning_rate": 0.01}},
    "planned": {"plan": {"effective_batch_size": 30}},
    "local steps": {
        "plan": {"accumulation_steps": 2, "micro_batch_size": 2},
        "local": {"steps": 2, "learning_rate": 0.01, "arguments": {"momentum": 0.9}},
    },
    "planned local steps": {"local": {"steps": 3, "batch_size": 2}, "plan": {}},
    "diloco": {"local": {"algorithm": "diloco", "steps": 3, "batch_size": 2}, "plan": {}},
    "what compression left": {"local": {"steps": 2}, "compression": {"up": "int2"}},
    "described on battery": {
        "simulation": {"clients": 12},
        "cohort": {"size": 4},
        "plan": {"effective_batch_size": 40},
    },
    "masked": {"cohort": {"min_clients": 3}, "secure": {"aggregation": "semi-honest"}},
    "tested on devices": {"evaluation": {"on_devices": True}},
    "own parameters on the devices": {
        "model": {"local_parameters": "1.*"},
        "evaluation": {"on_devices": True},
    },
}


def chosen(out: Path, rounds: int, run: str) -> Settings:
    return Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": rounds,
            "threads": 1,
            "out": out,
            "simulation": {"clients": 3},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "optimizer": {"name": "sgd", "learning_rate": 0.01},
            **RUNS[run],
        }
    )


def simulate(settings: Settings, *, resume: bool = False) -> None:
    run_engine(settings, on_round=lambda _: None, resume=resume)


def comparable_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows without the values that the machine has measured."""
    return [
        {name: value for name, value in row.items() if name not in MEASURED}
        for row in read_rows(out)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_run_resumed_after_every_round_equals_the_uninterrupted_one(
    tmp_path: Path, run: str
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    simulate(chosen(unbroken, ROUNDS_IN_ALL, run))
    for rounds in range(1, ROUNDS_IN_ALL + 1):
        simulate(chosen(broken, rounds, run), resume=rounds > 1)
    assert (broken / MODEL).read_bytes() == (unbroken / MODEL).read_bytes()
    assert comparable_rows(broken) == comparable_rows(unbroken)
    assert len(comparable_rows(broken)) == ROUNDS_IN_ALL


def test_rows_after_the_last_checkpoint_are_computed_again(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    simulate(chosen(unbroken, 3, "adam"))
    simulate(chosen(broken, 2, "adam"))
    with (broken / ROUNDS).open("a") as file:
        file.write(json.dumps({"round": 3, "clients": []}) + '\n{"round": 4, "cli')
    simulate(chosen(broken, 3, "adam"), resume=True)
    assert comparable_rows(broken) == comparable_rows(unbroken)


def test_resuming_without_a_checkpoint_starts_a_run(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, 1, "sgd"), resume=True)
    assert len(comparable_rows(tmp_path)) == 1


def test_a_folder_of_another_run_is_refused_and_not_changed(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, 1, "sgd"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(SettingsError, match="already holds a run of"):
        simulate(chosen(tmp_path, 2, "sgd"))
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_a_corrupt_checkpoint_is_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, 1, "sgd"))
    content = bytearray((tmp_path / FILE).read_bytes())
    content[-1] ^= 1
    (tmp_path / FILE).write_bytes(content)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(CheckpointCorrupt):
        simulate(chosen(tmp_path, 2, "sgd"), resume=True)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


# Behind so many rounds it stops in the middle of the next one, and says so by the file "held".
HELD_TASK = """
import os, time
from pathlib import Path
from headwater.server.operations.round_log import read_rows
from tests.tasks import TwoLayers

class Held(TwoLayers):
    def loss_sum(self, model, batch):
        while "IS_HELD" in os.environ and len(read_rows(Path({out!r}))) == {rounds}:
            Path({held!r}).touch()
            time.sleep(0.01)
        return super().loss_sum(model, batch)
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    killed, unbroken, held = (tmp_path / name for name in ("killed", "unbroken", "held"))
    task = HELD_TASK.format(out=str(killed), rounds=3, held=str(held))
    (tmp_path / "held.py").write_text(task)

    def settings(out: Path) -> Settings:
        return chosen(out, 9, "adam").model_copy(update={"task": f"{tmp_path}/held.py:Held"})

    config = tmp_path / "settings.toml"
    config.write_text(settings(killed).to_toml())
    command = [sys.executable, "-m", "headwater.simulation", "--config", str(config)]
    environment = {**os.environ, "IS_HELD": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not held.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert len(read_rows(killed)) == 3
    simulate(settings(killed), resume=True)
    simulate(settings(unbroken))
    assert (killed / MODEL).read_bytes() == (unbroken / MODEL).read_bytes()
    assert comparable_rows(killed) == comparable_rows(unbroken)


VERSION_2 = Path(__file__).parent / "version_2"
"""A masked run of two rounds, int8 down and its best model followed, as version 2 stored it."""


def test_a_checkpoint_of_version_2_is_gone_on_with(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    config = str(VERSION_2 / "settings.toml")
    done = CliRunner().invoke(app, ["--config", config, "--rounds", "4", "--out", str(whole)])
    assert done.exit_code == 0, done.output
    resumed = tmp_path / "resumed"
    shutil.copytree(VERSION_2, resumed)
    with safe_open(resumed / "checkpoint.safetensors", framework="pt") as file:
        held = file.get_tensor("broadcast")
    saved = checkpoint.load(resumed)
    assert saved is not None
    assert saved.features.keys() == {"secagg", "selection", "compression"}
    assert torch.equal(saved.features["compression"]["held"], held)
    done = CliRunner().invoke(app, ["--out", str(resumed), "--resume", "--rounds", "4"])
    assert done.exit_code == 0, done.output
    now = checkpoint.load(resumed)
    assert now is not None
    one, other = load_file(whole / MODEL), load_file(resumed / MODEL)
    for name in one:
        torch.testing.assert_close(one[name], other[name])  # another machine rounds otherwise


def test_a_checkpoint_with_a_feature_that_is_not_here_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    shutil.copytree(VERSION_2, tmp_path / "run")
    saved = checkpoint.load(tmp_path / "run")
    assert saved is not None
    saved.progress.features["scaffold"] = {"rounds": 2}
    checkpoint.save(
        tmp_path / "run",
        saved.progress,
        image_U8=saved.image_U8,
        optimizer=saved.optimizer,
        features=saved.features,
    )
    done = CliRunner().invoke(app, ["--out", str(tmp_path / "run"), "--resume", "--rounds", "4"])
    assert done.exit_code != 0
    assert "scaffold" in done.output


AWAY = """
[[device]]
count = 8
examples_per_second = 50
memory_bytes = 400_000_000
upload_bytes_per_second = 1_000_000
on_battery = 0.5
availability = 0.6
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["in-process", "grpc"])
@pytest.mark.parametrize("masks", [{}, {"aggregation": "semi-honest"}], ids=["plain", "masked"])
@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_device_that_was_away_describes_itself_anew_and_no_other(
    tmp_path: Path, engine: str, masks: dict[str, Any], cut: int
) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(AWAY)
    runs = []
    for name in ("whole", "cut"):
        settings = chosen(tmp_path / name, 7, "described on battery")
        virtual = {
            "clients": 8,
            "fleet": fleet,
            "engine": engine if name == "cut" else "in-process",
        }
        changed = {"simulation": virtual, "secure": masks, "cohort": {"size": 4, "min_clients": 3}}
        runs.append(Settings.model_validate(settings.model_dump(exclude_unset=True) | changed))
    simulate(runs[0])
    simulate(runs[1].model_copy(update={"rounds": cut}))
    simulate(runs[1], resume=True)
    assert comparable_rows(tmp_path / "cut") == comparable_rows(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["in-process", "grpc"])
def test_devices_are_described_as_they_were_by_whatever_engine_goes_on(
    tmp_path: Path, engine: str
) -> None:
    """Most of them have had no turn before, and are known by their first description alone."""
    whole, cut = (chosen(tmp_path / name, 3, "described on battery") for name in ("whole", "cut"))
    other = cut.simulation.model_copy(update={"engine": engine})
    simulate(whole)
    simulate(cut.model_copy(update={"rounds": 1, "simulation": other}))
    other = cut.simulation.model_copy(update={"engine": "grpc"})
    simulate(cut.model_copy(update={"simulation": other}), resume=True)
    told = [[row["clients"] for row in read_rows(tmp_path / name)] for name in ("whole", "cut")]
    plans = [[one["plan"] for row in rows for one in row] for rows in told]
    assert plans[0] == plans[1]
    models = [(tmp_path / name / MODEL).read_bytes() for name in ("whole", "cut")]
    assert models[0] == models[1]


@pytest.mark.parametrize("run", ["own parameters on the devices", "what compression left"])
def test_what_devices_keep_in_files_is_not_begun_without_on_another_engine(
    tmp_path: Path, run: str
) -> None:
    settings = chosen(tmp_path, 1, run)
    simulate(settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = settings.simulation.model_copy(update={"engine": "grpc"})
    with pytest.raises(SettingsError, match="keep files of the engine in-process") as refused:
        simulate(settings.model_copy(update={"simulation": other, "rounds": 2}), resume=True)
    assert refused.value.remedy == "resume with --engine in-process"
    assert (tmp_path / FILE).read_bytes() == before[tmp_path / FILE]


class EndsInRound(Observer):
    """Ends the run in the middle of a round."""

    def __init__(self, number: int) -> None:
        self._number = number

    def closed(self, opened: OpenRound) -> None:
        if next(iter(opened.plans.values())).round == self._number:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "run",
    [
        "momentum with warmup and schedule",
        "planned",
        "diloco",
        "own parameters on the devices",
        "what compression left",
    ],
)
def test_a_run_that_ends_rounds_after_its_checkpoint_runs_them_again_to_the_bit(
    tmp_path: Path, run: str
) -> None:
    """Checkpoints are seconds apart: the first round has one, the next four take no second."""
    simulate(chosen(tmp_path / "whole", ROUNDS_IN_ALL, run))
    settings = chosen(tmp_path / "ended", ROUNDS_IN_ALL, run)
    with pytest.raises(KeyboardInterrupt):
        run_engine(settings, on_round=lambda _: None, resume=False, observer=EndsInRound(5))
    assert checkpoint.saved_round(tmp_path / "ended") in range(1, 5)
    assert [row["round"] for row in read_rows(tmp_path / "ended")] == [1, 2, 3, 4]
    assert read_model(tmp_path / "ended" / MODEL)[0].rounds == 4
    simulate(settings, resume=True)
    assert comparable_rows(tmp_path / "ended") == comparable_rows(tmp_path / "whole")
    models = [(tmp_path / name / MODEL).read_bytes() for name in ("ended", "whole")]
    assert models[0] == models[1]
