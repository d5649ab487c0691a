"""A model file has the names of the user's network and tensors alone, whatever is around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headwater.common.model.local_parameters import local_names
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.model.trained_model import ADAPTER, MODEL, load_model
from headwater.common.settings.schema import Settings
from headwater.server.rounds.initial_model import load_initial
from headwater.server.rounds.model_files import save_adapter, save_model
from tests.tasks import Given, squares

SETTINGS = Settings(task="tests/tasks.py:TwoLayers")


class Named(nn.Sequential):
    """Has a state beside its tensors, as torch's ``get_extra_state`` allows."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def network() -> nn.Module:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    layers[0].requires_grad_(requires_grad=False)
    return Named(*layers)


def compiled() -> nn.Module:
    # As torch.compile returns it; the compiler itself takes a second to import.
    wrapper: Any = type(
        "OptimizedModule", (nn.Module,), {"__module__": "torch._dynamo.eval_frame"}
    )()
    wrapper._orig_mod = network()
    wrapper.forward = wrapper._orig_mod.forward
    module: nn.Module = wrapper
    return module


def parallel() -> nn.Module:
    return nn.DataParallel(network())


def inner() -> nn.Module:
    model = network()
    model[2] = nn.DataParallel(model[2])  # type: ignore[index, operator]
    return nn.DataParallel(model)


WRAPPED = [network, compiled, parallel, inner]


def trained(build: Callable[[], nn.Module]) -> ModelImage:
    image = build_model(Given(squares, build), seed=0, batch_norm="group")
    image.values_P.uniform_(generator=torch.Generator().manual_seed(9))
    return image


def outputs(model: nn.Module) -> Tensor:
    result: Tensor = model.eval()(torch.ones(2, 3))
    return result.detach()


@pytest.mark.parametrize("build", WRAPPED)
def test_a_file_fits_the_network_without_its_wrappers(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    image = trained(build)
    save_model(tmp_path / MODEL, image, SETTINGS, round_number=1)
    plain = network()
    plain[1] = nn.GroupNorm(1, 4)  # type: ignore[operator]
    missing, unexpected = plain.load_state_dict(load_file(tmp_path / MODEL), strict=False)
    assert missing == ["_extra_state"]
    assert unexpected == []
    assert outputs(plain).equal(outputs(image.model))


@pytest.mark.parametrize("build", WRAPPED)
@pytest.mark.parametrize("file", [MODEL, ADAPTER])
def test_a_file_is_loaded_into_the_model_with_its_wrappers(
    build: Callable[[], nn.Module], file: str, tmp_path: Path
) -> None:
    image = trained(build)
    save_model(tmp_path / MODEL, image, SETTINGS, round_number=1)
    save_adapter(tmp_path, image, SETTINGS, round_number=1)
    again = load_model(tmp_path / file, Given(squares, build))
    assert outputs(again).equal(outputs(image.model))


@pytest.mark.parametrize("build", WRAPPED)
def test_a_run_begins_with_the_file_of_another_wrapper(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    first, second = trained(build), trained(parallel)
    save_model(tmp_path / MODEL, first, SETTINGS, round_number=1)
    second.values_P.zero_()
    load_initial(second, tmp_path)
    assert second.values_P.equal(first.values_P)


@pytest.mark.parametrize("build", WRAPPED)
def test_patterns_name_parameters_within_wrappers(build: Callable[[], nn.Module]) -> None:
    names = local_names(build(), "2.*")
    assert {name.rpartition(".")[2] for name in names} == {"weight", "bias"}
    assert all(".2." in f".{name}" for name in names)


@pytest.mark.slow
def test_the_names_of_a_model_that_torch_compiled_are_plain(tmp_path: Path) -> None:
    image = trained(lambda: torch.compile(network(), backend="eager"))  # type: ignore[arg-type, return-value]
    save_model(tmp_path / MODEL, image, SETTINGS, round_number=1)
    assert load_file(tmp_path / MODEL).keys() == {
        *(f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias"))
    }
