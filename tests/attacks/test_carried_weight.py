"""A device of many rounds beside new ones: what compression left out would be most of their sum."""

from __future__ import annotations

import hashlib

import pytest

from headwater.common.compression.encoding import coding_of
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import WeightTooLarge
from headwater.common.messages import Plan
from headwater.common.secagg.masked_numbers import bounds_of
from tests.masked import AppDevice, Device, Played, model, opening_of, plan, play, train, trainer

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

QUOTA, FRACTION, NUM_ROUNDS = 8, 0.05, 30
NUM_VALUES = trainer().image.layout.num_parameters


def plan_of(number: int) -> Plan:
    terms = CompressionTerms(method="random-k", fraction=FRACTION)
    return plan(number, quota=QUOTA, compression=terms, counted_round=number - 1 or None)


def image_of(number: int) -> bytes:
    """Return another model for each round."""
    values = bytearray(model())
    values[0:4] = number.to_bytes(4, "little")
    return bytes(values)


def masked_round(devices: list[Device], number: int) -> Played:
    asked, image = plan_of(number), image_of(number)
    for device in devices:
        train(device, asked, image)
    setup = opening_of(
        devices,
        asked,
        model_digest=hashlib.sha256(image).digest(),
        num_values=coding_of(asked).positions(NUM_VALUES).number,
        bounds=bounds_of((), largest_weight=QUOTA, max_examples=QUOTA),
    )
    return play(devices, setup)


@pytest.mark.slow
def test_a_device_of_many_rounds_refuses_to_be_most_of_a_sum_with_new_ones() -> None:
    fleet: list[Device] = [AppDevice(part) for part in range(8)]
    for number in range(1, NUM_ROUNDS):
        assert not masked_round(fleet[:3], number).refused
    played = masked_round([fleet[0], *fleet[3:]], NUM_ROUNDS)
    assert isinstance(played.refused["d0"], WeightTooLarge)
    assert "carried from earlier rounds" in str(played.refused["d0"])
    assert set(played.sum.survived) == {device.name for device in fleet[3:]}
    for number in range(NUM_ROUNDS + 1, NUM_ROUNDS + 30):
        played = masked_round([fleet[0], *fleet[3:]], number)
        if not played.refused:
            return
    pytest.fail("the device never finds members of its weight")
