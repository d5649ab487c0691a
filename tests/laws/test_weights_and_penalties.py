"""Float weights and penalties on the parameters: the steps are those of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import headwater
from headwater.client.training.sampler import permutation
from headwater.common.errors import SettingsError, TaskError, TaskNotAdditive

NUM_CLIENTS, NUM_EACH, NUM_ROUNDS, RATE = 4, 7, 3, 0.3
WEIGHTS = torch.tensor([1.0, 2.5, 0.5])
ODD = torch.tensor([1.0, 2.0 / 3.0, 0.1])


class Weighted:
    """Class weights, and a batch's weight that is their sum."""

    weights = WEIGHTS
    weight_unit: float = 0.5
    max_weight_per_example: float = 2.5

    def new_model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn(NUM_EACH, 4, generator=random)
        return TensorDataset(inputs, torch.randint(3, (NUM_EACH,), generator=random))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, dict[str, Any]]:
        inputs, labels = batch
        loss = functional.cross_entropy(model(inputs), labels, self.weights, reduction="sum")
        right = (model(inputs).argmax(1) == labels).float() @ self.weights[labels]
        return loss, self.weights[labels].sum(), {"accuracy": right}


class Finely(Weighted):
    """Weights of any size, rounded to 2^-16."""

    weights, weight_unit, max_weight_per_example = ODD, 2.0**-16, 1.0


class Penalised(Weighted):
    """A penalty on one of the parameters, and a parameter that only the penalty uses."""

    def new_model(self) -> nn.Module:
        model = nn.Linear(4, 3)
        model.register_parameter("scale", nn.Parameter(torch.ones(2)))
        return model

    def penalty(self, model: Any) -> Tensor:
        found: Tensor = 0.05 * model.weight.square().sum() + 0.1 * model.scale.square().sum()
        return found


def batch_of_all(task: Weighted) -> tuple[Tensor, ...]:
    parts = [task.train_examples(data=None, part=n, num_parts=4).tensors for n in range(4)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def plain(task: Weighted) -> tuple[nn.Module, list[tuple[float, float]]]:
    """Train on all examples; return the model, and mean loss and metric before each step."""
    torch.manual_seed(5)
    model, seen = task.new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for _ in range(NUM_ROUNDS):
        optimizer.zero_grad()
        loss, weight, metrics = task.loss_sum(model, batch_of_all(task))
        penalty = task.penalty(model) if isinstance(task, Penalised) else 0.0
        (loss / weight + penalty).backward()
        optimizer.step()
        seen.append((loss.item() / weight.item(), metrics["accuracy"].item() / weight.item()))
    return model, seen


def simulated(task: Any, **more: Any) -> headwater.Run:
    given: dict[str, Any] = {
        "clients": NUM_CLIENTS,
        "rounds": NUM_ROUNDS,
        "accumulation_steps": 4,
        "micro_batch_size": 2,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "seed": 5,
        "threads": 1,
        "progress": False,
        "settings": {"optimizer.arguments": {"momentum": 0.9}, "secure.min_quota": 1},
    }
    return headwater.simulate(task, **{**given, **more})


@pytest.mark.parametrize(
    ("task", "tolerance"), [(Weighted, 1e-6), (Finely, 1e-5), (Penalised, 1e-6)]
)
@pytest.mark.parametrize("mode", [{}, {"secure_aggregation": "active"}, {"compute": "one-by-one"}])
def test_the_steps_are_those_of_plain_pytorch_on_all_examples(
    task: type[Weighted], tolerance: float, mode: dict[str, Any]
) -> None:
    run = simulated(task, **mode)
    expected, seen = plain(task())
    for found, other in zip(run.model.parameters(), expected.parameters(), strict=True):
        assert (found - other).abs().max().item() <= tolerance
    for row, (loss, accuracy) in zip(run.history, seen, strict=True):
        assert row.loss == pytest.approx(loss, rel=1e-4)
        assert row.metrics["train_accuracy"] == pytest.approx(accuracy, rel=1e-4)


def test_each_local_step_has_the_penalty_once() -> None:
    run = simulated(
        Penalised,
        rounds=1,
        algorithm="fedavg",
        local_steps=2,
        local_learning_rate=0.1,
        accumulation_steps=1,
        learning_rate=1.0,
        settings={},
    )
    task = Penalised()
    torch.manual_seed(5)
    start, ends = task.new_model(), []
    for part in range(NUM_CLIENTS):
        own = task.new_model()
        own.load_state_dict(start.state_dict())
        tensors = task.train_examples(data=None, part=part, num_parts=4).tensors
        order, weights = permutation(5, 0, str(part), NUM_EACH).tolist(), 0.0
        for step in range(2):
            rows = order[2 * step : 2 * step + 2]
            own.zero_grad()
            loss, weight, _ = task.loss_sum(own, [tensor[rows] for tensor in tensors])
            (loss / weight + task.penalty(own)).backward()
            weights += float(weight)
            with torch.no_grad():
                for parameter in own.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
        ends.append((weights, own))
    whole = sum(weights for weights, _ in ends)
    named = dict(run.model.named_parameters())
    for name in named:
        mean = sum(weights / whole * own.get_parameter(name) for weights, own in ends)
        torch.testing.assert_close(named[name], mean, rtol=0, atol=1e-6)


def test_a_float_weight_without_a_unit_is_refused_with_what_to_write() -> None:
    class NoUnit(Weighted):
        weight_unit = 1

    with pytest.raises(TaskError, match="whole number of examples") as caught:
        simulated(NoUnit)
    assert "weight_unit = 0.5" in caught.value.remedy


def test_weights_that_each_call_rounds_are_found_over_many_cuts() -> None:
    class Rounded(Weighted):
        weight_unit = 1

        def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, dict[str, Any]]:
            loss, weight, metrics = super().loss_sum(model, batch)
            return loss, int(weight), metrics

    for seed in range(6):

        class Others(Rounded):
            offset = 100 * seed

            def train_examples(self, *, data: Any, part: int, num_parts: int) -> TensorDataset:
                return super().train_examples(data=data, part=part + self.offset, num_parts=1)

        with pytest.raises(TaskNotAdditive, match="each call rounds it") as caught:
            simulated(Others, rounds=1)
        assert "weight_unit" in caught.value.remedy


def test_a_penalty_beside_an_algorithm_of_one_s_own_is_refused() -> None:
    class Own:
        def train(self, work: Any) -> Tensor:
            found: Tensor = work.sum()
            return found

    with pytest.raises(SettingsError, match="the task has a penalty"):
        simulated(Penalised, client_algorithm=Own)


def test_a_penalty_that_is_no_scalar_is_refused_before_the_first_round() -> None:
    class Vector(Penalised):
        def penalty(self, model: Any) -> Tensor:
            found: Tensor = model.scale.square()
            return found

    with pytest.raises(TaskError, match="must return a finite scalar"):
        simulated(Vector)


class OnBoth(Weighted):
    """A penalty on the shared weight, and on the bias that stays on each device."""

    def penalty(self, model: Any) -> Tensor:
        found: Tensor = 0.05 * model.weight.square().sum() + 0.1 * model.bias.square().sum()
        return found


def test_parameters_that_stay_on_the_device_have_the_penalty_once(tmp_path: Path) -> None:
    simulated(
        OnBoth(),
        local_parameters="bias",
        local_learning_rate=RATE,
        out=tmp_path,
        accumulation_steps=4,
        settings={"secure.min_quota": 1},
    )
    task = OnBoth()
    torch.manual_seed(5)
    model: Any = task.new_model()
    weight = model.weight.detach().clone()
    biases = [model.bias.detach().clone() for _ in range(NUM_CLIENTS)]
    for _ in range(NUM_ROUNDS):
        sums, total = torch.zeros_like(weight), 0.0
        for part in range(NUM_CLIENTS):
            with torch.no_grad():
                model.weight.copy_(weight)
                model.bias.copy_(biases[part])
            tensors = task.train_examples(data=None, part=part, num_parts=4).tensors
            loss, found, _ = task.loss_sum(model, tensors)
            of_weight, of_bias = torch.autograd.grad(loss, (model.weight, model.bias))
            sums, total = sums + of_weight, total + float(found)
            biases[part] = biases[part] - RATE * (of_bias / found + 0.2 * biases[part])
        weight = weight - RATE * (sums / total + 0.1 * weight)
    for part, bias in enumerate(biases):
        own = tmp_path / f"local/{part}.safetensors"
        kept: Any = headwater.load_model(tmp_path, OnBoth(), local=own)
        torch.testing.assert_close(kept.weight.detach(), weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(kept.bias.detach(), bias, rtol=1e-5, atol=1e-6)


def test_a_penalty_that_mixes_shared_and_own_parameters_is_refused() -> None:
    class Mixed(Weighted):
        def penalty(self, model: Any) -> Tensor:
            found: Tensor = (model.weight.square().sum() + model.bias.square().sum()).sqrt()
            return found

    with pytest.raises(TaskError, match="depends on those that stay on the device"):
        simulated(Mixed, local_parameters="bias")
