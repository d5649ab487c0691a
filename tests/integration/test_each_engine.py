"""One short run of each engine: what `make test` knows of processes, sockets and masks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.simulation.run import run_engine

pytestmark = pytest.mark.engine

ROUNDS = 2
CHOSEN = {
    "task": "examples/synthetic.py:Synthetic",
    "threads": 1,
    "rounds": ROUNDS,
    "plan.accumulation_steps": 2,
    "plan.micro_batch_size": 4,
    "simulation.clients": 4,
}
# The same sums in another order, or in fixed point: relative to the size of the parameters.
ANOTHER_ORDER = 1e-5
FIXED_POINT = 1e-3


def run(
    out: Path, *, resume: bool = False, changes: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    settings = load(None, {**CHOSEN, "out": out, **(changes or {})})
    run_engine(settings, on_round=lambda row: None, resume=resume)
    return load_file(out / MODEL)


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run(tmp_path_factory.mktemp("one"), changes={"simulation.compute": "one-by-one"})


def test_one_by_one_trains(one_by_one: dict[str, torch.Tensor], tmp_path: Path) -> None:
    first = run(tmp_path, changes={"rounds": 1})
    assert any((first[name] != one_by_one[name]).any() for name in first)


@pytest.mark.parametrize("compute", ["vectorised", "fused"])
def test_devices_computed_together_give_the_model_of_one_by_one(
    compute: str, one_by_one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    together = run(tmp_path, changes={"simulation.compute": compute})
    for name, tensor in one_by_one.items():
        torch.testing.assert_close(together[name], tensor, rtol=ANOTHER_ORDER, atol=ANOTHER_ORDER)


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_masked_updates_give_the_model_of_plain_ones(
    mode: str, one_by_one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    masked = run(tmp_path, changes={"secure.aggregation": mode})
    for name, tensor in one_by_one.items():
        torch.testing.assert_close(masked[name], tensor, rtol=FIXED_POINT, atol=FIXED_POINT)


def test_a_resumed_run_gives_the_bits_of_an_unbroken_one(
    one_by_one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run(tmp_path, changes={"rounds": 1})
    resumed = run(tmp_path, resume=True)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in one_by_one.items())


def test_a_server_and_clients_over_grpc_give_the_bits_of_the_simulator(
    one_by_one: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    networked = run(tmp_path, changes={"simulation.engine": "grpc"})
    assert all(torch.equal(networked[name], tensor) for name, tensor in one_by_one.items())
