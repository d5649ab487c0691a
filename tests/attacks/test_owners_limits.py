"""A lying server uses owners' limits, and what a device did before, to make members add little."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.secagg.plan_policy import (
    LEAST_TIME,
    MOST_IDLE,
    MOST_TIMES,
    check_passed,
    check_time,
)
from headwater.common.errors import MaskingTooWeak
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import DescribeRequest, DeviceReport, Plan
from headwater.common.secagg.masked_numbers import bounds_of
from tests.masked import NodeDevice, opening_of, plan, play, sum_of, train, trainer

MEMBERS, WIDTH, OWNED, MANY = 4, 24, 32, 128
TASK = "./tests/attacks/test_owners_limits.py:Counted"
EMPTY = "./tests/attacks/test_owners_limits.py:Padded"


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(MEMBERS, WIDTH))

    def forward(self, parts: Tensor) -> Tensor:
        return self.values[parts]


class Counted:
    """The gradient says whose examples were summed, and how many of each."""

    def new_model(self) -> nn.Module:
        return Rows()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.full((OWNED if part else MANY,), part))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        (parts,) = batch
        return model(parts).sum(), len(parts)


class Padded:
    """Rows of zeros are padding, and cost nothing."""

    def new_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.ones(OWNED, 4))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        (rows,) = batch
        time.sleep(0.5e-3 * int(rows.any(1).sum()))
        return model(rows).sum(), len(rows)


def asking(task: str) -> str:
    layout = trainer(task).image.layout
    return DescribeRequest(
        run_seed=0,
        wants_speed=True,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
    ).model_dump_json()


class Active:
    """Devices that insist on active masks, with their keys and states in a folder."""

    def __init__(self, folder: Path, *, number: int = MEMBERS, task: str = TASK) -> None:
        self.folder, self.task = folder, task
        keys = [folder / f"d{part}" for part in range(number)]
        lines = [make_identity(key, key.name)[0].line for key in keys]
        (folder / "allow-list").write_text("\n".join(lines))
        self.devices = [self.opened(part) for part in range(number)]
        for device in self.devices:
            device.send("query.describe", asking(task))

    def opened(self, part: int, **settings: Any) -> NodeDevice:
        """Start a device's process; the order of its examples is a secret of its own."""
        secure = {
            "aggregation": "active",
            "identity": self.folder / f"d{part}",
            "allow_list": self.folder / "allow-list",
            "order_seed": None,
        }
        state = self.folder / "state"
        return NodeDevice(part, state, task=self.task, secure=secure, **settings)

    def opened_sum(self, plans: Mapping[int, Plan]) -> list[float]:
        """Run a session; return how many examples of each member are in the opened sum."""
        made = trainer(self.task)
        image = bytes(made.image.buffer())
        members = [self.devices[part] for part in plans]
        for part, one in plans.items():
            train(self.devices[part], one, image)
        most = max(one.quota for one in plans.values())
        opening = opening_of(
            members,
            next(iter(plans.values())),
            mode="active",
            task=made.task_code,
            model_digest=made.image.digest,
            num_values=MEMBERS * WIDTH,
            planned_weights={f"d{part}": one.quota for part, one in plans.items()},
            bounds=bounds_of((), largest_weight=most, max_examples=most),
        )
        played = play(members, opening)
        assert not played.refused
        counts = np.abs(sum_of(played.sum)).reshape(MEMBERS, WIDTH)[:, 0]
        return [round(float(count), 2) for count in counts]


def test_a_pace_that_was_told_stands_though_zeros_would_show_a_faster_one(tmp_path: Path) -> None:
    (device,) = Active(tmp_path, number=1, task=EMPTY).devices  # it was asked once
    again = [device.send("query.describe", asking(EMPTY)).head.strip() for _ in range(2)]
    paces = {DeviceReport.model_validate_json(head).seconds_per_example for head in again}
    assert len(paces) == 1
    assert max(pace or 0.0 for pace in paces) > 0.4e-3  # zeros take no time


def test_a_share_that_falls_after_it_was_told_cuts_no_masked_window(tmp_path: Path) -> None:
    cohort = Active(tmp_path)
    now = dt.datetime.now().astimezone()
    hours = [now + dt.timedelta(hours=number) for number in (2, 3)]
    client = {"active_hours": "{:%H:%M}-{:%H:%M}".format(*hours), "inactive_share": 0.05}
    cohort.devices[1:] = [cohort.opened(part, client=client) for part in range(1, MEMBERS)]
    given = plan(quota=OWNED, micro_batch_size=1, answer_seconds=0.5, share=1.0, num_invited=4)
    found = cohort.opened_sum(dict.fromkeys(range(MEMBERS), given))
    assert found == [OWNED] * MEMBERS


@pytest.mark.slow
def test_another_run_s_seed_at_one_model_gives_no_smaller_windows(tmp_path: Path) -> None:
    cohort = Active(tmp_path)
    common: dict[str, Any] = {"answer_seconds": 0.5, "num_invited": MEMBERS}
    half = OWNED // 2
    first = plan(quota=half, micro_batch_size=half, **common)
    assert cohort.opened_sum(dict.fromkeys(range(1, MEMBERS), first)) == [0, half, half, half]
    quotas = [int(0.6 * half * (MEMBERS - 2) / 0.4), *[half] * (MEMBERS - 1)]
    seeds = [plan(2, run_seed=9, quota=quota, micro_batch_size=half, **common) for quota in quotas]
    assert cohort.opened_sum(dict(enumerate(seeds))) == quotas


PACE = Line(base=0.0, each=0.5)
NEEDED = 4.0


@pytest.mark.parametrize(("seconds", "is_refused"), [(0.0, True), (3.1, True), (3.3, False)])
def test_a_window_that_the_owner_ended_early_is_in_no_session(
    seconds: float, is_refused: bool
) -> None:
    assert 3.1 < LEAST_TIME * NEEDED < 3.3
    given = plan(quota=8, micro_batch_size=8)
    if is_refused:
        with pytest.raises(MaskingTooWeak) as error:
            check_passed(given, PACE, seconds, name="pi")
        assert "3.2" not in str(error.value)
    else:
        check_passed(given, PACE, seconds, name="pi")


def test_no_plan_silences_a_device_for_long() -> None:
    """A masked device that has answered late is silent for every other server as well."""
    check_time(plan(quota=8, micro_batch_size=8, answer_seconds=MOST_IDLE), PACE, name="pi")
    with pytest.raises(MaskingTooWeak, match="silent"):
        check_time(plan(quota=8, micro_batch_size=8, answer_seconds=MOST_IDLE + 1), PACE, name="pi")
    slow = Line(base=0.0, each=60.0)
    long = 8 * 60.0 * MOST_TIMES
    check_time(plan(quota=8, micro_batch_size=8, answer_seconds=long), slow, name="pi")
    with pytest.raises(MaskingTooWeak, match="silent"):
        check_time(plan(quota=8, micro_batch_size=8, answer_seconds=long * 1.01), slow, name="pi")
