"""A task gets the round's number, on the server and on devices, in every way to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwater
from headwater.server.evaluate_model import evaluate
from tests.python_tasks import SIGNS, Annealed, Signs

ANNEALED = SIGNS.replace(":Signs", ":Annealed")
SMALL: dict[str, Any] = {
    "clients": 4,
    "rounds": 3,
    "optimizer": "sgd",
    "progress": False,
    "settings": {"evaluation.on_devices": True},
}


def settings(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes, "settings": {**SMALL["settings"], **changes.get("settings", {})}}


@pytest.fixture(scope="module")
def alone() -> headwater.Run:
    """The run that computes one device after another, in this process."""
    return headwater.simulate(Annealed, **settings(settings={"simulation.compute": "one-by-one"}))


def assert_same(run: headwater.Run, expected: headwater.Run) -> None:
    for ours, theirs in zip(run.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for row, other in zip(run.history, expected.history, strict=True):
        names = ("test_loss", "held_out_loss")
        assert [row.metrics[name] for name in names if name in row.metrics] == pytest.approx(
            [other.metrics[name] for name in names if name in row.metrics], rel=1e-4
        )
        assert row.loss == pytest.approx(other.loss, rel=1e-4)


def test_the_loss_of_a_round_is_that_of_its_number(alone: headwater.Run) -> None:
    for row in alone.history:
        plain = headwater.simulate(Signs, **settings(rounds=1))
        if row.round == 1:
            assert row.loss == pytest.approx(plain.history[0].loss)
    losses = [row.loss / row.round for row in alone.history]
    assert losses == sorted(losses, reverse=True)  # without the factor each is below the one before
    assert alone.history[2].loss > alone.history[0].loss


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"simulation.compute": "fused"}},
        {"settings": {"simulation.compute": "vectorised"}},
        {"secure_aggregation": "semi-honest", "settings": {"evaluation.on_devices": False}},
    ],
    ids=["fused", "vectorised", "masked"],
)
def test_every_way_to_compute_in_a_process_tells_the_round(
    changes: dict[str, Any], alone: headwater.Run
) -> None:
    run = headwater.simulate(Annealed, **settings(**changes))
    if "secure_aggregation" in changes:  # it sums the same examples, rounded
        assert run.history[2].loss > run.history[0].loss
    else:
        assert_same(run, alone)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"settings": {"simulation.workers": 2}}, {"engine": "grpc"}])
def test_other_processes_tell_the_round(changes: dict[str, Any], alone: headwater.Run) -> None:
    assert_same(headwater.simulate(ANNEALED, **settings(**changes)), alone)


def test_a_saved_model_is_evaluated_as_after_its_last_round(tmp_path: Path) -> None:
    run = headwater.simulate(ANNEALED, out=tmp_path / "run", **SMALL)
    (found,) = evaluate(tmp_path / "run", data=[], task=ANNEALED).results
    assert found.loss_sum / found.weight == pytest.approx(run.metrics["test_loss"], rel=1e-5)
