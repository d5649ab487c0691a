"""Statistics with noise: its spread is the stated one, and the epsilon counts it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import headwater
from headwater.client.privacy.private_update import private_update
from headwater.common.errors import CountOutOfRange, PrivacySpent, SettingsError
from headwater.common.messages import Plan, Update
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.statistics.columns import Columns
from headwater.common.statistics.terms import COUNTS, MOMENTS
from headwater.common.terms import named
from headwater.server.privacy.accountant import Accountant
from headwater.server.privacy.admission import admit

NUM_LABELS, CLIENTS, SIZE = 4000, 4, 40
GIVEN: dict[str, Any] = {
    "clients": CLIENTS,
    "accumulation_steps": 2,
    "micro_batch_size": 5,
    "rounds": 3,
    "statistics": True,
    "progress": False,
}
UNITS: dict[str, dict[str, Any]] = {
    "example": {"privacy_unit": "example"},
    "device": {"statistics_examples": SIZE},
}


class Words:
    """Each example has one word, which is 0 or 1, of a large vocabulary, and a number."""

    measured: ClassVar = {
        "word": headwater.Counts(NUM_LABELS),
        "number": headwater.Moments(0, 10),
    }
    found: headwater.Statistics | None = None

    def new_model(self) -> nn.Module:
        return nn.Linear(1, 2)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        numbers = torch.arange(SIZE).float()[:, None] % 10
        return TensorDataset(numbers, torch.arange(SIZE) % 2)

    def statistics(self, example: tuple[Tensor, Tensor]) -> Mapping[str, Any]:
        number, word = example
        return {"word": int(word), "number": number}

    def use_statistics(self, found: headwater.Statistics) -> None:
        self.found = found

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, labels = batch
        if self.found is not None:
            inputs = self.found["number"].scaled(inputs)
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def measured_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "statistics.json").read_text())
    return found


@pytest.mark.parametrize("engine", ["in-process", pytest.param("grpc", marks=pytest.mark.slow)])
@pytest.mark.parametrize("unit", UNITS)
def test_the_noise_has_the_stated_spread(unit: str, engine: str, tmp_path: Path) -> None:
    settings = {"simulation.engine": engine}
    given = GIVEN | UNITS[unit] | {"privacy_noise_multiplier": 0.5}
    task = f"{__file__}:Words"
    headwater.simulate(task, out=tmp_path, settings=settings, **given)
    # A word, and of a number: that it is there, beyond its bounds or not, its bin, two moments.
    bound = math.sqrt(1 + 5) * (1 if unit == "example" else SIZE)
    counts = np.array(measured_in(tmp_path)["word"]["counts"])
    noise = counts[2:]
    assert (noise >= 0).all()  # below 0 there is no count
    is_half = abs((noise > 0).mean() - 0.5)
    assert is_half < 6 * 0.5 / math.sqrt(len(noise)) + 0.5 / bound
    spread = math.sqrt(2 * float((noise.astype(float) ** 2).mean()))
    assert spread == pytest.approx(0.5 * bound, rel=0.15)
    total = CLIENTS * SIZE
    assert abs(counts[:2] - total / 2).max() < 7 * 0.5 * bound


@pytest.mark.parametrize("unit", UNITS)
def test_the_epsilon_counts_the_statistics_as_one_round(unit: str, tmp_path: Path) -> None:
    given = GIVEN | UNITS[unit] | {"privacy_noise_multiplier": 2.0, "rounds": 5}
    run = headwater.simulate(Words, out=tmp_path, **given)
    spent = [row.epsilon for row in run.history]
    # Four rounds of a quarter of the examples use each example once more.
    number = 2 if unit == "example" else 5
    assert spent[0] == pytest.approx(Accountant(1e-5, [(2.0, 1)]).epsilon)
    assert spent[-1] == pytest.approx(Accountant(1e-5, [(2.0, number)]).epsilon)


@pytest.mark.parametrize("unit", UNITS)
def test_a_run_with_statistics_stays_within_its_epsilon(unit: str, tmp_path: Path) -> None:
    given = GIVEN | UNITS[unit] | {"privacy_epsilon": 3.0, "rounds": 6}
    run = headwater.simulate(Words, out=tmp_path, **given)
    spent = [row.epsilon for row in run.history if row.epsilon is not None]
    assert len(spent) == 6
    assert 2.9 < spent[-1] <= 3.0
    multipliers = {f"{row.noise_multiplier:.6g}" for row in run.history}
    assert len(multipliers) == 1  # the statistics get the same part of the epsilon
    with pytest.raises(PrivacySpent):
        headwater.simulate(Words, out=tmp_path, resume=True, **given | {"rounds": 12})


def test_a_resumed_run_has_the_same_noisy_statistics(tmp_path: Path) -> None:
    given = GIVEN | UNITS["example"] | {"privacy_noise_multiplier": 1.0}
    headwater.simulate(Words, out=tmp_path, **given)
    before = measured_in(tmp_path)
    (tmp_path / "statistics.json").unlink()
    run = headwater.simulate(Words, out=tmp_path, resume=True, **given | {"rounds": 4})
    assert measured_in(tmp_path) == before
    assert len(run.history) == 4


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"secure_aggregation": "semi-honest", **UNITS["device"]}, "masked sums"),
        ({"statistics_examples": 65_536}, "--statistics-examples"),
        ({"privacy_bands": 2, "cohort_size": 2, **UNITS["device"]}, "--privacy-bands"),
    ],
)
def test_noise_that_statistics_cannot_have_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        headwater.simulate(Words, **GIVEN | {"privacy_epsilon": 8.0} | changed)
    assert text in f"{refused.value.message} {refused.value.remedy}"


def test_an_example_with_many_values_adds_no_more_than_one_with_one() -> None:
    kinds: dict[str, Any] = {"words": headwater.Counts(3), "parts": headwater.Histogram([0, 1, 2])}
    columns = Columns(kinds)

    class Task:
        def statistics(self, example: Any) -> Any:
            return dict(zip(kinds, example, strict=True))

    one, many = ([0], 0.5), ([1] * 40 + [2] * 9, [0.5] * 10)
    counts_C, _, num_clipped = columns.clipped_sums(Task(), [one, one])
    assert num_clipped == 0
    assert counts_C.tolist() == columns.sums(Task(), [one, one])[0].tolist()
    counts_C, moments_M, num_clipped = columns.clipped_sums(Task(), [many])
    assert num_clipped == 1
    assert np.linalg.norm([*counts_C, *moments_M]) == pytest.approx(columns.example_bound)
    assert counts_C[1] / counts_C[2] == pytest.approx(40 / 9)


def test_the_largest_values_that_one_example_can_have_are_within_the_bound() -> None:
    generator = np.random.default_rng(0)
    columns = Columns({"numbers": headwater.Moments(-1, [1, 2], size=2), "c": headwater.Counts(2)})

    class Task:
        def statistics(self, example: Any) -> Any:
            return {"numbers": example, "c": 5}

    odd = [(math.nan, 0), (math.inf, -math.inf), (5, 5), (-5, -5), (1, 2), (-1, -1)]
    for values in [*odd, *generator.normal(0, 2, (200, 2))]:
        row = np.concatenate(columns.sums(Task(), [values]))
        assert np.linalg.norm(row) <= columns.example_bound


def test_sums_beyond_what_the_noise_is_for_are_refused() -> None:
    terms = PrivacyTerms(norm_bound=10.0, noise_multiplier=1.0)

    def update(largest: float) -> Update:
        sums = {COUNTS: torch.tensor([largest, 8.0]), MOMENTS: torch.tensor([0.5])}
        plan = Plan(
            round=1,
            run_seed=0,
            model_version=0,
            quota=4,
            micro_batch_size=4,
            terms=named(terms),
        )
        sent = private_update(plan, terms, torch.zeros(0), name="a", weight=4)
        return replace(sent, sums=sums)

    admit(update(5.9), terms)
    with pytest.raises(CountOutOfRange):
        admit(update(6.1), terms)
