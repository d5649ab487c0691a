"""``backward`` adds the gradients of ``Tensor.backward``, to the bit; each pass draws its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.client.training import gradient_pass
from headwater.client.training.gradient_pass import InvalidGradients, backward


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3))
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 0.125)
    return made


def loss_of(one: nn.Module) -> Tensor:
    torch.manual_seed(5)
    loss: Tensor = one(torch.randn(4, 7)).square().sum()
    return loss


def gradients(one: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in one.parameters()]


class Drawn:
    """Examples that are all alike, and the dropout that each pass draws for them."""

    def __init__(self) -> None:
        self.masks: list[tuple[int, ...]] = []

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64, bias=False), nn.Dropout(0.5))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.ones(8, 4))

    def loss_sum(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        outputs = model(batch[0])
        self.masks.append(tuple((outputs == 0).int().flatten().tolist()))
        return outputs.sum(), len(outputs)


def test_each_client_micro_batch_and_epoch_draws_dropout_of_its_own_and_again_the_same() -> None:
    drawn = []
    for _ in range(2):
        task = Drawn()
        headwater.simulate(
            task,
            clients=3,
            rounds=4,
            accumulation_steps=2,
            micro_batch_size=2,
            learning_rate=1e-6,
            settings={"simulation.compute": "one-by-one"},
        )
        drawn.append(task.masks[-3 * 4 * 2 :])  # before them the check of the task
    assert len({*drawn[0]}) == 3 * 4 * 2
    assert drawn[0] == drawn[1]


def test_its_gradients_equal_those_of_tensor_backward() -> None:
    ours, public = model(1), model(1)
    before = gradients(ours)
    backward(loss_of(ours))
    loss_of(public).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(gradients(ours), gradients(public), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert all(a is b for a, b in zip(gradients(ours), before, strict=True))  # added in place


def test_the_graph_is_freed_after_the_pass() -> None:
    loss = loss_of(model(1))
    backward(loss)
    with pytest.raises(InvalidGradients, match="second time"):
        backward(loss)


def test_a_loss_without_a_graph_adds_nothing() -> None:
    ours = model(1)
    backward(loss_of(ours))
    before = [gradient.clone() for gradient in gradients(ours) if gradient is not None]
    backward(torch.ones(()))
    after = [gradient for gradient in gradients(ours) if gradient is not None]
    assert all(map(torch.equal, before, after))


def test_a_float64_loss_uses_tensor_backward() -> None:
    leaf = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    backward((leaf * leaf).sum())
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("does", ["raises", "adds nothing"])
def test_tensor_backward_is_used_if_the_engine_differs(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*args: Any, **kwargs: Any) -> None:
        if does == "raises":
            raise TypeError("run_backward() got an unexpected keyword argument")

    class Engine:
        run_backward = staticmethod(other)

    engine = torch.autograd.Variable._execution_engine
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine)
    gradient_pass._autograd_engine.cache_clear()
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    try:
        assert gradient_pass._autograd_engine() is None
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
        backward((leaf * leaf).sum())
    finally:
        gradient_pass._autograd_engine.cache_clear()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 6.0]
