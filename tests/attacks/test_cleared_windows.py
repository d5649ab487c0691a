"""A server that has honest members mask next to nothing, so that one update is the sum of all.

Their windows are full of ordinary examples, and nobody colludes. The server chooses the model, and
what differs between members: the quota, the micro-batch and the times. At its model a large window
overflows where a small one does not, a large micro-batch fails and must be taken apart, or local
steps grow beyond all bounds. What a member masks must not hang on any of these.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.plan_policy import LEAST_TIME
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import MaskingTooWeak, RoundAborted
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import DescribeRequest, Plan
from headwater.common.secagg.masked_numbers import bounds_of
from tests.faults import FaultPlan
from tests.masked import (
    RUN,
    NodeDevice,
    Played,
    opening_of,
    plan,
    play,
    sum_of,
    train,
    trainer,
)

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

TASK = "./examples/digits.py:Digits"
NUM_MEMBERS, VICTIM, MANY, FEW = 8, 3, 64, 8

Weights = Callable[[torch.nn.Module], None]


def overflowing_sums(model: torch.nn.Module) -> None:
    """Two units' gradients are 1e37 for each example: a large window's sum overflows."""
    first, bias, second, _ = model.parameters()
    first[:2] = 0
    bias[:2] = 1e-37
    second[:, :2] = 0
    second[8, 0] = second[9, 1] = 4e37


def overflowing_losses(model: torch.nn.Module) -> None:
    """Each example's loss is 1e38: four together overflow."""
    *_, bias = model.parameters()
    bias[9] = 1e38


class Members:
    """Five real devices that insist on active masks, and a server that chooses their model."""

    def __init__(self, folder: Path, change: Weights | None = None) -> None:
        keys = [folder / f"d{part}" for part in range(NUM_MEMBERS)]
        lines = [make_identity(key, key.name)[0].line for key in keys]
        (folder / "allow-list").write_text("\n".join(lines))
        self.trainer: Trainer = trainer(TASK)
        layout = self.trainer.image.layout
        asked = DescribeRequest(
            run_seed=0,
            wants_speed=True,
            layout_digest=layout.digest,
            num_parameters=layout.num_parameters,
        )
        self.devices: list[NodeDevice] = []
        for part, key in enumerate(keys):
            secure = {
                "aggregation": "active",
                "identity": key,
                "allow_list": folder / "allow-list",
                "order_seed": None,
            }
            state = folder / "state"
            if self.devices:  # alike machines: the figures of one take an eighth of a second
                shutil.copy(self.devices[0].path, state / f"d{part}-{RUN}.json")
            self.devices.append(NodeDevice(part, state, task=TASK, secure=secure))
            if part == 0:
                self.devices[0].send("query.describe", asked.model_dump_json())
        torch.manual_seed(1)
        model = self.trainer.task.new_model()
        if change is not None:
            with torch.no_grad():
                change(model)
        values = [parameter.detach().flatten() for parameter in model.parameters()]
        self.image = torch.cat(values).numpy().astype("<f4").tobytes()

    @property
    def victim(self) -> NodeDevice:
        return self.devices[VICTIM]

    def opened(self, plans: Mapping[str, Plan]) -> Mapping[str, float]:
        """Return the sums of a whole session of updates that were computed by these plans."""
        played = self.played(plans)
        assert played.refused == {}
        return played.sum.numbers

    def played(
        self, plans: Mapping[str, Plan], faults: FaultPlan | None = None, *, clip: float = 16.0
    ) -> Played:
        """Play a session of updates that are computed by these plans."""
        for device in self.devices:
            train(device, plans[device.name], self.image)
        setup = opening_of(
            self.devices,
            plans["d0"],
            mode="active",
            task=self.trainer.task_code,
            model_digest=hashlib.sha256(self.image).digest(),
            num_values=self.trainer.image.layout.num_parameters,
            planned_weights={name: one.max_examples for name, one in plans.items()},
            clip=clip,
            bounds=bounds_of((), largest_weight=MANY, max_examples=MANY),
        )
        return play(self.devices, setup, faults)

    def updates(self) -> NDArray[np.float64]:
        """Return each member's own update, before it is masked."""
        pending = pending_in(self.trainer.accumulator)
        found = [pending.get(RUN, one.name) for one in self.devices]
        return np.stack([one.update.values_P.double().numpy() for one in found if one is not None])


def test_a_sum_that_overflows_in_a_large_window_clears_no_window(tmp_path: Path) -> None:
    members = Members(tmp_path, overflowing_sums)
    plans = {
        one.name: plan(
            quota=FEW if one is members.victim else MANY, micro_batch_size=8, answer_seconds=0.15
        )
        for one in members.devices
    }
    numbers = members.opened(plans)
    assert numbers["weight"] == (NUM_MEMBERS - 1) * MANY + FEW
    assert numbers["num_refused"] == 0


def test_a_large_micro_batch_that_fails_is_taken_apart_whatever_time_the_plan_gives(
    tmp_path: Path,
) -> None:
    members = Members(tmp_path, overflowing_losses)
    plans = {}
    for one in members.devices:
        pace = one.kept()["pace"]
        least = LEAST_TIME * (pace["base"] + MANY * pace["each"]) * 1.001
        plans[one.name] = (
            plan(quota=MANY, micro_batch_size=1, answer_seconds=0.15)
            if one is members.victim
            else plan(quota=MANY, micro_batch_size=MANY, answer_seconds=least)
        )
    assert members.opened(plans)["weight"] == NUM_MEMBERS * MANY
    # Each showed once that it had to take its window apart, and asks for that time from now on.
    for one in members.devices:
        if one is not members.victim:
            again = plans[one.name].model_copy(update={"round": 2, "counted_round": 1})
            with pytest.raises(MaskingTooWeak, match="the plan gives"):
                train(one, again, members.image)


def local(quota: int, *, steps: int, how: LocalTerms | None = None, rate: float = 0.02) -> Plan:
    one = plan(quota=quota, micro_batch_size=1, answer_seconds=0.15)
    return one.asking(LocalPlan(steps=steps, learning_rate=rate, how=how or LocalTerms()))


@pytest.mark.parametrize("how", [None, LocalTerms()], ids=["plain", "terms"])
def test_members_of_few_examples_take_as_many_local_steps_as_the_others(
    tmp_path: Path, how: LocalTerms | None
) -> None:
    members = Members(tmp_path)
    one = plan(quota=10, micro_batch_size=1, answer_seconds=0.15)
    with pytest.raises(MaskingTooWeak, match="100 local steps on 10 examples"):
        train(members.victim, one.asking(LocalPlan(steps=100, how=how)), members.image)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("sgd", {"momentum": 1e5}),
        ("sgd", {"momentum": 1.0}),
        ("sgd", {"momentum": -2.0}),
        ("sgd", {"weight_decay": 1e6}),
        ("sgd", {"dampening": -1e9}),
        ("adam", {"betas": [0.9, 0.999], "eps": 1e30}),
        ("adam", {"unheard_of": 1.0}),
        ("rmsprop", {"alpha": 50.0}),
        ("rprop", {}),
    ],
)
def test_local_optimizers_that_weigh_one_step_more_than_all_others_are_refused(
    tmp_path: Path, optimizer: str, arguments: dict[str, Any]
) -> None:
    members = Members(tmp_path)
    how = LocalTerms(optimizer=optimizer, arguments=arguments)
    with pytest.raises(MaskingTooWeak, match="a step of its local training could outweigh"):
        train(members.victim, local(16, steps=2, how=how), members.image)


def test_a_pull_that_grows_with_each_step_is_refused(tmp_path: Path) -> None:
    members = Members(tmp_path)
    with pytest.raises(MaskingTooWeak, match="proximal"):
        train(members.victim, local(16, steps=2, how=LocalTerms(proximal=1e9)), members.image)


@pytest.mark.parametrize(
    "how",
    [
        LocalTerms(optimizer="sgd", arguments={"momentum": 0.9, "nesterov": True}, proximal=0.1),
        LocalTerms(optimizer="adamw", arguments={"betas": [0.9, 0.95], "weight_decay": 0.01}),
        LocalTerms(optimizer="muon", arguments={"momentum": 0.9, "nesterov": False}),
    ],
    ids=["sgd", "adamw", "muon"],
)
def test_usual_local_optimizers_are_not(tmp_path: Path, how: LocalTerms) -> None:
    members = Members(tmp_path)
    train(members.victim, local(16, steps=2, how=how), members.image)


def test_local_training_that_diverges_clears_no_window(tmp_path: Path) -> None:
    """The parameters overflow in the first step of a rate like this, the losses in the second."""
    members = Members(tmp_path)
    plans = {one.name: local(FEW, steps=2, rate=3e38) for one in members.devices}
    assert members.opened(plans)["weight"] >= NUM_MEMBERS * FEW / 2


def test_heavy_members_that_are_said_to_drop_out_leave_no_lone_one(tmp_path: Path) -> None:
    """By all members it is 44 % of the sum, and by the six that have to be left 62 %."""
    members = Members(tmp_path)
    heavy = {"d6": 20, "d7": 20}
    quotas = {one.name: heavy.get(one.name, FEW) for one in members.devices}
    quotas[members.victim.name] = MANY
    plans = {
        name: plan(quota=quota, micro_batch_size=8, answer_seconds=0.15)
        for name, quota in quotas.items()
    }
    faults = FaultPlan()
    for name in heavy:  # the server throws their vectors away
        faults = faults.drop(client=name, after="check_shares")
    with pytest.raises(RoundAborted):
        members.played(plans, faults)
    assert members.victim.kept()["secure"]["masked"] is None


def test_a_ring_of_coarse_steps_rounds_no_member_to_zero(tmp_path: Path) -> None:
    members = Members(tmp_path)
    plans = {
        one.name: plan(quota=FEW, micro_batch_size=8, answer_seconds=0.15)
        for one in members.devices
    }
    for device in members.devices:
        train(device, plans[device.name], members.image)
    updates = members.updates()
    # A step is more than twice the largest coordinate: to nearest, all of them are zero.
    step = 2.0 ** np.ceil(np.log2(2 * np.abs(updates).max()))
    played = members.played(plans, clip=float(step * 2.0**30 / (NUM_MEMBERS * FEW)))
    assert played.refused == {}
    assert 2.0**-played.sum.session.parameters.encoding.scale_bits >= step
    total, right = sum_of(played.sum), updates.sum(axis=0)
    is_there = total != 0
    number, agree = is_there.sum(), (np.sign(total) == np.sign(right))[is_there].sum()
    # 170 to 400 coordinates in twelve runs, 61 to 78 % of them with the right sign: 3 to 11
    # standard deviations above half. (A correlation hangs on the few largest coordinates.)
    assert number > 50
    assert agree - number / 2 > np.sqrt(number) / 2
