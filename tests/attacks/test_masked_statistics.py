"""A lying server asks for statistics twice, or for more beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.common.errors import ProtocolMismatch, UpdateAlreadyMasked
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan
from headwater.common.secagg.masked_numbers import NUM_EXAMPLES
from headwater.common.statistics.columns import columns_of
from headwater.common.statistics.terms import FoundSums, StatisticsTerms
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.masked import NodeDevice, opening_of, plan, play, train, trainer
from tests.statistics.measured import Houses

MEMBERS = 4
TASK = "./tests/statistics/measured.py:Houses"
OWNED = [20 + part for part in range(MEMBERS)]
COLUMNS = columns_of(Houses())
ASKED = StatisticsTerms(
    columns=COLUMNS.digest, num_counts=COLUMNS.num_counts, num_moments=COLUMNS.num_moments
)


def cohort(folder: Path) -> list[NodeDevice]:
    secure = {"aggregation": "semi-honest", "order_seed": None}
    return [NodeDevice(part, folder, task=TASK, secure=secure) for part in range(MEMBERS)]


def asking(round_number: int = 1, *terms: Any, **changes: Any) -> Plan:
    given = {"quota": 64, "micro_batch_size": 64, "answer_seconds": 0.05, "num_invited": MEMBERS}
    return plan(round_number, **given, **changes).asking(*terms)


def image(*, shift: float = 0.0) -> bytes:
    values = torch.frombuffer(bytearray(trainer(TASK).image.buffer()), dtype=torch.float32)
    return (values + shift).numpy().tobytes()


def opened(devices: list[NodeDevice], given: Plan) -> UnmaskedSum:
    """Send a plan, and run its session."""
    model = trainer(TASK).image
    for device in devices:
        train(device, given, image())
    opening = opening_of(
        devices,
        given,
        task=trainer(TASK).task_code,
        model_digest=given.digest_at(model.digest),
        num_values=model.layout.num_parameters,
        sums=given.extra_sums(model.layout.num_parameters).of,
    )
    played = play(devices, opening)
    assert not played.refused
    return played.sum


def measured(devices: list[NodeDevice], given: Plan) -> list[int]:
    """Run a session of statistics; return the sums of the counts."""
    found = opened(devices, given)
    assert not found.vector_P.any()  # zeros, and no gradient
    steps: list[int] = found.sums_S.view(np.int64)[: COLUMNS.num_counts].tolist()
    return steps


def test_a_device_masks_its_statistics_in_one_sum_alone(tmp_path: Path) -> None:
    """Two sums would differ by the members that are in only one of them."""
    devices = cohort(tmp_path)
    counts = measured(devices, asking(1, ASKED))
    found = COLUMNS.found(counts, [0.0] * COLUMNS.num_moments)
    assert found["inputs"].num == [sum(OWNED)] * 3
    for number, changes in ((2, {}), (3, {"run_seed": 9})):
        for again in (devices[0], NodeDevice(0, tmp_path, task=TASK)):
            with pytest.raises(UpdateAlreadyMasked):
                train(again, asking(number, ASKED, **changes), image(shift=1.0))


def test_statistics_use_up_no_example_of_the_first_model(tmp_path: Path) -> None:
    devices = cohort(tmp_path)
    measured(devices, asking(1, ASKED))
    ones = FoundSums(counts=(1,) * COLUMNS.num_counts, moments=(0.5,) * COLUMNS.num_moments)
    found = opened(devices, asking(2, ASKED.model_copy(update={"found": ones})))
    assert found.numbers[NUM_EXAMPLES] == sum(OWNED)
    assert found.vector_P.any()


@pytest.mark.parametrize(
    "terms",
    [
        (ASKED, LocalPlan(steps=2, learning_rate=0.1)),
        (ASKED.model_copy(update={"columns": "ab" * 32}),),
        (ASKED.model_copy(update={"num_counts": 1}),),
    ],
    ids=["more beside them", "other bounds", "other lengths"],
)
def test_a_plan_of_other_statistics_than_the_device_s_own_is_refused(
    tmp_path: Path, terms: Any
) -> None:
    (device, *_) = cohort(tmp_path)
    with pytest.raises(ProtocolMismatch):
        train(device, asking(1, *terms), image())
