"""What a device declines for its owner's bytes of a day, by what is announced and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.client.app import app
from headwater.client.energy.availability import ROUND_SLACK_BYTES, Availability
from headwater.client.flower.node import Node
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.transport.exchange import Exchange
from headwater.client.transport.leaving import LeavePolicy
from headwater.common.settings.schema import ClientSettings
from headwater.common.settings.sources import load
from headwater.common.transport.wire_pb2 import ClientFrame, Image, Instruction, ServerFrame
from tests.masked import plan

TASK = "tests/tasks.py:TwoLayers"


async def no_stream(frame: ClientFrame) -> None:
    raise AssertionError("nothing is to be written")


def policy(folder: Path, *, spare_bytes: int) -> tuple[LeavePolicy, int]:
    """Return the policy of a device with few bytes a day, and the parameters of its model."""
    trainer = Trainer(TASK, batch_norm=None, check_task=False)
    layout = trainer.image.layout
    chosen = ClientSettings(bytes_per_day=ROUND_SLACK_BYTES + spare_bytes, state=folder)
    available = Availability(
        chosen, name="pi", image_bytes=layout.num_bytes, vector_bytes=4 * layout.num_parameters
    )
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    node = Node(app, trainer, identity, load(None, {"task": TASK, "check_task": False}), folder)
    return LeavePolicy(node, Exchange(node, no_stream), available), layout.num_parameters


def frame_of(**changes: Any) -> ServerFrame:
    head_json = plan(**changes).model_dump_json(exclude_none=True)
    return ServerFrame(instruction=Instruction(message_type="train", head_json=head_json))


@pytest.mark.parametrize(
    ("changes", "bytes_of"),
    [
        ({"is_masked": False}, lambda p: 4 * p),
        ({"is_masked": False, "compression": {"method": "bfloat16"}}, lambda p: 2 * p),
        ({"compression": {"method": "random-k", "fraction": 0.5}}, lambda p: 4 * -(-p // 2)),
    ],
)
def test_a_plan_is_declined_if_its_own_encoding_does_not_fit_into_the_day(
    tmp_path: Path, changes: dict[str, Any], bytes_of: Any
) -> None:
    _, num_values = policy(tmp_path, spare_bytes=10**6)
    needed = bytes_of(num_values)
    enough, _ = policy(tmp_path / "enough", spare_bytes=needed)
    too_few, _ = policy(tmp_path / "few", spare_bytes=needed - 1)
    assert enough.reason_to_decline(frame_of(**changes)) is None
    assert too_few.reason_to_decline(frame_of(**changes)) is not None


def test_a_difference_is_received_where_the_whole_model_would_not_fit(tmp_path: Path) -> None:
    _, num_values = policy(tmp_path, spare_bytes=10**6)
    chosen, _ = policy(tmp_path / "few", spare_bytes=3 * num_values)
    planned = frame_of(is_masked=False, compression={"method": "bfloat16"})
    assert chosen.reason_to_decline(planned) is None
    difference = Image(num_bytes=num_values, difference="int8")
    assert chosen.reason_to_decline(ServerFrame(image=difference)) is None
    assert chosen.reason_to_stay_away() is None
    whole = Image(num_bytes=4 * num_values)
    assert chosen.reason_to_decline(ServerFrame(image=whole)) is not None
