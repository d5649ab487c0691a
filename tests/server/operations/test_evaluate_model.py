"""``headwater-server evaluate`` on saved models: the law of sums, its two forms, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from headwater.client.cli import app as client_app
from headwater.common.errors import EmptyDataset
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import BEST, MODEL
from headwater.common.settings.schema import Settings
from headwater.server.cli import app
from headwater.server.rounds.model_files import save_model


class Doubled:
    """One weight; a data file holds numbers, of which each should become its double."""

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        assert data is not None
        numbers = [float(line) for line in data.read_text().split()]
        return TensorDataset(torch.tensor(numbers))

    def loss_sum(
        self, model: nn.Module, batch: list[Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        (numbers,) = batch
        errors = (model(numbers[:, None]).squeeze(1) - 2 * numbers).abs()
        return errors.sum(), len(numbers), {"exact": (errors == 0).sum()}


class WithTest(Doubled):
    def test_examples(self) -> TensorDataset:
        return TensorDataset(torch.tensor([4.0]))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run's folder: its last model multiplies by one, its best one by two."""
    settings = Settings(task="somewhere/else.py:Doubled")
    for name, value, number in ((MODEL, 1.0, 7), (BEST, 2.0, 5)):
        image = build_model(Doubled(), seed=0)
        image.values_P.fill_(value)
        save_model(tmp_path / name, image, settings, round_number=number)
    (tmp_path / "a.txt").write_text("1 2 3")
    (tmp_path / "b.txt").write_text("0")
    return tmp_path


def evaluated(folder: Path, *arguments: str | Path, task: type = Doubled) -> Result:
    spec = f"{__file__}:{task.__name__}"
    given = [*map(str, arguments)]
    return CliRunner().invoke(app, ["evaluate", "--out", str(folder), "--task", spec, *given])


def test_a_pattern_names_several_files_and_one_without_an_example_is_left_out(
    run_folder: Path,
) -> None:
    (run_folder / "empty.txt").write_text("")
    done = evaluated(run_folder, "--data", run_folder / "*.txt", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    names = [str(run_folder / name) for name in ("a.txt", "b.txt", "empty.txt")]
    assert [row["data"] for row in found["results"]] == [*names[:2], "all"]
    assert found["empty"] == names[2:]
    said = "".join(evaluated(run_folder, "--data", run_folder / "*.txt").stdout.split())
    assert f"leftout,asthereisnoexampleinit:{names[2]}" in said


def test_data_without_any_example_are_refused(run_folder: Path) -> None:
    (run_folder / "empty.txt").write_text("")
    done = evaluated(run_folder, "--data", run_folder / "empty.txt")
    assert done.exit_code == 2
    assert isinstance(done.exception, EmptyDataset) or "EmptyDataset" in done.output


def test_the_row_of_all_data_divides_the_sums_once(run_folder: Path) -> None:
    paths = [run_folder / "a.txt", run_folder / "b.txt"]
    done = evaluated(run_folder, "--data", paths[0], "--data", paths[1], "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["round"] == 7
    rows = [
        (row["data"], row["num_examples"], row["loss"], row["metrics"]) for row in found["results"]
    ]
    assert rows == [
        (str(paths[0]), 3, (1 + 2 + 3) / 3, {"exact": 0.0}),
        (str(paths[1]), 1, 0.0, {"exact": 1.0}),
        ("all", 4, (1 + 2 + 3) / 4, {"exact": 1 / 4}),
    ]


def test_the_best_model_can_be_tested(run_folder: Path) -> None:
    done = evaluated(run_folder, "--best", "--data", run_folder / "a.txt", "--json")
    found = json.loads(done.stdout)
    assert (found["round"], found["results"][0]["loss"]) == (5, 0.0)


def test_without_data_the_task_s_test_examples_are_taken(run_folder: Path) -> None:
    done = evaluated(run_folder, task=WithTest)
    assert "after round 7" in done.stdout
    assert "test examples" in done.stdout
    assert "4.0000" in done.stdout


def test_a_loss_that_is_no_number_is_null(run_folder: Path) -> None:
    (run_folder / "a.txt").write_text("nan")
    done = evaluated(run_folder, "--data", run_folder / "a.txt", "--json")
    assert json.loads(done.stdout)["results"][0]["loss"] is None


def test_rows_with_nan_are_left_out_and_counted_with_the_reason(run_folder: Path) -> None:
    (run_folder / "a.txt").write_text("1 nan 3 nan")
    done = evaluated(run_folder, "--data", run_folder / "a.txt", "--data", run_folder / "b.txt")
    assert "2 left out of" in done.stdout
    assert "2: its element 0 has a NaN (position 1, 3)" in done.stdout
    done = evaluated(run_folder, "--data", run_folder / "a.txt", "--json")
    (row,) = json.loads(done.stdout)["results"]
    assert (row["num_examples"], row["num_left_out"], row["loss"]) == (2, 2, (1 + 3) / 2)


def test_data_with_no_finite_row_has_no_loss_and_says_why(run_folder: Path) -> None:
    (run_folder / "a.txt").write_text("nan")
    done = evaluated(run_folder, "--data", run_folder / "a.txt")
    assert "1: its element 0 has a NaN (position 0)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        ([], "MissingData", 2),
        (["--data", "nowhere.txt"], "MissingData", 2),
        (["--data", "empty.txt"], "EmptyDataset", 2),
        (["--data", "words.txt"], "MissingData", 2),
        (["--task", "nowhere.py:Task"], "UnknownTask", 2),
        (["--task", "tests/tasks.py:TwoLayers", "--data", "a.txt"], "ModelMismatch", 1),
    ],
)
def test_bad_input_ends_with_a_named_error(
    run_folder: Path, arguments: list[str], code: str, status: int
) -> None:
    (run_folder / "empty.txt").write_text("")
    (run_folder / "words.txt").write_text("one two")
    given = [str(run_folder / each) if each.endswith(".txt") else each for each in arguments]
    done = evaluated(run_folder, *given)
    assert done.exit_code == status
    assert f"{code}: " in done.stderr


def test_a_model_of_a_task_elsewhere_asks_for_the_task(run_folder: Path) -> None:
    settings = Settings(task="/elsewhere/my_task.py:MyTask")
    save_model(run_folder / MODEL, build_model(Doubled(), seed=0), settings, round_number=1)
    done = CliRunner().invoke(app, ["evaluate", "--out", str(run_folder)])
    assert done.exit_code == 2
    assert "name it yourself" in done.stderr


@pytest.mark.parametrize("name", [MODEL, BEST])
def test_a_folder_without_the_model_is_named(tmp_path: Path, name: str) -> None:
    done = evaluated(tmp_path, *(["--best"] if name == BEST else []))
    assert done.exit_code == 2
    assert name in done.stderr


def test_a_path_that_is_missing_is_named_in_the_words_of_the_client_s_check(
    run_folder: Path,
) -> None:
    missing = run_folder / "nowhere.txt"
    given = ["--task", f"{__file__}:Doubled", "--data", str(missing)]
    lines = [
        CliRunner().invoke(client_app, ["check", *given]).stderr,
        evaluated(run_folder, "--data", missing).stderr,
    ]
    assert lines[0] == lines[1]
    assert f"MissingData: --data: {missing} does not exist" in lines[0]
