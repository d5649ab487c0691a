"""Masked rounds: what a device sends in clear, what it masks, and in whose memory."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

from headwater.client.app import client_app
from headwater.client.device.hardware import ThisMachine
from headwater.client.device.interfaces import Speed, SpeedProbe
from headwater.client.masked_rounds.masked_description import SPEED_EXAMPLES
from headwater.client.secagg.pending import pending_in
from headwater.client.training.sampler import SamplerPosition
from headwater.common.errors import CorruptUpdate, SessionMismatch, UpdateNotHeld
from headwater.common.estimates.training_speed import reported_line
from headwater.common.flower import records
from headwater.common.messages import DeviceReport, ReadyReport
from headwater.common.secagg.fixed_point import decode_mean
from headwater.common.secagg.hadamard_rotation import (
    STEPS,
    Rotation,
    first_bounds,
    unrotate_in_place,
)
from headwater.common.secagg.masked_numbers import LOSS, NUM_EXAMPLES
from headwater.common.secagg.protocol import NUM_CLIPPED, WEIGHT, MaskRequest, UnmaskRequest
from tests.client.secagg.cohort import Between, describe, devices, make_setup, place_of, trained
from tests.faults import FaultPlan
from tests.masked import (
    RUN,
    AppDevice,
    DeviceReply,
    NodeDevice,
    ask,
    opening_of,
    plain_sum,
    plan,
    play,
    ready,
    sum_of,
    train,
    trainer,
)
from tests.training_contexts import FakeClock

SEMI_HONEST = {"aggregation": "semi-honest"}
pytestmark = pytest.mark.usefixtures("a_process_of_its_own")


# What leaves the device.


def test_a_masked_plan_is_answered_with_a_ready_report_alone() -> None:
    sent = train(AppDevice(0), plan())
    assert sent.vector is None
    assert json.loads(sent.head).keys() <= set(ReadyReport.model_fields)
    clear = train(AppDevice(0), plan(is_masked=False))
    assert clear.vector is not None
    hidden = {"num_examples", "weight", "loss_sum", "metric_sums", "steps"}
    assert hidden & json.loads(clear.head).keys()
    assert not hidden & json.loads(sent.head).keys()


@pytest.mark.parametrize("mode", ["semi-honest", "active"])
def test_the_opened_sum_is_that_of_the_updates(mode: str) -> None:
    expected = [plain_sum(part, plan()) for part in range(5)]
    cohort = trained(5)
    faults = FaultPlan().drop(client="d3", after="check_shares")
    opened = play(cohort, make_setup(cohort, mode=mode), faults).sum
    assert opened.survived == ("d0", "d1", "d2", "d4")
    there = [expected[part] for part in (0, 1, 2, 4)]
    np.testing.assert_array_equal(sum_of(opened), sum(values for values, _ in there))
    assert opened.numbers[WEIGHT] == sum(report.weight for _, report in there)
    assert opened.numbers[NUM_EXAMPLES] == sum(report.num_examples for _, report in there)
    assert opened.numbers[LOSS] == sum(report.loss_sum for _, report in there)
    assert opened.numbers[NUM_CLIPPED] == 0


def test_the_norm_and_the_noise_sums_are_masked() -> None:
    expected = [plain_sum(part, plan()) for part in range(3)]
    cohort = trained(3)
    numbers = play(cohort, make_setup(cohort)).sum.numbers
    squared = sum(float(values @ values) for values, _ in expected)
    # The norms are float64 sums of float32 products, each rounded to float32 at the end.
    assert numbers["squared_norm"] == pytest.approx(squared, rel=2.0**-21)
    assert numbers["noise.measured_weight"] == 24
    local = plan(local_steps=2)
    for device in cohort:
        ready(device, local)
    again = play(cohort, opening_of(cohort, local, attempt=2)).sum.numbers
    assert {value for name, value in again.items() if name.startswith("noise.")} == {0.0}


def test_a_sum_scaled_to_the_device_s_data_is_masked_with_the_scaled_weight() -> None:
    round_plan = plan(weigh_as=24)
    expected = [plain_sum(part, round_plan)[0] for part in range(3)]
    cohort = devices(3)
    for device in cohort:
        ready(device, round_plan)
    opened = play(cohort, opening_of(cohort, round_plan)).sum
    np.testing.assert_array_equal(sum_of(opened), sum(expected))
    assert (opened.numbers[WEIGHT], opened.numbers["summed_weight"]) == (72, 24)


def test_a_16_bit_ring_takes_its_bounds_from_the_message_s_array() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(3))
    num_values = trainer().image.layout.num_parameters
    rotation = Rotation(seed=bytes(range(32)), num_coordinates=num_values)
    bounds = first_bounds(rotation, bound=64.0)
    cohort = trained(3)
    chosen = make_setup(
        cohort, ring_bits=16, rotation_seed=rotation.seed, bounds_digest=_digest(bounds.tobytes())
    )
    opened = play(cohort, chosen, bounds=bounds.tobytes()).sum
    assert opened.numbers[NUM_CLIPPED] == 0
    mean_P = decode_mean(opened.vector_P, encoding=opened.session.parameters.encoding, weight=24)
    unrotate_in_place(mean_P, rotation=rotation, bounds=bounds, max_weight=24)
    # Each of 3 devices is off by less than a step of its 32,767 in each rotated coordinate.
    step = 64.0 / STEPS
    assert np.linalg.norm(mean_P - expected / 24) < 3 * step * math.sqrt(num_values) * 1.001


@pytest.mark.parametrize(
    ("beside", "error"),
    [(None, SessionMismatch), (bytes(8), SessionMismatch), (b"abc", CorruptUpdate)],
)
def test_nothing_is_masked_with_bounds_other_than_the_session_s(
    beside: bytes | None, error: type[Exception]
) -> None:
    num_values = trainer().image.layout.num_parameters
    bounds = first_bounds(Rotation(seed=bytes(32), num_coordinates=num_values))
    cohort = trained(3)
    chosen = make_setup(
        cohort, ring_bits=16, rotation_seed=bytes(32), bounds_digest=_digest(bounds.tobytes())
    )
    played = play(cohort, chosen, bounds=beside, until="masked_update")
    assert {type(found) for found in played.refused.values()} == {error}
    assert all(place_of(device) == SamplerPosition() for device in cohort)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# What a device tells of its capacity.


class Steady(ThisMachine):
    """A machine that was found to take 2 s an example, and takes 1."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    def speed(self, probe: SpeedProbe) -> Speed:
        return Speed(
            seconds_per_micro_batch=0.0, seconds_per_example=2.0, fastest_micro_batch_size=None
        )


def test_a_device_that_requires_masks_tells_its_speed_once_and_no_number_of_examples() -> None:
    machine = Steady()
    device = AppDevice(
        0, app=client_app(lambda identity, settings, layout: machine), secure=SEMI_HONEST
    )
    told = device.send("query.describe", describe())
    report = records.parse(told.head, DeviceReport)
    assert (report.num_examples, report.seconds_per_example) == (None, 2.0)
    assert ready(device, plan(answer_seconds=20.0)).seconds == 20.0  # of the simulated clock
    again = records.parse(device.send("query.describe", describe()).head, DeviceReport)
    assert again.seconds_per_example == 2.0
    declaring = AppDevice(1, secure={**SEMI_HONEST, "declared_examples": 500})
    report = records.parse(declaring.send("query.describe", describe()).head, DeviceReport)
    assert report.num_examples == 500


def test_a_real_device_measures_nothing_under_a_model_of_the_server_s(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path, secure=SEMI_HONEST)
    image = device.node.trainer.image
    image.values_P.add_(1.0)
    report = records.parse(device.send("query.describe", describe()).head, DeviceReport)
    assert report.seconds_per_example is None
    image.values_P.sub_(1.0)
    first = records.parse(device.send("query.describe", describe()).head, DeviceReport)
    assert first.seconds_per_example is not None
    image.values_P.add_(1.0)
    again = records.parse(device.send("query.describe", describe()).head, DeviceReport)
    # On zeros it may find that another program slowed the first measurement down.
    was, now = map(reported_line, (first, again))
    assert was is not None
    assert now is not None
    assert now.at(SPEED_EXAMPLES) <= was.at(SPEED_EXAMPLES)


# Whose memory holds the update.


def test_an_update_is_masked_in_place_unless_another_device_needs_the_memory() -> None:
    seen: list[bool] = []

    def look(sent: DeviceReply) -> None:
        assert sent.vector is not None
        masked = np.frombuffer(sent.vector, np.uint8)
        seen.append(np.shares_memory(masked, trainer().accumulator.values_P.numpy()))

    cohort = [Between(device, "masked_update", look) for device in trained(3)]
    play(cohort, opening_of(cohort, plan()))
    assert seen == [False, False, True]


def test_a_probe_during_the_session_leaves_the_update_unchanged() -> None:
    expected = sum(plain_sum(part, plan())[0] for part in range(3))
    cohort = trained(3)
    last = Between(
        cohort[2], "check_shares", lambda sent: cohort[2].send("query.describe", describe())
    )
    played = play([*cohort[:2], last], make_setup(cohort))
    np.testing.assert_array_equal(sum_of(played.sum), expected)


def test_a_probe_after_masking_leaves_the_masked_vector_unchanged() -> None:
    cohort = trained(3)
    play(cohort, make_setup(cohort), until="masked_update")
    wanted = MaskRequest(members=("d0", "d1", "d2"))
    before = bytes(ask(cohort[2], wanted).vector or b"")
    cohort[2].send("query.describe", describe())
    assert bytes(ask(cohort[2], wanted).vector or b"") == before


def test_a_survivor_releases_its_vector_once_the_server_has_it() -> None:
    cohort = trained(3)
    held = pending_in(trainer().accumulator).get(RUN, "d0")
    play(cohort, make_setup(cohort), until="masked_update")
    wanted = MaskRequest(members=("d0", "d1", "d2"))
    assert ask(cohort[0], wanted).vector is not None
    ask(cohort[0], UnmaskRequest(survived=("d0", "d1", "d2"), dropped=()))
    assert held.is_over
    with pytest.raises(UpdateNotHeld):
        ask(cohort[0], wanted)
