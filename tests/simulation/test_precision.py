"""Runs under ``--precision auto``: each is a run in the precision that the process chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings
from headwater.simulation.run import run_engine
from tests.adapted import TASK


def trained(out: Path, precision: str, **changes: Any) -> dict[str, torch.Tensor]:
    settings = {
        "task": TASK,
        "rounds": 1,
        "threads": 1,
        "out": out,
        "plan": {"accumulation_steps": 2, "micro_batch_size": 4, "precision": precision},
        **changes,
        "simulation": {"clients": 3, **changes.get("simulation", {})},
    }
    run_engine(Settings.model_validate(settings), on_round=lambda row: None, resume=False)
    return load_file(out / MODEL)


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], tensor) for name, tensor in other.items())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="one by one"),
        pytest.param({"simulation": {"compute": "fused"}}, id="fused", marks=pytest.mark.slow),
        pytest.param(
            {"secure": {"aggregation": "semi-honest"}}, id="messages", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_under_auto_is_one_in_float32_or_one_in_bfloat16(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    found = trained(tmp_path / "auto", "auto", **changes)
    ways = [trained(tmp_path / way, way, **changes) for way in ("float32", "bfloat16")]
    assert not are_equal(*ways)
    assert sum(are_equal(found, way) for way in ways) == 1
