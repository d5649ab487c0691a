"""Fine-tuning against a plain PyTorch loop, and what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from headwater.client.adaptation.data_split import DataSplit
from headwater.client.adaptation.fine_tuning import (
    ORDER,
    FineTuning,
    TrainingState,
    chosen_parameters,
    fine_tune,
)
from headwater.client.training.sampler import permutation, split
from headwater.common.errors import OutOfMemory, SettingsError, TaskFailed


class Line:
    """A linear model with a hidden layer and dropout; a penalty on its head."""

    p_drop, strength = 0.2, 0.01

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(self.p_drop), nn.Linear(4, 1))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(part)
        inputs = torch.randn(40, 3, generator=generator)
        noise = 0.1 * torch.randn(40, 1, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True) + noise)

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        inputs, targets = batch
        return functional.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)

    def penalty(self, model: nn.Module) -> Tensor:
        return self.strength * dict(model.named_parameters())["2.weight"].square().sum()


DATA = DataSplit(
    train=tuple(range(25)), stop=tuple(range(25, 32)), held_out=tuple(range(32, 40)), is_of_run=True
)


def new_model(task: Any, seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = task.new_model()
    return model


def examples_of(task: Any) -> Any:
    return task.train_examples(data=None, part=0, num_parts=1)


def tuned(task: Any, **settings: Any) -> tuple[dict[str, Tensor], TrainingState]:
    model = new_model(task)
    state = fine_tune(task, model, examples_of(task), DATA, FineTuning(**settings))
    return {name: one.clone() for name, one in model.state_dict().items()}, state


def plain_loop(task: Line, *, epochs: int, seed: int, rate: float, size: int) -> dict[str, Tensor]:
    """Return the parameters of the best of some epochs of AdamW, in plain PyTorch."""
    model = new_model(task)
    inputs, targets = examples_of(task).tensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    stop = list(DATA.stop)
    torch.manual_seed(seed)
    best: tuple[float, dict[str, Tensor]] | None = None
    for epoch in range(epochs + 1):
        if epoch:
            model.train()
            order = [DATA.train[at] for at in permutation(seed, epoch, ORDER, len(DATA.train))]
            for rows in split(order, size):
                optimizer.zero_grad()
                batch = inputs[list(rows)], targets[list(rows)]
                loss = functional.mse_loss(model(batch[0]), batch[1]) + task.penalty(model)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        model.eval()
        with torch.no_grad():
            value = functional.mse_loss(model(inputs[stop]), targets[stop]).item()
        if best is None or value < best[0]:
            best = value, {name: one.clone() for name, one in model.state_dict().items()}
    assert best is not None
    return best[1]


def test_fine_tuning_equals_a_plain_pytorch_loop() -> None:
    found, state = tuned(Line(), epochs=6, patience=6, seed=3, learning_rate=0.02, batch_size=4)
    wanted = plain_loop(Line(), epochs=6, seed=3, rate=0.02, size=4)
    assert state.epoch == 6
    assert state.best_epoch > 0
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    first, second, other = (tuned(Line(), epochs=2, seed=seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_random_state_of_the_caller_is_left_as_it_was() -> None:
    model = new_model(Line())
    before = torch.get_rng_state()
    fine_tune(Line(), model, examples_of(Line()), DATA, FineTuning(epochs=1))
    assert torch.equal(before, torch.get_rng_state())


def test_only_the_named_parameters_change() -> None:
    task = Line()
    before = new_model(task).state_dict()
    after, _ = tuned(task, epochs=2, only="2.*", learning_rate=0.05)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"2.weight", "2.bias"}


def test_afterwards_all_parameters_train_again() -> None:
    model = new_model(Line())
    fine_tune(Line(), model, examples_of(Line()), DATA, FineTuning(epochs=1, only="2.*"))
    assert all(one.requires_grad and one.grad is None for one in model.parameters())


@pytest.mark.parametrize("only", ["nothing.*", "0.*,", "frozen.*"])
def test_a_pattern_that_names_no_trained_parameter_is_refused(only: str) -> None:
    model = nn.ModuleDict({"frozen": nn.Linear(1, 1).requires_grad_(False), "0": nn.Linear(1, 1)})
    with pytest.raises(SettingsError, match="--only"):
        chosen_parameters(model, only)


def test_a_model_without_a_parameter_that_trains_is_refused() -> None:
    with pytest.raises(SettingsError, match="all are frozen"):
        chosen_parameters(nn.Linear(1, 1).requires_grad_(False), None)


def test_a_training_that_makes_it_worse_ends_early_with_the_model_as_it_was() -> None:
    task = Line()
    task.strength = -1e3
    before = new_model(task).state_dict()
    after, state = tuned(task, epochs=20, patience=2, learning_rate=1.0)
    assert (state.epoch, state.best_epoch) == (2, 0)
    assert state.ended == "no better loss in 2 epochs"
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_training_that_diverges_ends_with_the_best_so_far() -> None:
    after, state = tuned(Line(), optimizer="sgd", learning_rate=1e30, epochs=5)
    assert "diverged" in state.ended
    assert all(bool(one.isfinite().all()) for one in after.values())


def test_a_stopped_training_keeps_the_best_so_far() -> None:
    task, model = Line(), new_model(Line())
    seen: list[TrainingState] = []
    state = fine_tune(
        task,
        model,
        examples_of(task),
        DATA,
        FineTuning(epochs=9, patience=9, learning_rate=0.02, batch_size=5),
        should_stop=lambda: len(seen) > 14,  # in the third epoch
        on_step=seen.append,
    )
    whole, _ = tuned(task, epochs=state.epoch, patience=9, learning_rate=0.02, batch_size=5)
    assert state.ended == "it was stopped"
    assert state.epoch == 2
    assert all(torch.equal(one, whole[name]) for name, one in model.state_dict().items())


class LittleMemory(Line):
    """Takes no more than ``most`` examples at a time."""

    p_drop = 0.0
    most = 3

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        if torch.is_grad_enabled() and len(batch[0]) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().loss_sum(model, batch)


def test_a_batch_that_does_not_fit_is_computed_in_parts() -> None:
    whole = Line()
    whole.p_drop = 0.0
    found, _ = tuned(LittleMemory(), epochs=3, batch_size=8, learning_rate=0.01)
    wanted, _ = tuned(whole, epochs=3, batch_size=8, learning_rate=0.01)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_an_example_that_does_not_fit_alone_is_out_of_memory() -> None:
    task = LittleMemory()
    task.most = 0
    with pytest.raises(OutOfMemory, match="one example"):
        tuned(task)


def test_a_state_of_the_optimizer_that_does_not_fit_is_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that was taken in part must not be taken again."""
    steps: list[int] = []

    def fail(*_: Any) -> None:
        steps.append(1)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(RuntimeError, match="can't allocate"):
        tuned(Line())
    assert len(steps) == 1


def test_an_exception_of_the_task_is_named() -> None:
    class Raises(Line):
        def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
            if torch.is_grad_enabled():
                raise ZeroDivisionError("mine")
            return super().loss_sum(model, batch)

    with pytest.raises(TaskFailed, match="mine"):
        tuned(Raises())


@pytest.mark.parametrize("optimizer", ["lbfgs", "adamm"])
def test_an_optimizer_that_cannot_be_used_is_refused(optimizer: str) -> None:
    with pytest.raises(SettingsError):
        tuned(Line(), optimizer=optimizer)


@pytest.mark.parametrize(
    "wrong",
    [{"epochs": 0}, {"patience": 0}, {"batch_size": -1}, {"learning_rate": float("nan")}],
    ids=str,
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        FineTuning(**wrong).check()
