"""A device says again and again that it has lost the frozen part of the model, up to gigabytes."""

from __future__ import annotations

import json

import pytest

from headwater.common.transport.wire_pb2 import Fault
from headwater.server.flower.registration import MAX_FROZEN
from tests import adapted
from tests.attacks import raw


async def test_the_frozen_part_is_sent_a_few_times_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "TASK", adapted.TASK)
    layout = raw.layout_digest()
    async with raw.serving(rounds=9, min_clients=1) as run:
        async with raw.RawDevice(run.port, "loser") as device:
            await device.hello(layout_digest=layout)
            await device.next_of("welcome")
            run.begin()
            num_sent = 0
            while True:
                frame = await device.next_of("instruction", "fault", "goodbye")
                if not frame.HasField("instruction"):
                    break
                asked = frame.instruction
                if asked.message_type == "query.describe":
                    told = {"name": "loser", "num_examples": 24, "layout_digest": layout}
                    await device.reply(asked, json.dumps(told | {"lacks_frozen": True}))
                elif asked.message_type == "query.frozen":
                    num_sent += 1
                    assert num_sent <= MAX_FROZEN
                    has = {"name": "loser", "digest": asked.frozen_id}
                    await device.reply(asked, json.dumps(has))
                else:
                    lost = Fault(message_id=asked.message_id, code="FrozenPartMissing", text="gone")
                    await device.send(fault=lost)
        assert num_sent == MAX_FROZEN
        assert run.refusals["FrozenPartMissing"] == 1
