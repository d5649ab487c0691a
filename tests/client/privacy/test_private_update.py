"""What leaves a device in a private round: a clipped vector, and nothing else of its data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from headwater.client.flower.state_file import SAMPLER
from headwater.common.flower import records
from headwater.common.messages import Plan
from tests.masked import AppDevice, DeviceReply, model, plan, train

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

OF_THE_MACHINE = ("name", "seconds", "vitals")


def private(bound: float = 1.0, **changes: Any) -> Plan:
    terms = {"norm_bound": bound, "noise_multiplier": 1.0}
    return plan(privacy=terms, **{"is_masked": False, **changes})


def values_of(sent: DeviceReply) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    assert sent.vector is not None
    return np.frombuffer(sent.vector, np.float32).astype(np.float64)


def head_of(sent: DeviceReply) -> dict[str, Any]:
    """Return a report without the figures of the machine."""
    head: dict[str, Any] = json.loads(sent.head)
    for step in head.get("steps", []):
        del step["seconds"]
    return {key: value for key, value in head.items() if key not in OF_THE_MACHINE}


def test_a_private_update_is_the_clipped_plain_one() -> None:
    plain = values_of(train(AppDevice(0), plan(is_masked=False)))
    length = float(np.linalg.norm(plain))
    assert length > 0
    found = values_of(train(AppDevice(0), private(length / 4)))
    np.testing.assert_allclose(found, plain / 4, rtol=3e-6, atol=0)
    assert float(np.linalg.norm(found)) <= length / 4
    np.testing.assert_array_equal(values_of(train(AppDevice(0), private(2 * length))), plain)


def test_reports_of_unlike_data_and_models_are_alike() -> None:
    sent = [train(AppDevice(part), private()) for part in range(3)]
    broken = torch.full((len(model()) // 4,), math.nan).numpy().tobytes()
    sent.append(train(AppDevice(3), private(), broken))
    heads = [head_of(one) for one in sent]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["weight"] == heads[0]["num_examples"] == plan().quota
    assert heads[0]["loss_sum"] == 0
    assert not heads[0].get("metric_sums")
    assert len(values_of(sent[0])) == len(values_of(sent[3]))
    assert float(np.linalg.norm(values_of(sent[0]))) > 0


def test_a_device_without_one_finite_example_sends_zeros_and_goes_on() -> None:
    device = AppDevice(0)
    broken = torch.full((len(model()) // 4,), math.nan).numpy().tobytes()
    assert not values_of(train(device, private(), broken)).any()
    state = records.load_state(device.context, SAMPLER)
    assert state is not None
    assert state["pending_round"] == 1  # as for any other update


def test_local_steps_that_diverge_send_zeros() -> None:
    wild = private(local_steps=2, local_learning_rate=1e30)
    found = values_of(train(AppDevice(0), wild))
    assert np.isfinite(found).all()
    assert float(np.linalg.norm(found)) <= 1.0


def test_a_private_masked_update_announces_no_metric() -> None:
    clear = json.loads(train(AppDevice(0), plan()).head)
    hidden = json.loads(train(AppDevice(1), private(is_masked=True)).head)
    assert not hidden.get("metrics")
    assert hidden.keys() <= clear.keys() | {"metrics"}


def bit_of(sent: DeviceReply) -> int | None:
    found: int | None = json.loads(sent.head).get("clip_bit")
    return found


def test_a_device_tells_whether_its_vector_was_within_the_clip_norm_if_asked() -> None:
    length = float(np.linalg.norm(values_of(train(AppDevice(0), plan(is_masked=False)))))
    found = []
    for bound in (length / 4, 2 * length):
        terms = {"norm_bound": bound, "noise_multiplier": 1.0, "bit_multiplier": 4.0}
        found.append(train(AppDevice(0), plan(privacy=terms, is_masked=False)))
    assert [bit_of(sent) for sent in found] == [0, 1]
    assert len({len(json.dumps(head_of(sent))) for sent in found}) == 1  # of one length on the wire
    assert bit_of(train(AppDevice(0), private(length / 4))) is None


def test_a_vector_that_is_not_finite_counts_as_within_the_clip_norm() -> None:
    broken = torch.full((len(model()) // 4,), math.nan).numpy().tobytes()
    terms = {"norm_bound": 1.0, "noise_multiplier": 1.0, "bit_multiplier": 4.0}
    sent = [train(AppDevice(0), plan(privacy=terms, is_masked=False), broken)]
    wild = plan(privacy=terms, is_masked=False, local_steps=2, local_learning_rate=1e30)
    sent.append(train(AppDevice(1), wild))
    assert [bit_of(one) for one in sent] == [1, 1]
    assert not any(values_of(sent[0]))
