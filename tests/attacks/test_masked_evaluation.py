"""A lying server tests a model twice, sends another one, or asks for more beside the test."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.evaluation.other_model import check_kept
from headwater.client.node_features import node_features
from headwater.common.errors import (
    CorruptUpdate,
    FeatureMissing,
    HeadwaterError,
    MaskingRequired,
    ProtocolMismatch,
    UpdateAlreadyMasked,
)
from headwater.common.evaluation.measures import measures_of
from headwater.common.evaluation.terms import COUNTS, HIGH, EvaluationTerms
from headwater.common.flower import records
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import EvaluateReport, Plan
from headwater.common.secagg.masked_numbers import NUM_EXAMPLES
from headwater.common.sums.named_sums import NamedSums
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.evaluation.evaluated import Three
from tests.masked import NodeDevice, opening_of, plan, play, train, trainer

MEMBERS, FRACTION = 4, 0.25
TASK = "./tests/evaluation/evaluated.py:Three"
OWNED = [40 + part for part in range(MEMBERS)]
HELD_OUT = [int(FRACTION * number) for number in OWNED]
MEASURES = measures_of(Three())


def image(shift: float = 0.0) -> bytes:
    values = torch.frombuffer(bytearray(trainer(TASK).image.buffer()), dtype=torch.float32)
    return (values.clone() + shift).numpy().tobytes()


IMAGES = {shift: image(shift) for shift in (0.0, 1.0, 2.0)}
"""Three models, made before a device has loaded one of them."""


def digest(shift: float) -> str:
    return hashlib.sha256(IMAGES[shift]).hexdigest()


def asked(shift: float = 0.0, **changes: Any) -> EvaluationTerms:
    fields = {
        "model": digest(shift),
        "measures": MEASURES.digest,
        "num_counts": MEASURES.num_counts,
        "num_reals": MEASURES.num_reals,
        "fraction": FRACTION,
    }
    return EvaluationTerms(**fields | changes)


def asking(round_number: int, *terms: Any, **changes: Any) -> Plan:
    given = {"quota": 64, "micro_batch_size": 64, "answer_seconds": 0.05, "num_invited": MEMBERS}
    return plan(round_number, **given | changes).asking(*terms)


def cohort(folder: Path) -> list[NodeDevice]:
    secure = {"aggregation": "semi-honest", "order_seed": None}
    return [NodeDevice(part, folder, task=TASK, secure=secure) for part in range(MEMBERS)]


def send_first(device: NodeDevice, given: Plan, shift: float) -> EvaluateReport:
    """Send the model to compare with."""
    first = given.model_copy(update={"model_version": 77})
    sent = device.send("evaluate", first.model_dump_json(), memoryview(IMAGES[shift]))
    return records.parse(sent.head, EvaluateReport)


def opened(devices: list[NodeDevice], given: Plan, shift: float = 0.0) -> UnmaskedSum:
    """Send a plan with a model, and run its session."""
    for device in devices:
        train(device, given, IMAGES[shift])
    num_values = trainer(TASK).image.layout.num_parameters
    opening = opening_of(
        devices,
        given,
        task=trainer(TASK).task_code,
        model_digest=given.digest_at(bytes.fromhex(digest(shift))),
        num_values=num_values,
        sums=given.extra_sums(num_values).of,
    )
    played = play(devices, opening)
    assert not played.refused
    return played.sum


def sum_of(found: UnmaskedSum, given: Plan, key: str) -> list[int]:
    """Return an opened sum of whole numbers."""
    asked: NamedSums = given.extra_sums(trainer(TASK).image.layout.num_parameters)
    start = 0
    for name, one in asked.of.items():
        if name == key:
            part = found.sums_S.view(np.int64)[start : start + one.length]
            whole: list[int] = part.tolist()
            return whole
        start += one.length
    raise KeyError(key)


def test_a_masked_test_opens_the_counts_of_all_members_alone(tmp_path: Path) -> None:
    given = asking(1, asked())
    found = opened(cohort(tmp_path), given)
    assert not found.vector_P.any()  # zeros, and no gradient
    counts = np.array(sum_of(found, given, COUNTS))
    result = MEASURES.found(counts, np.zeros(MEASURES.num_reals))
    assert sum(map(sum, result["confusion"]["matrix"])) == sum(HELD_OUT)
    assert set(sum_of(found, given, HIGH)) == {0}  # below 2^20


def test_a_device_masks_its_examples_in_one_test_of_a_model_alone(tmp_path: Path) -> None:
    devices = cohort(tmp_path)
    opened(devices, asking(1, asked()))
    # In another round, or after a restart: two sums would differ by who is in only one.
    for again in (devices[0], NodeDevice(0, tmp_path, task=TASK)):
        with pytest.raises(UpdateAlreadyMasked):
            train(again, asking(2, asked()), IMAGES[0.0])
    opened(devices, asking(3, asked(1.0), model_version=5), shift=1.0)


@pytest.mark.parametrize("shares", [(0.5, 0.55), (0.55, 0.5)])
def test_a_test_of_a_little_more_than_half_is_a_test_of_the_model_as_well(
    tmp_path: Path, shares: tuple[float, float]
) -> None:
    """A second sum without one of the members would show that one's part."""
    devices = cohort(tmp_path)
    first, second = shares
    opened(devices, asking(1, asked(fraction=first)))
    with pytest.raises(UpdateAlreadyMasked):
        train(devices[1], asking(2, asked(fraction=second)), IMAGES[0.0])


def test_a_comparison_is_a_test_of_both_models(tmp_path: Path) -> None:
    devices = cohort(tmp_path)
    both = asking(1, asked(0.0, other=digest(1.0)))
    for device in devices:
        assert send_first(device, both, 1.0) == EvaluateReport(
            name=device.name, weight=0, loss_sum=0.0
        )
    opened(devices, both)
    with pytest.raises(UpdateAlreadyMasked):
        train(devices[0], asking(2, asked(1.0), model_version=5), IMAGES[1.0])
    third = asking(3, asked(2.0, other=digest(1.0)), model_version=6)
    send_first(devices[0], third, 1.0)
    with pytest.raises(UpdateAlreadyMasked):
        train(devices[0], third, IMAGES[2.0])


def test_the_other_model_is_kept_until_the_device_leaves_the_run(tmp_path: Path) -> None:
    (device, *_) = cohort(tmp_path)
    both = asking(1, asked(0.0, other=digest(1.0)))
    send_first(device, both, 1.0)
    image, terms = trainer(TASK).image, both.of(EvaluationTerms)
    assert terms is not None
    check_kept(image, terms, name="d0")
    for feature in node_features(device.node):
        feature.left()
    with pytest.raises(FeatureMissing, match="has not come to this process"):
        check_kept(image, terms, name="d0")


def test_a_test_leaves_all_examples_to_the_training_of_its_model(tmp_path: Path) -> None:
    """A run trains on after a test of its model, with all examples."""
    devices = cohort(tmp_path)
    opened(devices, asking(1, asked()))
    found = opened(devices, asking(2, model_version=0))
    assert found.vector_P.any()
    assert found.numbers[NUM_EXAMPLES] == sum(OWNED)


def test_a_test_of_most_examples_is_one_of_the_model_s_own_sums(tmp_path: Path) -> None:
    """A sum of training and one of a test, both of all examples, would differ by a member."""
    devices = cohort(tmp_path)
    opened(devices, asking(1, asked(fraction=1.0)))
    with pytest.raises(UpdateAlreadyMasked):
        train(devices[0], asking(2, model_version=0), IMAGES[0.0])


@pytest.mark.parametrize(
    ("terms", "error"),
    [
        ((asked(), LocalPlan(steps=2, learning_rate=0.1)), ProtocolMismatch),
        ((asked(measures="ab" * 32),), ProtocolMismatch),
        ((asked(num_counts=1),), ProtocolMismatch),
        ((asked(other=digest(2.0)),), FeatureMissing),
    ],
    ids=["more beside it", "other counts", "other lengths", "a model that did not come"],
)
def test_a_plan_of_another_test_than_the_device_s_own_is_refused(
    tmp_path: Path, terms: Any, error: type[HeadwaterError]
) -> None:
    (device, *_) = cohort(tmp_path)
    with pytest.raises(error):
        train(device, asking(1, *terms), IMAGES[0.0])


def test_another_model_than_the_one_named_is_tested_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    devices = cohort(tmp_path)
    given = asking(1, asked(1.0))  # and the model that comes is another one
    with caplog.at_level("WARNING"):
        for device in devices:
            train(device, given, IMAGES[0.0])
    texts = [one.getMessage() for one in caplog.records]
    assert sum("is not the one that the plan names" in text for text in texts) == MEMBERS
    with pytest.raises(CorruptUpdate, match="is not the one that the plan compares with"):
        send_first(devices[0], asking(2, asked(0.0, other=digest(2.0))), 1.0)


def test_a_device_that_requires_masks_is_tested_in_clear_by_nobody(tmp_path: Path) -> None:
    (device, *_) = cohort(tmp_path)
    plain = plan(1, is_masked=False, quota=64).asking(asked())
    with pytest.raises(MaskingRequired):
        train(device, plain, IMAGES[0.0])
    with pytest.raises(MaskingRequired):
        device.send(
            "evaluate",
            plan(1, is_masked=False, held_out_fraction=0.1).model_dump_json(),
            memoryview(IMAGES[0.0]),
        )
