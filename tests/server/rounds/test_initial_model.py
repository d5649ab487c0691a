"""A run starts from the weights of a run, of plain PyTorch, of Lightning or of save_pretrained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headwater.common.errors import ModelMismatch, SettingsError, TaskError
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings.sources import load
from headwater.common.user_code.run_scope import run_scope
from headwater.server.rounds.initial_model import load_initial
from headwater.server.rounds.run_state import Training
from tests.python_tasks import Signs
from tests.tasks import TwoLayers

State = dict[str, Tensor]


class Tied(TwoLayers):
    """The last layer has the weights of the first."""

    def new_model(self) -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
        model[1].weight = model[0].weight
        return model


def built(task: Any = TwoLayers, *, seed: int = 1) -> ModelImage:
    return build_model(task(), seed=seed)


def state_of(image: ModelImage) -> State:
    return {name: tensor.clone() for name, tensor in image.model.state_dict().items()}


FORMS: dict[str, tuple[str, Callable[[State], Any]]] = {
    "state_dict": ("a.pt", lambda state: state),
    "under a key": ("a.pth", lambda state: {"model_state_dict": state, "epoch": 3}),
    "of DataParallel": ("a.pt", lambda state: {f"module.{name}": it for name, it in state.items()}),
    "of Lightning": (
        "a.ckpt",
        lambda state: {
            "state_dict": {f"model.{name}": it for name, it in state.items()}
            | {"metric.total": torch.ones(1)},
            "epoch": 3,
            "hyper_parameters": {"lr": 0.1},
        },
    ),
    "both": (
        "a.bin",
        lambda state: {"state_dict": {f"model.module.{n}": it for n, it in state.items()}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_torch_has_saved_is_loaded(form: str, tmp_path: Path) -> None:
    name, make = FORMS[form]
    saved, image = built(seed=2), built()
    torch.save(make(state_of(saved)), tmp_path / name)
    load_initial(image, tmp_path / name)
    assert torch.equal(image.values_P, saved.values_P)


def test_a_model_within_another_takes_weights_without_the_outer_name(tmp_path: Path) -> None:
    class Within(TwoLayers):
        def new_model(self) -> nn.Module:
            outer = nn.Module()
            outer.body = super().new_model()
            return outer

    saved, image = built(seed=2), built(Within)
    save_file(state_of(saved), tmp_path / "a.safetensors")
    load_initial(image, tmp_path / "a.safetensors")
    assert torch.equal(image.values_P, saved.values_P)


def test_a_folder_of_shards_with_a_tied_weight_is_loaded(tmp_path: Path) -> None:
    saved, image = built(Tied, seed=2), built(Tied)
    state = state_of(saved)
    files = {"0.weight": "model-1.safetensors", "1.bias": "model-2.safetensors"}
    for name, file in files.items():  # 1.weight is 0.weight, and is written once
        save_file({name: state[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    load_initial(image, tmp_path)
    assert torch.equal(image.values_P, saved.values_P)


@pytest.mark.parametrize("left_out", ["0.weight", "1.weight"])
def test_a_tied_weight_may_be_there_once_behind_another_prefix(
    left_out: str, tmp_path: Path
) -> None:
    saved, image = built(Tied, seed=2), built(Tied)
    state = {f"model.{name}": one for name, one in state_of(saved).items() if name != left_out}
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    load_initial(image, tmp_path / "a.ckpt")
    assert torch.equal(image.values_P, saved.values_P)


@pytest.mark.parametrize(
    ("content", "message", "remedy"),
    [
        (
            nn.Linear(2, 2),
            "holds more than weights, whose code is not run: torch.nn.mod",
            "state_dict()",
        ),
        ({"epoch": 3}, "has no weights by name, but epoch", "state_dict()"),
        ([1, 2], "has no weights by name", "state_dict()"),
        (b"not torch's", "cannot be read", "copy it again"),
    ],
    ids=["a whole module", "no weights", "a list", "another file"],
)
def test_what_has_no_weights_is_refused_with_what_to_save(
    content: Any, message: str, remedy: str, tmp_path: Path
) -> None:
    if isinstance(content, bytes):
        (tmp_path / "a.pt").write_bytes(content)
    else:
        torch.save(content, tmp_path / "a.pt")
    with pytest.raises(SettingsError, match=message) as refused:
        load_initial(built(), tmp_path / "a.pt")
    assert remedy in refused.value.remedy


def test_weights_of_another_model_are_a_mismatch(tmp_path: Path) -> None:
    torch.save(state_of(built(Tied)), tmp_path / "a.pt")
    with pytest.raises(ModelMismatch):
        load_initial(built(), tmp_path / "a.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    state = state_of(built())
    name = next(iter(state))
    state[name].view(-1)[0] = value
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(SettingsError, match=f"{name} has values that are NaN or infinite"):
        load_initial(built(), tmp_path / "a.pt")


def test_a_task_whose_model_begins_with_nan_is_refused_before_the_first_round() -> None:
    class Broken(Signs):
        def new_model(self) -> nn.Module:
            model = super().new_model()
            nn.init.constant_(next(model.parameters()), float("nan"))
            return model

    with (
        run_scope({"python:Broken": Broken}),
        pytest.raises(TaskError, match="new_model builds has parameters that are NaN"),
    ):
        Training(load(None, {"task": "python:Broken"}), run_id=1)
