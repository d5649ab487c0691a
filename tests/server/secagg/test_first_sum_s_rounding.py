"""A first masked sum of gradients so small that its steps show in them is named."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import headwater
from tests.python_tasks import Signs


class Faint(Signs):
    """As ``Signs``, with a loss that is multiplied by ``SCALE``."""

    SCALE = 1e-7

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        loss, weight, metrics = super().loss_sum(model, batch)
        return self.SCALE * loss, weight, metrics


@pytest.mark.parametrize(("task", "is_said"), [(Faint, True), (Signs, False)])
def test_a_first_sum_that_is_mostly_rounding_is_said_once(
    task: type[Signs], is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"clients": 4, "rounds": 2, "accumulation_steps": 2, "progress": False}
    given |= {"optimizer": "sgd", "learning_rate": 1e6, "secure_aggregation": "semi-honest"}
    headwater.simulate(task, **given | ({} if is_said else {"learning_rate": 0.1}))
    said = [one.getMessage() for one in caplog.records if "its rounding" in one.getMessage()]
    assert len(said) == is_said
    assert all(text.startswith("round 1: the largest mean gradient") for text in said)


def test_gradients_that_round_to_nothing_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Faint, "SCALE", 1e-12)
    given: dict[str, Any] = {"clients": 4, "rounds": 1, "accumulation_steps": 2, "progress": False}
    headwater.simulate(Faint, **given, secure_aggregation="semi-honest")
    assert "the largest mean gradient of the first masked sum is 0" in caplog.text
