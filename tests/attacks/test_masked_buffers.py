"""A server that lies in masked asynchronous rounds, or while it searches for a liar.

It wants two opened sums that differ by one member's update at one model. The devices are real ones,
with state on disk; the server's phases are the real ones, with other members and plans.
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

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.secagg.masked_history import from_ranges
from headwater.common.errors import (
    OlderTerm,
    OutOfPhase,
    SessionReplayed,
    UpdateAlreadyMasked,
)
from headwater.common.messages import Plan
from headwater.common.secagg.protocol import UnmaskRequest
from tests.faults import FaultPlan
from tests.masked import (
    RUN,
    NodeDevice,
    ask,
    model,
    opening_of,
    plan,
    play,
    ready,
    sum_of,
    train,
    trainer,
)

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

NAMES = range(5)
OWNED = 24  # examples of each device


@pytest.fixture
def devices(tmp_path: Path) -> list[NodeDevice]:
    """Return devices with identities, whose owners have not set the order of their examples."""
    identities = [make_identity(tmp_path / f"d{name}.pem", f"d{name}")[0] for name in NAMES]
    (tmp_path / "allow-list").write_text("\n".join(one.line for one in identities))
    (tmp_path / "allow-list").chmod(0o600)
    for name in NAMES:
        secret = hashlib.sha256(b"%d" % name).hexdigest()  # else another one in each run
        (tmp_path / f"d{name}-masked.jsonl").write_text(json.dumps({"secret": secret}) + "\n")
    return started(tmp_path)


def started(folder: Path) -> list[NodeDevice]:
    """Return the devices, in processes that have just started."""
    allow_list = folder / "allow-list"
    secure = [
        {"order_seed": None, "identity": folder / f"d{name}.pem", "allow_list": allow_list}
        for name in NAMES
    ]
    return [NodeDevice(name, folder, secure=own) for name, own in zip(NAMES, secure, strict=True)]


def asked(round_number: int, **changes: Any) -> Plan:
    """Return a plan of an asynchronous run whose model is never stepped."""
    return plan(round_number, model_version=0, **changes)


def opened(
    members: Sequence[NodeDevice], given: Plan, *, without: NodeDevice | None = None
) -> NDArray[np.float64]:
    """Open the sum of updates of a plan; the server says that it lost one of them."""
    faults = FaultPlan()
    if without is not None:
        faults = faults.drop(client=without.name, after="check_shares")
    return sum_of(play(members, opening_of(members, given, mode="active"), faults).sum)


def masked_examples(folder: Path) -> list[list[set[int]]]:
    """Return the examples of each device's masked updates, from its file."""
    return [
        [from_ranges(json.loads(line)["examples"]) for line in path.read_text().splitlines()[1:]]
        for path in sorted(folder.glob("*-masked.jsonl"))
    ]


def update_of(part: int) -> NDArray[np.float64]:
    """Return the gradient sum of all examples of a device, at the model."""
    image, data = trainer().image, trainer().task.train_examples(data=None, part=part, num_parts=8)
    image.load(model())
    accumulator = trainer().accumulator
    accumulator.zero()
    batch = [torch.stack(column) for column in zip(*(data[i] for i in range(OWNED)), strict=True)]
    trainer().task.loss_sum(image.model, batch)[0].backward()  # type: ignore[no-untyped-call]
    return accumulator.values_P.numpy().astype(np.float64)


def test_no_two_sums_at_one_model_have_an_example_in_common_whoever_is_said_to_be_lost(
    devices: list[NodeDevice], tmp_path: Path
) -> None:
    """The server loses one member after another, as if it searched for a liar, and subtracts."""
    sums, refused = [], set()
    for number, lost in enumerate(["d2", "d1", "d0"], start=1):
        for device in list(devices):
            try:
                ready(device, asked(number, counted_round=number - 1))
            except UpdateAlreadyMasked:
                devices.remove(device)
                refused.add(device.name)
        lost_one = next((one for one in devices if one.name == lost), None)
        if len(devices) >= 4:
            sums.append(opened(devices, asked(number), without=lost_one))
    assert (len(sums), refused) == (2, {"d0", "d3", "d4"})
    for name, updates in enumerate(masked_examples(tmp_path)):
        assert sum(map(len, updates)) == len(set().union(*updates)), name


def test_an_update_is_in_one_session_alone_however_many_the_server_opens(
    devices: list[NodeDevice], tmp_path: Path
) -> None:
    """A second buffer of the same model, one with other members, and the first one once more."""
    for device in devices:
        ready(device, asked(1))
    opened(devices, asked(1))
    for members, attempt in ((devices, 2), (devices[1:], 3)):
        again = play(
            members, opening_of(members, asked(1), attempt=attempt), until="advertise_keys"
        )
        assert {type(error) for error in again.refused.values()} == {UpdateAlreadyMasked}
        assert len(again.refused) == len(members)


def test_no_survivor_set_opens_a_session_after_a_newer_plan(devices: list[NodeDevice]) -> None:
    """With the old session's sum and the new one's, the server would have two of one model."""
    for device in devices:
        ready(device, asked(1))
    setup = opening_of(devices, asked(1))
    assert not play(devices, setup, until="masked_update").refused
    for device in devices:
        ready(device, asked(2))
    everybody = tuple(device.name for device in devices)
    for lost in (None, *everybody):
        survived = tuple(name for name in everybody if name != lost)
        asked_for = UnmaskRequest(survived=survived, dropped=() if lost is None else (lost,))
        for device in devices:
            with pytest.raises(OutOfPhase):
                ask(device, asked_for)


@pytest.mark.parametrize("is_new_process", [False, True])
def test_a_standby_that_lies_gets_no_example_again_at_one_model(
    devices: list[NodeDevice], tmp_path: Path, is_new_process: bool
) -> None:
    """It says that the round must be done again, and that another member was lost in it."""
    for device in devices:
        ready(device, asked(1))
    opened(devices, asked(1), without=devices[0])
    if is_new_process:
        devices = started(tmp_path)
    for device in devices:
        device.node.enter(RUN, term=2)
        ready(device, asked(1))
    again = opening_of(devices, asked(1))
    refused = play(devices, again, until="advertise_keys").refused
    assert {type(error) for error in refused.values()} == {SessionReplayed}
    sum_of(play(devices, opening_of(devices, asked(1), attempt=2)).sum)
    for name, updates in enumerate(masked_examples(tmp_path)):
        assert sum(map(len, updates)) == len(set().union(*updates)) == (8 if name == 0 else 16)
    for device in devices:
        with pytest.raises(OlderTerm):
            device.node.enter(RUN, term=1)


def test_what_is_left_is_a_model_that_differs_in_one_bit(devices: list[NodeDevice]) -> None:
    """Each plan asks for all examples; the second sum lacks a member, whose update is left.

    The devices cannot tell such a model from an honest step: only noise bounds it.
    """
    sums, first = [], model()
    for number, image in enumerate([first, bytes([first[0] ^ 1]) + first[1:]], start=1):
        members = devices if number == 1 else devices[:-1]
        given = plan(number, quota=OWNED, micro_batch_size=8, counted_round=number - 1)
        for device in members:
            train(device, given, image)
        digest = hashlib.sha256(image).digest()
        setup = opening_of(members, given, mode="active", model_digest=digest)
        sums.append(sum_of(play(members, setup).sum))
    alone = update_of(NAMES[-1])
    assert np.linalg.norm(sums[0] - sums[1] - alone) < 0.01 * np.linalg.norm(alone)
