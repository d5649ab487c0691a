"""Random coordinates under masks: sums in the ring, and what is left over rounds and dropouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwater.client.compression.error_feedback import LARGEST_MASKED, ErrorFeedback, MaskedLabel
from headwater.client.compression.residual_slots import ResidualsByCall
from headwater.common.compression.encoding import coding_of
from headwater.common.compression.low_rank import first_columns
from headwater.common.compression.terms import CompressionTerms, Matrix, Method
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.secagg.fixed_point import MAX_CLIP, decode, encode_in_place, plan_encoding
from tests.masked import plan as masked_plan
from tests.plans import plan_of as plain_plan_of

P = 300
EPS = 2.0**-24
LARGEST = 8.0
"""Above any coordinate of an update, in these tests."""
WEIGHT = 1000


def plan_of(number: int, counted: int | None, fraction: float) -> Plan:
    terms = CompressionTerms(method="random-k", fraction=fraction)
    return masked_plan(number, counted_round=counted, compression=terms)


class Device:
    """A device with random updates; it remembers what became of each."""

    def __init__(self, name: str, random: np.random.Generator) -> None:
        self.name, self._random = name, random
        self._stored: dict[int, bytes] = {}
        self.masked: str | None = None
        self.counted: int | None = None
        self.summed = np.zeros(P)
        """The updates that were masked or are in the residual."""
        self.sent = np.zeros(P)
        """What was masked, whether it counted or not."""
        self.update = torch.zeros(P)
        self.sent_K = torch.zeros(0)
        self.carried = 0

    def feedback(self) -> ErrorFeedback:
        """Return the device's residuals, as after a restart."""
        stored = self._stored
        slots = ResidualsByCall(
            self.name, load=stored.get, save=stored.__setitem__, delete=stored.pop
        )
        return ErrorFeedback(slots, "0" * 64)

    def train(self, plan: Plan, *, is_empty: bool = False) -> Tensor:
        values = np.clip(self._random.standard_normal(P), -LARGEST, LARGEST).astype(np.float32)
        self.update = torch.zeros(P) if is_empty else torch.from_numpy(values)
        label = MaskedLabel(update_id=f"round {plan.round}", model="", num_planned_before=0)
        self.sent_K, self.carried = self.feedback().gather(
            self.update.clone(),
            plan,
            weight=WEIGHT,
            label=label,
            was_masked=lambda one: one.update_id == self.masked,
        )
        return self.sent_K

    def mask(self, plan: Plan) -> None:
        self.masked = f"round {plan.round}"
        self.summed += self.update.double().numpy()
        self.sent += scattered(self.sent_K, plan).double().numpy()

    def left(self) -> Tensor:
        """Return what the last masked update left, as a plan with all coordinates sends it."""
        everything = plan_of(10**6, self.counted, 1.0)
        label = MaskedLabel(update_id="last", model="", num_planned_before=0)
        left, _ = self.feedback().gather(
            torch.zeros(P),
            everything,
            weight=WEIGHT,
            label=label,
            was_masked=lambda one: one.update_id == self.masked,
        )
        return left


def scattered(values_K: Tensor, plan: Plan) -> Tensor:
    values_P = torch.zeros(P)
    coding_of(plan).positions(P).scatter_add(values_K, values_P)
    return values_P


@given(
    fates=st.lists(
        st.lists(
            st.sampled_from(["counts", "dropped before", "dropped after", "empty"]),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=6,
    ),
    fraction=st.sampled_from([0.01, 0.2, 1.0]),
    seed=st.integers(0, 99),
)
def test_what_was_masked_and_what_is_left_are_all_updates_over_dropouts_and_restarts(
    fates: list[list[str]], fraction: float, seed: int
) -> None:
    """Each session's sum in the ring is the clear sum of the survivors, to the ring's rounding."""
    random = np.random.default_rng(seed)
    devices = [Device(str(n), random) for n in range(3)]
    for number, row in enumerate(fates, start=1):
        survivors = []
        plan = plan_of(number, None, fraction)
        for device, fate in zip(devices, row, strict=True):
            plan = plan_of(number, device.counted, fraction)
            device.train(plan, is_empty=fate == "empty")
            if fate != "dropped before":
                device.mask(plan)
            if fate in ("counts", "empty"):
                survivors.append(device)
                device.counted = number
        most = LARGEST * (number + 1)  # a coordinate waits for all rounds at most
        encoding = plan_encoding(max_weight=3, clip=most)
        ring_K = np.zeros(len(devices[0].sent_K), dtype=np.uint32)
        clear_K = np.zeros(len(ring_K))
        for device in survivors:
            clear_K += device.sent_K.double().numpy()
            ring_K += encode_in_place(device.sent_K, weight=1, encoding=encoding)[0]
        error = np.abs(decode(ring_K, encoding) - clear_K).max(initial=0.0)
        assert error <= len(survivors) * 2.0 ** -(encoding.scale_bits + 1)
    for device in devices:
        # Each round adds once in float32, to numbers of at most LARGEST per round.
        bound = len(fates) ** 2 * LARGEST * EPS
        total = device.sent + device.left().double().numpy()
        assert np.abs(total - device.summed).max() <= bound


def test_what_was_masked_is_not_masked_again_though_it_did_not_count() -> None:
    device = Device("pi", np.random.default_rng(0))
    plan = plan_of(1, None, 0.2)
    sent_K = device.train(plan).clone()
    device.mask(plan)
    again_P = scattered(device.train(plan_of(1, None, 1.0)), plan_of(1, None, 1.0)) - device.update
    at = coding_of(plan).positions(P).positions(0, len(sent_K))
    # In float32 a number that was added and subtracted again is off by a rounding.
    assert again_P[at].abs().max() <= LARGEST * EPS
    assert again_P.abs().max() > 0.1


def test_a_server_that_says_it_counted_what_was_never_masked_adds_up_no_rounds() -> None:
    device = Device("pi", np.random.default_rng(0))
    for number in range(1, 20):
        plan = plan_of(number, device.counted, 0.2)
        sent_K = device.train(plan)
        assert torch.equal(sent_K, coding_of(plan).positions(P).gather(device.update))
        device.counted = number


def test_an_update_that_entered_no_session_leaves_the_residual_before() -> None:
    device = Device("pi", np.random.default_rng(0))
    device.train(first := plan_of(1, None, 0.2))
    device.mask(first)
    device.counted = 1
    before = device.left().clone()
    device.train(plan_of(2, 1, 0.2))  # the session is aborted while keys are exchanged
    assert torch.equal(device.left(), before)


FACTORS: dict[str, Any] = {"rank": 4, "side": "right", "matrices": (Matrix(0, 15, 20),)}


@pytest.mark.parametrize("method", ["random-k", "low-rank"])
def test_an_update_that_overflows_is_cut_and_leaves_the_residual_before(method: Method) -> None:
    """Zeros would leave the others' sum to one member; a NaN stays in the residual for good."""
    device = Device("pi", np.random.default_rng(0))

    def gather(number: int, values_P: Tensor) -> Tensor:
        drawn = first_columns(FACTORS["matrices"], 4, np.random.default_rng(number))
        more = {"columns": drawn, **FACTORS} if method == "low-rank" else {"fraction": 0.2}
        terms = CompressionTerms(method=method, **more)
        sent_K, _ = device.feedback().gather(
            values_P,
            masked_plan(number, compression=terms),
            weight=WEIGHT,
            label=MaskedLabel(update_id=f"round {number}", model="", num_planned_before=0),
            was_masked=lambda one: True,
        )
        assert torch.isfinite(sent_K).all()
        assert sent_K.all()
        return sent_K

    largest = torch.finfo(torch.float32).max
    assert LARGEST_MASKED == MAX_CLIP
    gather(1, torch.ones(P))
    assert gather(2, torch.full((P,), largest)).abs().max() > MAX_CLIP / 2
    assert 1 < gather(3, torch.ones(P)).abs().max() < 100, "what the first left is sent on"


def test_an_empty_update_sends_what_waits_so_that_no_weight_is_told_away() -> None:
    """Else a model without gradients would bring the carried weight to 0, and no residual away."""
    device = Device("pi", np.random.default_rng(0))
    for number in range(1, 6):
        device.train(plan := plan_of(number, device.counted, 0.2))
        device.mask(plan)
        device.counted = number
    device.train(whole := plan_of(6, 5, 1.0), is_empty=True)
    device.mask(whole)
    device.counted = 6
    assert not device.left().any()
    device.train(plan_of(7, 6, 0.2))
    assert device.carried == 0


def test_the_carried_weight_is_the_mean_of_the_weights_since_each_coordinate_was_sent() -> None:
    """An oracle counts, for each coordinate, the weights of the rounds since it was sent."""
    device, waiting_P, errors = Device("pi", np.random.default_rng(0)), np.zeros(P), []
    for number in range(1, 200):
        device.train(plan := plan_of(number, device.counted, 0.2))
        errors.append(device.carried - waiting_P.mean())
        device.mask(plan)
        device.counted = number
        waiting_P += WEIGHT
        waiting_P[coding_of(plan).positions(P).positions(0, len(device.sent_K))] = 0
    # A fifth of the coordinates is drawn each round: their waiting differs from the mean of all.
    assert abs(np.mean(errors)) <= 5 * np.std(errors) / np.sqrt(len(errors)) + 1 / 0.2


def test_a_round_that_comes_again_sends_nothing_of_what_waits_and_adds_its_own_weight() -> None:
    device, told = Device("pi", np.random.default_rng(0)), []
    for _ in range(1, 21):
        device.train(plan := plan_of(1, None, 0.2))
        told.append(device.carried)
        device.mask(plan)
    assert told == [WEIGHT * 4 // 5 * number for number in range(20)]


def test_the_carried_weight_is_the_same_whatever_the_examples_were() -> None:
    told = []
    for is_empty in (False, True):
        device = Device("pi", np.random.default_rng(0))
        for number in range(1, 20):
            device.train(plan := plan_of(number, device.counted, 0.2), is_empty=is_empty)
            told.append(device.carried)
            device.mask(plan)
            device.counted = number
    assert told[:19] == told[19:]
    assert told[18] > 3 * WEIGHT


def test_what_a_masked_sum_left_out_is_in_no_plain_update() -> None:
    """Another server may say that its run is the masked one, and ask in clear."""
    device = Device("pi", np.random.default_rng(0))
    device.train(first := plan_of(1, None, 0.2))
    device.mask(first)
    assert device.left().abs().max() > 0
    terms = CompressionTerms(method="int8", fraction=0.1)
    asked = plain_plan_of(
        round=2,
        run_seed=1,
        model_version=1,
        quota=1,
        micro_batch_size=1,
        counted_round=1,
        compression=terms,
    )
    report = UpdateReport(
        name="pi", round=2, num_examples=1, weight=1, loss_sum=0.0, micro_batch_size=1,
        seconds=1.0, steps=(), reason="quota",
    )  # fmt: skip
    data = device.feedback().encode(Update(values_P=torch.zeros(P), report=report), asked)
    assert asked.coding is not None
    assert not asked.coding.read(data, "pi", P).tensor().any()
