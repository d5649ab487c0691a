"""A parameter that a loss trains and no update holds is refused by the attribute it is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwater.common.errors import TaskError
from tests.additivity import check_additive
from tests.tasks import TwoLayers, examples, squares


class Scaled(TwoLayers):
    """Multiplies the loss by a factor that is an attribute of the task."""

    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
        loss, weight = squares(model, batch)
        factor: Any = self.factor
        if isinstance(factor, list | dict):
            factor = factor[0]
        return loss * (factor.weight.sum() if hasattr(factor, "weight") else factor), weight


class Listed(TwoLayers):
    """Has its layers in a plain list, which registers none."""

    def new_model(self) -> nn.Module:
        model: Any = super().new_model()
        model.more = [nn.Linear(1, 1)]
        return model  # type: ignore[no-any-return]

    def loss_sum(self, model: Any, batch: Sequence[Tensor]) -> Any:
        outputs_B = model.more[0](model(batch[0])).squeeze(1)
        return (outputs_B - batch[1]).square().sum(), len(batch[0])


def check(task: Any) -> None:
    torch.manual_seed(0)
    check_additive(task, task.new_model(), examples(6))


@pytest.mark.parametrize(
    ("task", "place"),
    [
        (Scaled(nn.Linear(2, 2)), r"\(2, 2\) .*Scaled\.factor"),
        (Scaled([nn.Linear(2, 2)]), r"Scaled\.factor"),
        (Scaled({0: nn.Linear(2, 2)}), r"Scaled\.factor"),
        (Scaled(nn.Parameter(torch.ones(()))), r"Scaled\.factor"),
        (Scaled(torch.ones((), requires_grad=True)), r"Scaled\.factor"),
        (Listed(), r"model\.more"),
    ],
)
def test_a_parameter_outside_of_the_model_is_refused_by_its_place(task: Any, place: str) -> None:
    with pytest.raises(TaskError, match=place) as caught:
        check(task)
    assert "a part of the model in new_model" in caught.value.remedy


@pytest.mark.parametrize("factor", [torch.ones(()), nn.Linear(2, 2).requires_grad_(False)])
def test_a_factor_that_does_not_train_passes(factor: Any) -> None:
    check(Scaled(factor))
