"""A second run with the same seed, without --resume: does the difference of two sums show a device?

The server is honest both times. In the second run one device fewer takes part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headwater.client.secagg.masked_history import from_ranges
from headwater.common.errors import MaskingTooWeak, UpdateAlreadyMasked
from tests.masked import (
    RUN,
    NodeDevice,
    model,
    opening_of,
    plan,
    play,
    ready,
    sum_of,
    trainer,
)

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

NAMES = range(5)
# What the device's owner may not have chosen: nothing of the order of its examples is set.
SECRET_ORDER: dict[str, Any] = {"order_seed": None}


def devices_in(folder: Path, run: int, names: Sequence[int] = NAMES) -> list[NodeDevice]:
    """Return devices that have the folder's state, in a run."""
    found = []
    folder.mkdir(exist_ok=True)
    for name in names:
        path = folder / f"d{name}-masked.jsonl"
        if not path.exists():  # else it would be another one in each run of the test
            secret = hashlib.sha256(f"{folder.name} {name}".encode()).hexdigest()
            path.write_text(json.dumps({"secret": secret}) + "\n")
        device = NodeDevice(name, folder, secure=SECRET_ORDER)
        device.node.enter(run)
        found.append(device)
    return found


def opened_sum(devices: Sequence[NodeDevice], run: int, **changes: Any) -> NDArray[np.float64]:
    """Run round 1 of a run, and return its sum."""
    round_plan = plan(**changes)
    for device in devices:
        ready(device, round_plan)
    return sum_of(play(devices, opening_of(devices, round_plan, run=run)).sum)


def test_two_runs_with_one_seed_and_one_device_fewer_do_not_show_its_update(
    tmp_path: Path,
) -> None:
    """The server asks for whole windows again; the devices take other examples at that model."""
    whole = opened_sum(devices_in(tmp_path, RUN), RUN)
    rest = opened_sum(devices_in(tmp_path, RUN + 1, NAMES[:-1]), RUN + 1)
    for device, at_first in zip(NAMES, masked_in(tmp_path), strict=True):
        assert len(at_first) == (1 if device == NAMES[-1] else 2)
        assert len(set().union(*at_first)) == sum(map(len, at_first)), "examples in both sums"
    alone = update_of(NAMES[-1], masked_in(tmp_path)[-1][0])
    assert np.linalg.norm(whole - rest - alone) > np.linalg.norm(alone)


def test_a_window_that_was_masked_at_this_model_in_another_run_is_refused(tmp_path: Path) -> None:
    """The quota is all of a device's 24 examples: there are no others to take."""
    opened_sum(devices_in(tmp_path, RUN), RUN, quota=24)
    for device in devices_in(tmp_path, RUN + 1, NAMES[:-1]):
        with pytest.raises(UpdateAlreadyMasked, match="24 examples were masked before"):
            ready(device, plan(quota=24))


def test_another_seed_of_the_server_s_changes_nothing(tmp_path: Path) -> None:
    opened_sum(devices_in(tmp_path, RUN), RUN, quota=24)
    for device in devices_in(tmp_path, RUN + 1):
        for change in ({"run_seed": 5}, {"local_steps": 2}):
            with pytest.raises(UpdateAlreadyMasked):
                ready(device, plan(quota=18, **change))


def test_members_that_have_hardly_an_example_left_at_a_model_do_not_hide_another(
    tmp_path: Path,
) -> None:
    """One example of each of them, and eight of the victim's: the sum would be the victim's."""
    victim, *others = devices_in(tmp_path, RUN)
    round_plan = plan(quota=23)  # of 24
    for device in others:
        ready(device, round_plan)
    play(others, opening_of(others, round_plan))
    ready(victim, plan(2))
    for device in others:
        with pytest.raises(UpdateAlreadyMasked):
            ready(device, plan(2, counted_round=1))


def test_a_plan_cannot_leave_a_device_one_example_by_holding_out_the_others(
    tmp_path: Path,
) -> None:
    """The server would get the gradients of this one under model after model, eight times each."""
    for device in devices_in(tmp_path, RUN):
        with pytest.raises(MaskingTooWeak, match="holds out"):
            ready(device, plan(held_out_fraction=0.99))


def test_the_order_of_a_device_s_examples_follows_from_a_secret(tmp_path: Path) -> None:
    """Two devices of one name, in one run, do not use the same examples first."""
    for folder in ("one", "two"):
        opened_sum(devices_in(tmp_path / folder, RUN), RUN)
    one, two = (masked_in(tmp_path / folder) for folder in ("one", "two"))
    assert one != two


def masked_in(folder: Path) -> list[list[set[int]]]:
    """Return the examples of each device's masked updates, from its file."""
    found = []
    for path in sorted(folder.glob("*-masked.jsonl")):
        _, *lines = map(json.loads, path.read_text().splitlines())
        found.append([from_ranges(line["examples"]) for line in lines if "data" not in line])
    return found


def update_of(part: int, examples: set[int]) -> NDArray[np.float64]:
    """Return the gradient sum of a device's examples at the model."""
    image, data = trainer().image, trainer().task.train_examples(data=None, part=part, num_parts=8)
    image.load(model())
    accumulator = trainer().accumulator
    accumulator.zero()
    batch = [torch.stack(column) for column in zip(*(data[i] for i in examples), strict=True)]
    trainer().task.loss_sum(image.model, batch)[0].backward()  # type: ignore[no-untyped-call]
    return accumulator.values_P.numpy().astype(np.float64)
