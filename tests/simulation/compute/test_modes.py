"""The law of the simulator: every way to compute a round equals one device after another."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.common.errors import SettingsError
from tests.simulation.compute.compared_modes import (
    FLEET,
    ROUNDS,
    BadExample,
    Branching,
    ConstantInput,
    LargeLayer,
    LayerTwice,
    LongEpoch,
    Mlp,
    OneElement,
    Random,
    Recomputing,
    Tokens,
    assert_equals_one_by_one,
    model_in,
    norms_of,
    run,
    spec,
)

RAGGED = "tests/laws/architectures.py:Ragged"
CNN = "tests/laws/architectures.py:Cnn"
BATCHED = "headwater.simulation.compute.batched"


@pytest.mark.parametrize("mode", ["vectorised", "fused"])
@pytest.mark.parametrize("task", [Mlp, LongEpoch, LayerTwice, ConstantInput, OneElement])
def test_every_mode_equals_one_by_one(tmp_path: Path, task: type, mode: str) -> None:
    _, others = assert_equals_one_by_one(tmp_path, mode, task=spec(task))
    if mode == "fused":
        assert {row["noise_scale"] for row in others} == {None}


@pytest.mark.parametrize("mode", ["vectorised", "fused"])
def test_dataset_weights_equal_one_by_one(tmp_path: Path, mode: str) -> None:
    assert_equals_one_by_one(tmp_path, mode, **{"cohort.weighting": "dataset"})


@pytest.mark.parametrize("mode", ["vectorised", "fused"])
def test_no_mode_trains_on_what_the_devices_hold_out(tmp_path: Path, mode: str) -> None:
    held_out = {"evaluation.on_devices": True, "evaluation.held_out_fraction": 0.4}
    assert_equals_one_by_one(tmp_path, mode, **held_out)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vectorised", "fused"])
@pytest.mark.parametrize("task", [spec(Tokens), spec(LargeLayer), CNN])
def test_larger_models_equal_one_by_one(tmp_path: Path, task: str, mode: str) -> None:
    assert_equals_one_by_one(
        tmp_path, mode, task=task, **{"optimizer.name": "sgd", "optimizer.learning_rate": 0.01}
    )


@pytest.mark.parametrize("task", [Mlp, Tokens])
def test_norms_from_vectors_equal_norms_from_linear_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type
) -> None:
    monkeypatch.setattr("headwater.simulation.vectorised.linear_layers.MAX_OTHER_SHARE", -1.0)
    chosen = {"task": spec(task), "optimizer.name": "sgd", "optimizer.learning_rate": 0.02}
    assert_equals_one_by_one(tmp_path, "vectorised", **chosen, **{"cohort.weighting": "dataset"})


def test_models_too_large_for_vectors_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{BATCHED}.VECTORS_BYTES", 1 << 10)
    run(tmp_path / "alone", "one-by-one", task=CNN)
    run(tmp_path / "vectorised", "vectorised", task=CNN)
    assert "computed one by one: vectors of" in capsys.readouterr().out
    assert torch.equal(model_in(tmp_path / "alone"), model_in(tmp_path / "vectorised"))


@pytest.mark.parametrize("mode", ["vectorised", "fused"])
def test_devices_with_more_examples_than_a_pass_equal_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(f"{BATCHED}.MAX_AT_ONCE", 24)
    # Devices have 5 to 40 examples, and use at most 32.
    assert_equals_one_by_one(tmp_path, mode, **{"plan.accumulation_steps": 8})


def test_blocks_that_fail_in_the_run_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def grad(function: Callable[..., Any], *, has_aux: bool) -> Callable[..., Any]:
        real = torch.func.grad(function, has_aux=has_aux)

        def limited(trained: Any, mask: Tensor, *tensors: Tensor) -> Any:
            if len(mask) != 3:  # the self-test's
                raise RuntimeError("there is no rule for this operator. See the manual")
            return real(trained, mask, *tensors)

        return limited

    monkeypatch.setattr("headwater.simulation.vectorised.linear_layers.MAX_OTHER_SHARE", -1.0)
    monkeypatch.setattr("headwater.simulation.vectorised.per_example.grad", grad)
    caplog.set_level("INFO", logger=BATCHED)
    assert_equals_one_by_one(tmp_path, "vectorised")
    counts = re.findall(r"(\d+) devices are computed one by one: RuntimeError: there", caplog.text)
    assert sum(map(int, counts)) == 12 * ROUNDS


def test_half_precision_has_norms(tmp_path: Path) -> None:
    # Each of a dozen operators in a row rounds by 2^-9.
    rows = run(tmp_path / "half", "vectorised", **{"plan.precision": "bfloat16"})
    whole = run(tmp_path / "whole", "vectorised")
    for row, same in zip(rows, whole, strict=True):
        assert row["loss"] == pytest.approx(same["loss"], rel=2**-6)
        for one, other in zip(row["clients"], same["clients"], strict=True):
            assert norms_of(one) == pytest.approx(norms_of(other), rel=2**-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["vectorised", "fused"])
def test_planned_fleets_with_jitter_and_absence_equal_one_by_one(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    chosen: dict[str, Any] = {
        "simulation.fleet": path,
        "simulation.clients": 7,
        "plan.accumulation_steps": None,
        "plan.micro_batch_size": None,
        "plan.effective_batch_size": 60,
        "cohort.deadline_seconds": 5.0,
    }
    assert_equals_one_by_one(tmp_path, mode, **chosen)


@pytest.mark.parametrize("mode", ["vectorised", "fused"])
def test_a_device_with_a_bad_example_is_computed_alone(tmp_path: Path, mode: str) -> None:
    _, others = assert_equals_one_by_one(tmp_path, mode, task=spec(BadExample))
    assert sum(client["num_refused"] for client in others[0]["clients"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "why"),
    [
        (spec(Random), "draws random numbers"),
        (spec(Branching), "RuntimeError"),
        (spec(Recomputing), "RuntimeError"),
        (RAGGED, "looks different alone"),
    ],
)
def test_tasks_that_cannot_be_batched_are_computed_one_by_one_with_the_reason(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    why: str,
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.MAX_ONE_BY_ONE", 2)
    run(tmp_path / "auto", "auto", task=task)
    output = capsys.readouterr().out
    assert "devices are computed one by one: " in output
    assert why in output
    run(tmp_path / "alone", "one-by-one", task=task)
    assert torch.equal(model_in(tmp_path / "auto"), model_in(tmp_path / "alone"))
    with pytest.raises(SettingsError, match="--compute fused is not possible"):
        run(tmp_path / "fused", "fused", task=task)


@pytest.mark.slow
def test_auto_computes_few_devices_one_by_one_and_many_fused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "few", "auto")
    run(tmp_path / "alone", "one-by-one")
    assert torch.equal(model_in(tmp_path / "few"), model_in(tmp_path / "alone"))
    run(tmp_path / "many", "auto", **{"simulation.clients": 33, "rounds": 1})
    assert "devices are computed fused" in capsys.readouterr().out


def test_auto_measures_the_noise_scale_if_plans_follow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.simulation.compute.modes.MAX_ONE_BY_ONE", 2)
    chosen: dict[str, Any] = {
        "plan.accumulation_steps": None,
        "plan.follow_noise_scale": True,
        "plan.effective_batch_size": 48,
    }
    rows = run(tmp_path / "auto", "auto", **chosen)
    assert all(row["measured_share"] for row in rows)
    with pytest.raises(SettingsError, match="each device's own norms"):
        run(tmp_path / "fused", "fused", **chosen)
