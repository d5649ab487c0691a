"""A server that isolates one device's update by its plans: weights, local rates, steps of the ring.

The devices are real apps and the cryptography is honest: only the plans lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.common.errors import HeadwaterError, RoundAborted, SessionMismatch
from headwater.common.messages import Plan
from headwater.common.secagg.masked_numbers import bounds_of
from tests.attacks.secagg_lies import Seen, as_if_of_the_session, chosen
from tests.client.secagg.cohort import describe, devices
from tests.faults import FaultPlan
from tests.masked import (
    Device,
    DeviceReply,
    NodeDevice,
    opening_of,
    plain_sum,
    plan,
    play,
    ready,
    sum_of,
    trainer,
)
from tests.secagg import Cast

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

VICTIM, OTHERS = "d0", ("d1", "d2", "d3")
LOCAL: dict[str, Any] = {"local_steps": 2, "local_learning_rate": 2.0**-4}


@dataclass
class Watched:
    """A device whose refusals are noted."""

    device: Device
    name: str
    refused: list[HeadwaterError] = field(default_factory=list)

    def kept(self) -> dict[str, Any]:
        return self.device.kept()

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        try:
            return self.device.send(kind, head, vector)
        except HeadwaterError as error:
            self.refused.append(error)
            raise


def attacked(
    plans: Mapping[str, Plan], *, settings: Mapping[str, Any] | None = None, **chosen: Any
) -> tuple[dict[str, set[str]], float]:
    """Train the devices on their plans, and open a session of those that are ready.

    Return the refusals by device, and the cosine of the opened sum and the victim's update: 0 if
    no sum with the victim in it was opened.
    """
    alone, _ = plain_sum(0, plans[VICTIM])
    cohort = [Watched(device, device.name) for device in devices(len(plans), **(settings or {}))]
    there = []
    for device in cohort:
        try:
            ready(device, plans[device.name])
            there.append(device)
        except HeadwaterError:
            pass
    weights = {d.name: plans[d.name].weigh_as or plans[d.name].quota for d in there}
    cosine = 0.0
    try:
        setup = opening_of(there, plans[VICTIM], planned_weights=weights, **chosen)
        opened = play(there, setup).sum
        if VICTIM in opened.survived:
            total = sum_of(opened)
            cosine = float(total @ alone / np.linalg.norm(total) / np.linalg.norm(alone))
    except RoundAborted:
        pass
    return {d.name: {error.code for error in d.refused} for d in cohort}, cosine


def test_a_cohort_of_like_plans_hides_the_update() -> None:
    refused, cosine = attacked(dict.fromkeys((VICTIM, *OTHERS), plan()))
    assert not any(refused.values())
    assert abs(cosine) < 0.99


def test_a_device_refuses_to_be_weighed_by_more_examples_than_it_told() -> None:
    plans = dict.fromkeys(OTHERS, plan(weigh_as=1)) | {VICTIM: plan(weigh_as=2**40)}
    refused, cosine = attacked(plans)
    assert cosine == 0.0
    assert refused[VICTIM] == {"CountOutOfRange"}


def test_other_local_rates_for_the_others_are_seen_by_every_device() -> None:
    plans = dict.fromkeys(OTHERS, plan(**LOCAL | {"local_learning_rate": 1e-30}))
    plans |= {VICTIM: plan(**LOCAL)}
    refused, cosine = attacked(plans)
    assert cosine == 0.0
    assert {code for codes in refused.values() for code in codes} == {"PlanMismatch"}


def test_a_device_whose_weight_is_most_of_the_session_s_refuses_the_roster() -> None:
    plans = dict.fromkeys(OTHERS, plan(quota=1, micro_batch_size=1)) | {VICTIM: plan(quota=16)}
    refused, cosine = attacked(plans, settings={"secure": {"min_quota": 1}})
    assert cosine == 0.0
    assert refused == {VICTIM: {"WeightTooLarge"}, **{name: set() for name in OTHERS}}


def test_each_device_its_own_plan_digest_is_another_session_for_each() -> None:
    """A server that shows each group the digest of its own plans makes groups of their own."""
    cast = Cast(6, device={"d001": {"plan_digest": bytes(32)}})
    lie = FaultPlan().tell("share_keys", chosen(plan=bytes(32)), client="d001")
    played = cast.play(
        as_if_of_the_session(lie.tell("share_keys", Seen.note, client="d000"), ["d001"])
    )
    assert isinstance(played.refused["d001"], SessionMismatch)
    assert "d001" not in played.vectors


@pytest.mark.parametrize("quotas", [(3, 5, 7, 11), (8, 8, 8, 8)])
def test_a_tiny_clip_bound_shows_how_many_were_clipped_and_not_who(quotas: tuple[int, ...]) -> None:
    """With a bound for each member's own quota, each sum of signs is that of one choice of them."""
    cohort = devices(len(quotas), secure={"min_quota": 1})
    plans = [plan(quota=quota, micro_batch_size=quota) for quota in quotas]
    for device, own in zip(cohort, plans, strict=True):
        ready(device, own)
    setup = opening_of(
        cohort,
        plans[0],
        clip=2.0**-60,
        bounds=bounds_of((), largest_weight=max(quotas), max_examples=max(quotas)),
        planned_weights={d.name: quota for d, quota in zip(cohort, quotas, strict=True)},
    )
    opened = play(cohort, setup).sum
    bound = opened.session.parameters.encoding.bound(max(quotas))
    values = opened.vector_P.view(np.int32)
    saturated = values[np.abs(values) >= bound]
    assert len(saturated) > 0
    assert not (saturated % bound).any()


def test_a_model_that_comes_as_bytes_leaves_a_device_as_it_was(tmp_path: Path) -> None:
    """As a server may send it beside a plan; only a SuperNode's process ends after each answer."""
    device = NodeDevice(0, tmp_path, secure={"aggregation": "semi-honest"})
    image = bytes(trainer().image.buffer())
    for number in (1, 2):
        asked = plan(number, answer_seconds=0.05)
        sent = device.answer("train", asked.model_dump_json(), image)
        assert sent.error is None
        assert device.answer("query.describe", describe()).error is None
