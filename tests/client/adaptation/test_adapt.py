"""A whole adaptation: which examples are tested, what is kept and what is refused."""

from __future__ import annotations

import json
import logging
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater
from headwater.client.adaptation.adapt import Adapted
from headwater.client.adaptation.command import report_lines
from headwater.client.flower.state_file import local_file
from headwater.client.training.sampler import held_out_positions
from headwater.common.errors import (
    LocalParametersMissing,
    MissingData,
    ModelMismatch,
    OutOfMemory,
    SettingsError,
    TooFewExamples,
    UnknownTask,
)
from headwater.common.model.local_state import LocalState
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.model.trained_model import MODEL, load_model
from headwater.common.settings.schema import Settings
from headwater.server.rounds.model_files import save_adapter, save_model

NAME = "pi"
SEED = 11


class Shifted:
    """A linear model; a device's targets are shifted by ``shift`` from those of the run."""

    num_examples, shift, num_hidden = 60, 2.0, 4

    def new_model(self) -> nn.Module:
        hidden = self.num_hidden
        return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        if data is not None and not data.exists():
            raise FileNotFoundError(data)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.num_examples, 3, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) + self.shift)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        inputs, targets = batch
        outputs = model(inputs)
        loss = functional.mse_loss(outputs, targets, reduction="sum")
        return loss, len(inputs), {"mae": (outputs - targets).abs().sum()}


class Exact(Shifted):
    """The common model has no error, so that each step makes it worse."""

    num_examples, num_hidden = 40, 64

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        inputs = torch.randn(self.num_examples, 3, generator=generator)
        return TensorDataset(inputs, torch.zeros(self.num_examples, 1))

    def new_model(self) -> nn.Module:
        model = super().new_model()
        with torch.no_grad():
            for one in model.parameters():
                one.zero_()
        return model


def released(folder: Path, task: Any, **changes: Any) -> tuple[Path, ModelImage]:
    """Return the file of a model as a run writes it, and the model."""
    settings = Settings.model_validate({"seed": SEED, **changes})
    chosen = settings.model
    image = build_model(task, seed=SEED, local_parameters=chosen.local_parameters)
    folder.mkdir(exist_ok=True)
    save_model(folder / MODEL, image, settings, round_number=4)
    return folder / MODEL, image


HELD_OUT = {"on_devices": True, "held_out_fraction": 0.25}


def adapted(file: Path, task: Any, **given: Any) -> Adapted:
    chosen: dict[str, Any] = {
        "name": NAME,
        "progress": False,
        "learning_rate": 0.05,
        "epochs": 6,
    } | given
    return headwater.adapt(file, task, **chosen)


def test_the_run_s_held_out_examples_are_tested(tmp_path: Path) -> None:
    task = Shifted()
    file, image = released(tmp_path, task, evaluation=HELD_OUT)
    found = adapted(file, task)
    positions = held_out_positions(60, fraction=0.25, run_seed=SEED, name=NAME)
    batch = task.train_examples(data=None, part=0, num_parts=1)[list(positions)]
    with torch.no_grad():
        loss, weight, sums = task.loss_sum(image.model, batch)
        other, _, _ = task.loss_sum(found.model, batch)
    assert found.is_held_out_by_run
    assert found.found.num_examples == weight == 15
    assert found.found.loss == pytest.approx(loss.item() / weight, rel=1e-5)
    assert found.found.metrics["mae"] == pytest.approx(sums["mae"].item() / weight, rel=1e-5)
    assert found.found.other_loss == pytest.approx(other.item() / weight, rel=1e-5)


def test_without_held_out_examples_of_the_run_they_are_split_anew_and_that_is_said(
    tmp_path: Path,
) -> None:
    task = Shifted()
    file, _ = released(tmp_path, task)
    found = adapted(file, task)
    assert not found.is_held_out_by_run
    assert found.found.num_examples == 12
    assert any("may have been trained on them" in line for line in report_lines(found))


def test_the_better_model_is_written_and_loads_as_a_run_s(tmp_path: Path) -> None:
    task = Shifted()
    file, _ = released(tmp_path / "run", task, evaluation=HELD_OUT)
    found = adapted(file, task, out=tmp_path / "mine")
    assert found.is_adapted
    assert not found.found.is_within_chance
    assert found.file == tmp_path / "mine" / MODEL
    loaded = load_model(tmp_path / "mine", task).state_dict()
    assert all(torch.equal(loaded[name], one) for name, one in found.model.state_dict().items())
    with safe_open(found.file, framework="pt") as opened:
        told = json.loads(opened.metadata()["adaptation"])
    assert told == found.to_json()
    assert told["kept"] == "fine-tuned"


def test_the_common_model_is_kept_where_fine_tuning_does_not_help(tmp_path: Path) -> None:
    task = Exact()
    file, image = released(tmp_path / "run", task, evaluation=HELD_OUT)
    found = adapted(file, task, out=tmp_path / "mine")
    assert not found.is_adapted
    kept = load_file(tmp_path / "mine" / MODEL)
    assert all(torch.equal(kept[name], one) for name, one in image.model.state_dict().items())
    assert report_lines(found)[0].startswith("kept: the common model.")


def test_the_common_model_s_file_is_untouched(tmp_path: Path) -> None:
    task = Shifted()
    file, _ = released(tmp_path / "run", task)
    before = file.read_bytes(), file.stat().st_mtime_ns
    adapted(file, task, out=tmp_path / "mine")
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == [MODEL]


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    task = Shifted()
    file, _ = released(tmp_path / "run", task, evaluation=HELD_OUT)
    for out in ("first", "second"):
        adapted(file, task, out=tmp_path / out, seed=3)
    first, second = ((tmp_path / out / MODEL).read_bytes() for out in ("first", "second"))
    assert first == second


@pytest.mark.parametrize("held_out", [HELD_OUT, {}], ids=["of the run", "anew"])
def test_another_seed_is_tested_on_the_same_examples(
    held_out: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise a model that is tuned further would be tested on what it was trained on."""
    task = Shifted()
    file, _ = released(tmp_path, task, evaluation=held_out)
    first, second = (adapted(file, task, seed=seed).found for seed in (1, 2))
    assert first.loss == second.loss
    assert first.other_loss != second.other_loss


def test_folder_and_file_are_private_to_their_user(tmp_path: Path) -> None:
    file, _ = released(tmp_path / "run", Shifted())
    adapted(file, Shifted(), out=tmp_path / "mine")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "mine" / MODEL).stat().st_mode) == 0o600


def test_nothing_goes_over_a_network_and_nothing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was asked for")

    file, _ = released(tmp_path / "run", Shifted())
    monkeypatch.setattr(socket, "socket", refuse)
    with caplog.at_level(logging.DEBUG):
        adapted(file, Shifted(), out=tmp_path / "mine")
    assert not caplog.records


def test_an_earlier_result_is_replaced_and_can_be_tuned_further(tmp_path: Path) -> None:
    task = Shifted()
    file, _ = released(tmp_path / "run", task, evaluation=HELD_OUT)
    first = adapted(file, task, out=tmp_path / "mine", epochs=1)
    second = adapted(tmp_path / "mine", task, out=tmp_path / "more")
    assert second.found.loss == pytest.approx(first.found.other_loss)
    adapted(file, task, out=tmp_path / "mine")


REFUSED: dict[str, Callable[[Path], object]] = {
    "a run's folder": lambda out: (out / "rounds.jsonl").touch(),
    "another model": lambda out: save_file({"a": torch.ones(1)}, out / MODEL),
    "no model": lambda out: (out / MODEL).write_text("notes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_with_something_else_is_refused(case: str, tmp_path: Path) -> None:
    file, _ = released(tmp_path / "run", Shifted())
    out = tmp_path / "mine"
    out.mkdir()
    REFUSED[case](out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SettingsError, match="is in use"):
        adapted(file, Shifted(), out=out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_folder_of_the_model_that_it_starts_from_is_refused(tmp_path: Path) -> None:
    file, _ = released(tmp_path / "run", Shifted())
    adapted(file, Shifted(), out=tmp_path / "mine")
    for folder in (tmp_path / "run", tmp_path / "mine"):
        with pytest.raises(SettingsError, match="stays as it is"):
            adapted(folder, Shifted(), out=folder)


def test_a_folder_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    file, _ = released(tmp_path / "run", Shifted())
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match="cannot be written") as caught:
        adapted(file, Shifted(), out=tmp_path / "file" / "mine", epochs=10**6)
    assert "may write" in caught.value.remedy


def test_another_task_s_model_is_refused(tmp_path: Path) -> None:
    class Wider(Shifted):
        num_hidden = 5

    file, _ = released(tmp_path, Shifted())
    with pytest.raises(ModelMismatch, match="does not fit the task"):
        adapted(file, Wider())


def test_a_file_that_names_no_task_needs_one(tmp_path: Path) -> None:
    file, _ = released(tmp_path, Shifted())
    with pytest.raises(UnknownTask):
        adapted(file, None)


@pytest.mark.parametrize(("number", "fraction"), [(6, 0.1), (6, 0.9), (5, 0.25)])
def test_too_few_examples_are_refused(number: int, fraction: float, tmp_path: Path) -> None:
    task = Shifted()
    task.num_examples = number
    held_out = {"on_devices": True, "held_out_fraction": fraction}
    file, _ = released(tmp_path, task, evaluation=held_out)
    with pytest.raises(TooFewExamples, match="expected at least 5 and 2") as caught:
        adapted(file, task, out=tmp_path / "mine")
    assert "common model" in caught.value.remedy
    assert not (tmp_path / "mine").exists()


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file, _ = released(tmp_path, Shifted())
    with pytest.raises(MissingData):
        adapted(file, Shifted(), data=tmp_path / "none.csv")


@pytest.mark.parametrize(
    "told",
    [
        {"on_devices": True, "held_out_fraction": 2},
        {"on_devices": True, "held_out": "none"},
        {"on_devices": True, "more": 1},
        [1],
    ],
    ids=str,
)
def test_a_file_with_a_malformed_share_is_refused(told: Any, tmp_path: Path) -> None:
    task = Shifted()
    file, _ = released(tmp_path, task)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    settings = json.loads(metadata["settings"]) | {"evaluation": told}
    save_file(load_file(file), file, metadata | {"settings": json.dumps(settings)})
    with pytest.raises(SettingsError, match="held-out examples"):
        adapted(file, task)


def test_examples_without_a_finite_loss_are_left_out_and_counted(tmp_path: Path) -> None:
    class Holes(Shifted):
        def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
            inputs, targets = super().train_examples(data=None, part=0, num_parts=1).tensors
            inputs[::10] = torch.nan
            return TensorDataset(inputs, targets)

    file, _ = released(tmp_path, Holes())
    found = adapted(file, Holes())
    assert found.num_unusable == 6
    assert found.is_adapted
    assert any("6 examples" in line for line in report_lines(found))


# Parameters of the device's own, and adapters.

HEAD = "2.*"


def own_parameters(folder: Path, image: ModelImage, *, run: int = 1, name: str = NAME) -> Path:
    """Write the parameters that a device keeps, all of them 1."""
    file = folder / f"{name}-{run}.local.safetensors"
    values_L = torch.ones_like(image.local_L)
    local_file(file).write(LocalState(values_L=values_L, round=4), image.layout)
    return file


def with_own(tmp_path: Path) -> tuple[Path, ModelImage]:
    model = {"local_parameters": HEAD}
    return released(tmp_path / "run", Shifted(), model=model, evaluation=HELD_OUT)


def test_it_starts_from_the_parameters_that_stayed_on_the_device(tmp_path: Path) -> None:
    file, image = with_own(tmp_path)
    states = tmp_path / "state"
    states.mkdir()
    own_parameters(states, image)
    own_parameters(states, image, run=2, name="other")
    found = adapted(
        file, Shifted(), state=states, only=HEAD, learning_rate=1e-9, out=tmp_path / "mine"
    )
    kept = load_model(tmp_path / "mine", Shifted()).state_dict()
    torch.testing.assert_close(kept["2.weight"], torch.ones(1, 4), rtol=0, atol=1e-6)
    assert torch.equal(kept["0.weight"], image.model.state_dict()["0.weight"])
    assert found.training.stop_losses


def test_several_files_of_the_device_s_own_need_a_choice(tmp_path: Path) -> None:
    file, image = with_own(tmp_path)
    first, _ = (own_parameters(tmp_path, image, run=run) for run in (1, 2))
    with pytest.raises(LocalParametersMissing, match="2 files") as caught:
        adapted(file, Shifted(), state=tmp_path)
    assert "--local FILE" in caught.value.remedy
    assert adapted(file, Shifted(), state=tmp_path, local=first).found.num_examples == 15


def test_no_file_of_the_device_s_own_is_named(tmp_path: Path) -> None:
    file, _ = with_own(tmp_path)
    with pytest.raises(LocalParametersMissing, match="no file of the device pi"):
        adapted(file, Shifted(), state=tmp_path)


class FrozenBody(Shifted):
    """A model of which the head trains alone."""

    def new_model(self) -> nn.Module:
        model = super().new_model()
        assert isinstance(model, nn.Sequential)
        model[0].requires_grad_(False)
        return model


def test_memory_that_ends_in_the_training_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    file, _ = released(tmp_path / "run", Shifted())
    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(OutOfMemory, match="the optimizer's state") as caught:
        adapted(file, Shifted(), out=tmp_path / "mine")
    assert "--only" in caught.value.remedy
    assert not [*(tmp_path / "mine").iterdir()]


def test_an_adapter_stays_an_adapter(tmp_path: Path) -> None:
    task = FrozenBody()
    _, image = released(tmp_path / "run", task, evaluation=HELD_OUT)
    settings = Settings.model_validate({"seed": SEED, "evaluation": HELD_OUT})
    save_adapter(tmp_path / "run", image, settings, round_number=4)
    found = adapted(tmp_path / "run" / "adapter.safetensors", task, out=tmp_path / "mine")
    assert found.is_adapted
    assert load_file(tmp_path / "mine" / MODEL).keys() == {"2.weight", "2.bias"}
    loaded = load_model(tmp_path / "mine", task).state_dict()
    assert all(torch.equal(loaded[name], one) for name, one in found.model.state_dict().items())
