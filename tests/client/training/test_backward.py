"""The engine, called at once, adds the gradients that ``Tensor.backward`` adds, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.client.training import backward
from headwater.client.training.backward import run_backward


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


def test_the_engine_s_gradients_are_those_of_the_public_way() -> None:
    ours, public = model(1), model(1)
    before = gradients(ours)
    run_backward(loss_of(ours))
    loss_of(public).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(gradients(ours), gradients(public), strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert all(a is b for a, b in zip(gradients(ours), before, strict=True))  # added in place


def test_the_graph_is_gone_behind_a_pass_as_with_the_public_way() -> None:
    loss = loss_of(model(1))
    run_backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        run_backward(loss)


def test_a_loss_that_no_parameter_led_to_is_refused() -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        run_backward(torch.ones(()))


def test_a_loss_in_another_width_goes_the_public_way() -> None:
    leaf = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    run_backward((leaf * leaf).sum())
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("does", ["raises", "adds nothing"])
def test_where_the_engine_is_another_the_public_way_does_the_work(
    does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*args: Any, **kwargs: Any) -> None:
        if does == "raises":
            raise TypeError("run_backward() got an unexpected keyword argument")

    class Engine:
        run_backward = staticmethod(other)

    engine = torch.autograd.Variable._execution_engine
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", Engine)
    backward._engine.cache_clear()
    leaf = torch.tensor([2.0, 3.0], requires_grad=True)
    try:
        assert backward._engine() is None
        monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
        run_backward((leaf * leaf).sum())
    finally:
        backward._engine.cache_clear()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0, 6.0]
