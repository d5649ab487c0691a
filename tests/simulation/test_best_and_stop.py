"""``--best`` and ``--stop-when`` in whole runs: what is kept, where a run ends, and resuming."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.common.errors import SettingsError, UnknownMetric
from headwater.common.model.trained_model import BEST, MODEL, read_model
from headwater.common.settings.schema import Settings
from headwater.server.operations.progress import print_result, show_progress
from headwater.server.operations.round_log import read_rows
from headwater.simulation.run import run_engine

PEAK = 5


class Walk:
    """One number, which goes down by one in each round; the metric is highest in round PEAK."""

    def new_model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.ones(4))

    def test_examples(self) -> TensorDataset:
        return TensorDataset(torch.ones(2))

    def loss_sum(
        self, model: nn.Module, batch: list[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        number, count = model.get_parameter("weight").sum(), len(batch[0])
        return number * count, count, {"height": -((number + PEAK) ** 2) * count}


class Untested(Walk):
    test_examples = None  # type: ignore[assignment] # as a task without the method


def chosen(out: Path | None, *, task: str = "Walk", rounds: int = 20, **follow: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": f"{__file__}:{task}",
            "rounds": rounds,
            "threads": 1,
            "out": out,
            "check_task": False,
            "simulation": {"clients": 2},
            "plan": {"accumulation_steps": 1, "micro_batch_size": 4},
            "optimizer": {"name": "sgd", "learning_rate": 1.0},
            "evaluation": follow,
        }
    )


def simulate(settings: Settings, *, resume: bool = False) -> None:
    run_engine(settings, on_round=lambda _: None, resume=resume)


def num_rounds(out: Path) -> int:
    return int(read_rows(out)[-1]["round"])


def number_in(file: Path) -> float:
    return float(read_model(file)[1]["weight"])


def test_the_best_model_is_that_of_the_best_round_and_says_so(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=8, best="max:height"))
    assert number_in(tmp_path / BEST) == -PEAK
    assert number_in(tmp_path / MODEL) == -8
    record, _ = read_model(tmp_path / BEST)
    assert record.best == {"metric": "test_height", "value": 0.0, "round": PEAK}
    assert record.rounds == PEAK
    assert read_model(tmp_path / MODEL)[0].best is None
    loaded = headwater.load_model(tmp_path / BEST, Walk())
    assert loaded.get_parameter("weight").tolist() == [[-PEAK]]


def test_the_result_says_which_round_is_kept_and_which_way_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = chosen(tmp_path, rounds=7, best="min:height")
    simulate(settings)
    print_result(settings)
    assert "best.safetensors (round 1: the lowest test_height, -16)" in capsys.readouterr().out


def test_a_run_ends_in_order_when_the_metric_no_longer_improves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        simulate(chosen(tmp_path, stop_when="max:height", patience=3))
    assert num_rounds(tmp_path) == PEAK + 3
    assert number_in(tmp_path / MODEL) == -(PEAK + 3)
    [message] = [each for each in caplog.messages if "stopped" in each]
    assert "after round 8 of 20: test_height has not improved in 3 evaluations" in message
    assert "in round 5" in message


def test_patience_counts_evaluations_and_not_rounds(tmp_path: Path) -> None:
    """The heights of rounds 2, 4, 6 and 8 are -9, -1, -1 and -9: two evaluations bring nothing."""
    simulate(
        chosen(tmp_path, stop_when="max:height", patience=2, best="max:height", every_rounds=2)
    )
    assert num_rounds(tmp_path) == 8
    assert number_in(tmp_path / BEST) == -4


def test_the_training_loss_can_be_followed_without_test_examples(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, task="Untested", stop_when="max:train_loss", patience=4))
    assert num_rounds(tmp_path) == 5


def test_a_run_resumed_after_every_round_keeps_the_best_model_and_stops_at_the_same_round(
    tmp_path: Path,
) -> None:
    follow: dict[str, Any] = {"best": "max:height", "stop_when": "max:height", "patience": 3}
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    simulate(chosen(unbroken, rounds=9, **follow))
    for rounds in range(1, 10):
        simulate(chosen(broken, rounds=rounds, **follow), resume=rounds > 1)
    assert num_rounds(broken) == num_rounds(unbroken) == PEAK + 3
    assert (broken / BEST).read_bytes() == (unbroken / BEST).read_bytes()


def test_a_stopped_run_does_not_train_on_when_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(chosen(tmp_path, stop_when="max:height", patience=3))
    before = (tmp_path / MODEL).read_bytes()
    caplog.clear()
    simulate(chosen(tmp_path, stop_when="max:height", patience=3), resume=True)
    assert "a larger --patience with --resume goes on" in caplog.text
    assert (tmp_path / MODEL).read_bytes() == before
    simulate(chosen(tmp_path, stop_when="max:height", patience=4), resume=True)
    assert num_rounds(tmp_path) == PEAK + 4


def test_a_best_model_that_a_kill_kept_from_the_disk_is_written_on_resume(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=PEAK, best="max:height"))
    (tmp_path / BEST).unlink()  # as if the kill came right after the checkpoint
    simulate(chosen(tmp_path, rounds=PEAK + 1, best="max:height"), resume=True)
    assert number_in(tmp_path / BEST) == -PEAK


@pytest.mark.parametrize("follow", [{"best": "max:depth"}, {"stop_when": "min:depth"}])
def test_a_metric_that_the_task_does_not_have_is_refused_before_the_first_round(
    tmp_path: Path, follow: dict[str, Any]
) -> None:
    with pytest.raises(UnknownMetric, match="this run has test_height, test_loss"):
        simulate(chosen(tmp_path, **follow))
    assert not list(tmp_path.iterdir())


def test_a_metric_on_held_out_examples_that_never_appears_lists_those_that_do(
    tmp_path: Path,
) -> None:
    settings = chosen(
        tmp_path, task="Untested", best="max:depth", on_devices=True, held_out_fraction=0.5
    )
    with pytest.raises(UnknownMetric, match="held_out_height, held_out_loss, train_height"):
        simulate(settings)


def test_a_round_in_which_no_device_tested_is_no_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenth of four examples is none."""
    simulate(chosen(tmp_path, task="Untested", rounds=2, best="max:height", on_devices=True))
    assert not (tmp_path / BEST).exists()
    assert "round 2: no device has tested the model" in caplog.text


def test_a_run_without_evaluation_names_the_flag_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--best max:height needs an evaluation") as caught:
        simulate(chosen(tmp_path, task="Untested", best="max:height"))
    assert "--evaluate-on-devices" in caught.value.remedy


def test_a_best_model_needs_a_folder() -> None:
    with pytest.raises(SettingsError, match="--best keeps a file"):
        simulate(chosen(None, best="max:height"))


def test_the_last_round_of_a_stopped_run_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    settings = chosen(None, stop_when="max:height", patience=3)
    with show_progress(settings) as (on_round, observer):
        run_engine(settings, on_round=on_round, resume=False, observer=observer)
    assert f"round {PEAK + 3:>2} of 20" in capsys.readouterr().out
