"""An optimizer with ``train`` and ``eval`` decides which weights are tested, saved and returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headwater
from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.server.rounds.round_row import RoundRow
from tests.python_tasks import Signs


class Averaged(torch.optim.Optimizer):
    """Steps as SGD, and keeps the mean of all weights since the start; as schedule-free ones do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "is_training": False, "num_steps": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["is_training"], "call train() before a step"
            group["num_steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                parameter.detach().sub_(parameter.grad, alpha=group["lr"])
                mean.lerp_(parameter.detach(), 1 / group["num_steps"])

    def train(self) -> None:
        self._swap(is_training=True)

    def eval(self) -> None:
        self._swap(is_training=False)

    def _swap(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] == is_training:
                continue
            group["is_training"] = is_training
            for parameter in group["params"]:
                if "mean" in (state := self.state[parameter]):
                    kept = state["mean"].clone()
                    state["mean"].copy_(parameter.detach())
                    parameter.detach().copy_(kept)


GIVEN: dict[str, Any] = {"clients": 3, "optimizer": Averaged, "progress": False}


def vector(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def stepped(rounds: int) -> list[Tensor]:
    """Return the weights of SGD after each round."""
    after: list[Tensor] = []

    class Watch:
        def started(self, settings: Any, *, round_number: int, model: nn.Module) -> None:
            self.model = model

        def on_round(self, row: RoundRow) -> None:
            after.append(vector(self.model).clone())

    headwater.simulate(
        Signs,
        rounds=rounds,
        observer=Watch(),
        **{**GIVEN, "optimizer": "sgd", "learning_rate": 0.1},
    )
    return after


def test_what_the_optimizer_keeps_is_tested_saved_and_returned(tmp_path: Path) -> None:
    run = headwater.simulate(Signs, rounds=4, learning_rate=0.1, out=tmp_path / "run", **GIVEN)
    mean = torch.stack(stepped(4)).mean(0)
    torch.testing.assert_close(vector(run.model), mean, rtol=0, atol=1e-6)
    saved = load_file(tmp_path / "run" / MODEL)
    assert all(torch.equal(saved[name], it) for name, it in run.model.state_dict().items())
    inputs, labels = Signs().test_examples().tensors
    with torch.no_grad():
        loss = nn.functional.cross_entropy(run.model(inputs), labels).item()
    assert run.metrics["test_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("optimizer", [Averaged, "schedulefree:SGDScheduleFree"])
def test_a_run_resumes_to_the_same_bits_at_the_stepped_weights(
    optimizer: Any, tmp_path: Path
) -> None:
    if isinstance(optimizer, str):
        pytest.importorskip("schedulefree")
    given = {**GIVEN, "optimizer": optimizer, "learning_rate": 0.1}
    whole = headwater.simulate(Signs, rounds=4, **given)
    headwater.simulate(Signs, rounds=2, out=tmp_path / "run", **given)
    rest = headwater.simulate(Signs, rounds=4, out=tmp_path / "run", resume=True, **given)
    assert torch.equal(vector(rest.model), vector(whole.model))


def test_devices_that_would_test_the_stepped_weights_are_refused() -> None:
    with pytest.raises(SettingsError, match="keeps other weights than it steps"):
        headwater.simulate(Signs, rounds=1, evaluate_on_devices=True, **GIVEN)
