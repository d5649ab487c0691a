"""A feature's sums have the same bits with aggregators as without them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import headwater
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds import checkpoint
from tests.own_feature.plain import LOCAL, vector
from tests.own_feature.test_own_features import SCAFFOLD, named
from tests.python_tasks import SIGNS

CLIENTS, BRANCHES = 7, 3
PLAIN: dict[str, Any] = {"rounds": 4, "clients": CLIENTS, "progress": False}
ALONE: dict[str, Any] = {"accumulation_steps": 2, "micro_batch_size": 5}
UNEVEN: dict[str, Any] = {"settings": {"cohort.weighting": "dataset"}, "dropout": 0.3}


def state_after(
    out: Path, feature: str, *, aggregators: int, **given: Any
) -> tuple[Tensor, Any, Mapping[str, Tensor]]:
    """Return a run's model, and what its feature keeps: of each round's sums, or of their total."""
    settings = {**given.pop("settings", {}), "simulation.aggregators": aggregators}
    settings["simulation.compute"] = "one-by-one"
    headwater.simulate(SIGNS, **PLAIN | given, feature=feature, out=out, settings=settings)
    saved = checkpoint.load(out)
    assert saved is not None
    tensors = {key: one for own in saved.features.values() for key, one in own.items()}
    return vector(headwater.load_model(out)), saved.progress.features, tensors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "given"),
    [
        (SCAFFOLD, LOCAL | {"clients": CLIENTS, **UNEVEN}),
        (named("Thirds"), UNEVEN),  # a sum and a mean, which a fixed point rounds
        (named("OneClientAlone"), {}),  # the plans of two branches ask for no sum
        (named("Census"), ALONE),  # rounds without the model's sum
    ],
)
def test_aggregators_lead_to_the_sums_and_model_of_a_flat_run_bit_for_bit(
    feature: str, given: Mapping[str, Any], tmp_path: Path
) -> None:
    flat = state_after(tmp_path / "flat", feature, aggregators=1, **given)
    tree = state_after(tmp_path / "tree", feature, aggregators=BRANCHES, **given)
    assert tree[0].equal(flat[0])
    assert tree[1] == flat[1]
    assert tree[2].keys() == flat[2].keys()
    assert all(tensor.equal(flat[2][name]) for name, tensor in tree[2].items())


def test_sums_of_aggregators_are_of_the_devices_that_did_not_drop_out(tmp_path: Path) -> None:
    _, features, _ = state_after(tmp_path, named("Ones"), aggregators=BRANCHES, dropout=0.3)
    numbers = [len(row["clients"]) for row in read_rows(tmp_path)]
    assert min(numbers) < CLIENTS
    assert features["ones"]["seen"] == [[1.0, float(number)] for number in numbers]
