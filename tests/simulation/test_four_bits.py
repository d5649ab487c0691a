"""Runs on frozen weights in four bits: bytes, files, resuming, and every way of running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headwater
from headwater.common.errors import FrozenPartMismatch, ModelMismatch, UnsupportedModel
from headwater.common.model.layout import layout_of
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import ADAPTER, MODEL
from headwater.common.settings.schema import Settings
from headwater.server.evaluate_model import evaluate
from headwater.server.rounds import checkpoint
from headwater.simulation.run import run_engine
from tests.adapted import HIDDEN, NUM_TOKENS, TASK, WIDTH, Adapted, AdaptedNet
from tests.simulation.test_frozen_part import WAYS, assert_same_model

NUM_DEVICES = 3
STORED = ("up.weight", "down.weight", "body.base.weight")
TOKENS = torch.arange(NUM_TOKENS)


class OtherBase(Adapted):
    def new_model(self) -> nn.Module:
        model = AdaptedNet()
        model.up.weight += 1
        return model


class Whole(Adapted):
    def new_model(self) -> nn.Module:
        return AdaptedNet().requires_grad_(True)


def chosen(out: Path, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": TASK,
            "rounds": 2,
            "threads": 1,
            "seed": 5,
            "out": out,
            "plan": {"accumulation_steps": 3, "micro_batch_size": 4},
            "cohort": {"min_clients": NUM_DEVICES},
            "simulation": {"clients": NUM_DEVICES, "workers": 1},
            "model": {"frozen_dtype": "nf4"},
            **changes,
        }
    )


def simulate(settings: Settings, *, resume: bool = False) -> None:
    run_engine(settings, on_round=lambda row: None, resume=resume)


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS)
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    out = tmp_path_factory.mktemp("run")
    simulate(chosen(out))
    return out


def test_the_part_that_is_sent_has_nine_sixteenths_of_a_byte_a_weight(done: Path) -> None:
    sent = load_file(done / checkpoint.FROZEN)
    expected = {"up.weight": WIDTH * HIDDEN, "down.weight": WIDTH * HIDDEN, "body.base.weight": 64}
    assert {name: sent[name].nbytes for name in STORED} == {
        name: number * 9 // 16 for name, number in expected.items()
    }
    others = {slot.name: slot.num_bytes for slot in layout_of(AdaptedNet()).frozen}
    assert all(sent[name].nbytes == others[name] for name in sent if name not in STORED)


def test_the_model_file_has_the_weights_that_the_run_computed_with(done: Path) -> None:
    image = build_model(Adapted(), seed=5, frozen_dtype="nf4")
    whole = load_file(done / MODEL)
    for name in STORED:
        assert whole[name].dtype is torch.float32
        assert torch.equal(whole[name], image.model.get_parameter(name) * 1)


def test_an_adapter_and_the_task_give_the_whole_model(done: Path) -> None:
    whole, adapted = (headwater.load_model(done / name, TASK) for name in (MODEL, ADAPTER))
    assert torch.equal(outputs(whole), outputs(adapted))
    assert {type(one) for one in adapted.parameters()} == {nn.Parameter}
    with pytest.raises(FrozenPartMismatch, match="frozen part"):
        headwater.load_model(done / ADAPTER, OtherBase())


def test_an_evaluation_of_the_file_is_that_of_the_run_s_own_model(done: Path) -> None:
    found = evaluate(done / MODEL, data=[__file__], task=TASK)
    adapted = evaluate(done / ADAPTER, data=[__file__], task=TASK)
    assert found.results[0].loss == adapted.results[0].loss


@pytest.mark.parametrize(("name", "seed"), [(MODEL, 6), (ADAPTER, 5)])
def test_a_run_from_a_file_has_the_same_frozen_part(
    name: str, seed: int, done: Path, tmp_path: Path
) -> None:
    initial = {"initial": done / name, "frozen_dtype": "nf4"}
    simulate(chosen(tmp_path, seed=seed, model=initial))
    parts = [(folder / checkpoint.FROZEN).read_bytes() for folder in (done, tmp_path)]
    assert parts[0] == parts[1]


def test_a_resumed_run_ends_with_the_same_bytes_and_with_no_other_dtype(
    done: Path, tmp_path: Path
) -> None:
    simulate(chosen(tmp_path, rounds=1))
    for dtype in (None, "bfloat16"):
        with pytest.raises(ModelMismatch, match=r"up\.weight|down\.weight|body\.base\.weight"):
            simulate(chosen(tmp_path, model={"frozen_dtype": dtype}), resume=True)
    simulate(chosen(tmp_path), resume=True)
    assert (tmp_path / MODEL).read_bytes() == (done / MODEL).read_bytes()


@WAYS
def test_every_way_of_running_trains_the_same_model(
    simulation: dict[str, Any], done: Path, tmp_path: Path
) -> None:
    simulate(chosen(tmp_path, simulation={"clients": NUM_DEVICES, **simulation}))
    assert_same_model(tmp_path, done, simulation)


def test_a_run_without_a_frozen_linear_layer_is_refused(tmp_path: Path) -> None:
    settings = chosen(tmp_path)
    with pytest.raises(UnsupportedModel, match="--frozen-dtype nf4"):
        headwater.simulate(Whole, clients=3, rounds=1, settings={"model": settings.model})
