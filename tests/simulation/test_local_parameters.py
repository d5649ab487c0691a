"""Runs with parameters that stay on the devices: each way of running, resuming, and the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import headwater
from headwater.client.trainer.held_out import HeldOutEvaluation
from headwater.common.errors import (
    HeadwaterError,
    LocalParametersMismatch,
    LocalParametersMissing,
    LocalParametersUnusable,
    ModelMismatch,
    SettingsError,
    StateError,
)
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.server.evaluate_model import evaluate
from headwater.simulation.run import run_engine

TASK = f"{Path(__file__)}:OwnLabels"
NUM_DEVICES = 4


class OwnLabels:
    """The sign of a sum of two numbers, which half of the devices call by the opposite label."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        inputs = torch.randn(40, 2, generator=torch.Generator().manual_seed(part))
        labels = (inputs.sum(1) > 0).long()
        return TensorDataset(inputs, labels if part % 2 else 1 - labels)

    def test_examples(self) -> TensorDataset:
        return self.train_examples(data=None, part=1, num_parts=1)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        inputs, labels = batch
        logits = model(inputs)
        num_right = float((logits.argmax(1) == labels).sum())
        return cross_entropy(logits, labels, reduction="sum"), len(labels), {"right": num_right}


def chosen(out: Path | None, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": TASK,
            "rounds": 3,
            "threads": 1,
            "out": out,
            "simulation": {"clients": NUM_DEVICES},
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "model": {"local_parameters": "2.*"},
            "evaluation": {"on_devices": True},
            **changes,
        }
    )


def simulate(settings: Settings, *, resume: bool = False) -> list[Any]:
    rows: list[Any] = []
    run_engine(settings, on_round=rows.append, resume=resume)
    return rows


def own_values(out: Path) -> dict[str, dict[str, list[float]]]:
    files = sorted((out / "local").iterdir())
    return {file.name: {k: v.tolist() for k, v in load_file(file).items()} for file in files}


@pytest.mark.slow
def test_heads_of_their_own_learn_labels_that_contradict_each_other() -> None:
    """A common model is right on half of all examples, as every label means both answers."""
    many = {"rounds": 30, "plan": {"accumulation_steps": 4, "micro_batch_size": 10}}
    common, own = (
        simulate(chosen(None, **many, evaluation={}, model=model))[-1]
        for model in ({}, {"local_parameters": "2.*"})
    )
    assert common.metrics["train_right"] <= 0.6
    assert own.metrics["train_right"] >= 0.9


def test_neither_model_nor_checkpoint_has_what_stays_on_the_devices(tmp_path: Path) -> None:
    simulate(chosen(tmp_path))
    assert set(load_file(tmp_path / MODEL)) == {"0.weight", "0.bias"}
    image = load_file(tmp_path / "checkpoint.safetensors")["image"]
    assert image.numel() == 4 * (2 * 8 + 8)
    values = own_values(tmp_path)
    assert len(values) == NUM_DEVICES
    assert len({str(one["2.weight"]) for one in values.values()}) == NUM_DEVICES


def test_a_resumed_run_has_the_uninterrupted_one_s_parameters_on_both_sides(tmp_path: Path) -> None:
    simulate(chosen(tmp_path / "unbroken"))
    for rounds in (1, 2, 3):
        simulate(chosen(tmp_path / "broken", rounds=rounds), resume=rounds > 1)
    models = [(tmp_path / one / MODEL).read_bytes() for one in ("unbroken", "broken")]
    assert models[0] == models[1]
    assert own_values(tmp_path / "unbroken") == own_values(tmp_path / "broken")


@pytest.mark.parametrize("number", [1, 2])
def test_a_round_that_ends_in_its_test_on_the_devices_takes_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The round has no checkpoint yet, so it comes again: its step is pending until then."""
    simulate(chosen(tmp_path / "unbroken"))
    honest, calls = HeldOutEvaluation.report, list[str]()

    def report(self: HeldOutEvaluation, name: str, *given: Any, **more: Any) -> Any:
        calls.append(name)
        if len(calls) == number * NUM_DEVICES:
            raise KeyboardInterrupt
        return honest(self, name, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(HeldOutEvaluation, "report", report)
        with pytest.raises(KeyboardInterrupt):
            simulate(chosen(tmp_path / "broken"))
    simulate(chosen(tmp_path / "broken"), resume=True)
    models = [(tmp_path / one / MODEL).read_bytes() for one in ("unbroken", "broken")]
    assert models[0] == models[1]
    assert own_values(tmp_path / "unbroken") == own_values(tmp_path / "broken")


def test_a_run_without_a_folder_has_the_same_rounds(tmp_path: Path) -> None:
    kept, in_memory = simulate(chosen(tmp_path)), simulate(chosen(None))
    assert [row.loss for row in kept] == [row.loss for row in in_memory]
    assert [row.metrics for row in kept] == [row.metrics for row in in_memory]


def test_many_devices_in_one_pass_are_refused_or_computed_one_by_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SettingsError, match=r"each device has parameters of its own"):
        simulate(chosen(None, simulation={"clients": 4, "compute": "fused"}))
    simulate(chosen(None, rounds=1, simulation={"clients": 34}))
    said = capsys.readouterr().out
    assert "one by one: each device has parameters of its own (--local-parameters)" in said


def test_masks_hide_the_shared_part_and_leave_the_rest_on_the_devices(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"evaluation": {}}
    simulate(chosen(tmp_path / "plain", **plain))
    masked = {**plain, "secure": {"aggregation": "semi-honest"}}
    simulate(chosen(tmp_path / "masked", **masked))
    first, second = (load_file(tmp_path / one / MODEL) for one in ("plain", "masked"))
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)
    one, other = own_values(tmp_path / "plain"), own_values(tmp_path / "masked")
    assert one.keys() == other.keys()
    for name, values in one.items():
        for key, value in values.items():
            assert torch.allclose(torch.tensor(value), torch.tensor(other[name][key]), atol=1e-4)


def test_a_masked_run_without_a_folder_keeps_them_in_the_nodes() -> None:
    secure = {"evaluation": {}, "secure": {"aggregation": "semi-honest"}}
    rows, plain = simulate(chosen(None, **secure)), simulate(chosen(None, evaluation={}))
    assert [row.loss for row in rows] == pytest.approx([row.loss for row in plain], abs=1e-5)


def test_the_server_says_that_it_has_no_whole_model_to_test(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = simulate(chosen(None, rounds=1, evaluation={}))
    assert not [name for name in rows[0].metrics if name.startswith("test_")]
    assert "18 of 42 parameters stay on the devices (2.*): the server has no whole" in caplog.text
    assert "--evaluate-on-devices" in caplog.text


def test_a_model_file_is_whole_again_with_a_device_s_own_parameters(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=20, plan={"accumulation_steps": 4, "micro_batch_size": 9}))
    with pytest.raises(LocalParametersMissing, match=r"has no 2.\*: these parameters stayed"):
        headwater.load_model(tmp_path)
    inputs, labels = OwnLabels().train_examples(data=None, part=1, num_parts=4).tensors
    right = []
    for part in (1, 2):
        own = tmp_path / "local" / f"{part}.safetensors"
        found = headwater.load_model(tmp_path, TASK, local=own)(inputs).argmax(1)
        right.append(float((found == labels).float().mean()))
    assert right[0] >= 0.9
    assert right[1] <= 0.3  # that device calls it by the other label


def test_evaluate_takes_a_device_s_own_parameters(tmp_path: Path) -> None:
    simulate(chosen(tmp_path))
    with pytest.raises(LocalParametersMissing) as caught:
        evaluate(tmp_path, data=[], task=TASK)
    assert "--local FILE" in caught.value.remedy
    own = tmp_path / "local" / "1.safetensors"
    assert evaluate(tmp_path, data=[], task=TASK, local=own).results[0].num_examples == 40


def test_files_of_other_models_and_needless_ones_are_refused(tmp_path: Path) -> None:
    simulate(chosen(tmp_path / "a", rounds=1))
    simulate(chosen(tmp_path / "b", rounds=1, model={"local_parameters": "0.*"}))
    simulate(chosen(tmp_path / "c", rounds=1, model={}))
    own = tmp_path / "a" / "local" / "1.safetensors"
    cases: list[tuple[str, Path, type[HeadwaterError], str]] = [
        ("b", own, ModelMismatch, "in a run of another model"),
        ("c", own, ModelMismatch, "has all parameters of its model"),
        ("a", tmp_path / "none", StateError, "cannot be read"),
        ("a", tmp_path / "a" / MODEL, StateError, "is damaged, or no file of a device"),
    ]
    for folder, file, kind, text in cases:
        with pytest.raises(kind, match=text):
            headwater.load_model(tmp_path / folder, TASK, local=file)


def test_an_initial_model_gives_the_shared_part_with_or_without_the_rest(tmp_path: Path) -> None:
    simulate(chosen(tmp_path / "first", rounds=1))
    simulate(chosen(tmp_path / "whole", rounds=1, model={}))
    for name in ("first", "whole"):
        model = {"local_parameters": "2.*", "initial": tmp_path / name}
        assert simulate(chosen(tmp_path / f"from-{name}", rounds=1, model=model))


def test_a_run_is_not_resumed_with_other_local_parameters(tmp_path: Path) -> None:
    simulate(chosen(tmp_path, rounds=1))
    with pytest.raises(LocalParametersMismatch, match=r"stay 2\.weight, 2\.bias in the"):
        simulate(chosen(tmp_path, model={"local_parameters": "0.*"}), resume=True)


def test_bad_patterns_end_a_run_by_name() -> None:
    for patterns, text in (("head.*", "'head.*' names nothing"), ("*", "every parameter")):
        with pytest.raises(LocalParametersUnusable, match=text):
            simulate(chosen(None, model={"local_parameters": patterns}))


def test_a_run_from_python_has_no_single_model(tmp_path: Path) -> None:
    run = headwater.simulate(
        OwnLabels, clients=4, rounds=1, local_parameters="2.*", out=tmp_path, progress=False
    )
    with pytest.raises(LocalParametersMissing, match="the run has no single model"):
        _ = run.model
    file = tmp_path / "local" / "0.safetensors"
    assert isinstance(headwater.load_model(tmp_path, OwnLabels(), local=file), nn.Module)


def test_workers_need_a_folder_to_share_the_devices_parameters() -> None:
    simulation = {"clients": 4, "compute": "one-by-one", "workers": 2}
    with pytest.raises(SettingsError, match="share what the devices keep as files"):
        simulate(chosen(None, simulation=simulation))


@pytest.mark.slow
@pytest.mark.parametrize(
    "simulation",
    [
        pytest.param({"workers": 2, "compute": "one-by-one"}, id="workers"),
        pytest.param({"engine": "grpc"}, id="grpc"),
    ],
)
def test_each_way_of_running_gives_the_same_model(
    simulation: dict[str, Any], tmp_path: Path
) -> None:
    rows = simulate(chosen(tmp_path / "one"))
    other = chosen(tmp_path / "two", simulation={"clients": NUM_DEVICES, **simulation})
    others = simulate(other)
    models = [(tmp_path / one / MODEL).read_bytes() for one in ("one", "two")]
    assert models[0] == models[1]
    assert [row.metrics for row in rows] == [row.metrics for row in others]
