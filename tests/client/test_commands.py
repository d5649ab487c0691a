"""``headwater-client`` as a whole, on a network without sockets."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc.aio
import pytest

from headwater.client.commands import take_part
from headwater.common.settings.sources import load
from headwater.common.transport.limits import PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import (
    ClientFrame,
    Goodbye,
    OtherTask,
    ServerFrame,
    Welcome,
)
from tests.python_tasks import SIGNS

TASKS = ("TwoLayers", "Signs")


class Servers:
    """The streams of servers that name the task which the device has not loaded, then end."""

    def __init__(self, *, num_changes: int) -> None:
        self.loaded: list[str] = []
        self._num_changes = num_changes
        self._frames: deque[ServerFrame] = deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def stream_stream(self, method: str) -> type[Self]:
        return lambda: self  # type: ignore[return-value] # each call is a stream of its own

    async def write(self, data: bytes) -> None:
        hello = ClientFrame.FromString(data).hello
        self.loaded.append(hello.task)
        other = TASKS[1 - TASKS.index(hello.task)]
        welcome = Welcome(protocol_version=PROTOCOL_VERSION, session=b"s", run_id=1)
        self._frames += (
            [ServerFrame(other_task=OtherTask(name=other))]
            if len(self.loaded) <= self._num_changes
            else [ServerFrame(welcome=welcome), ServerFrame(goodbye=Goodbye())]
        )

    async def read(self) -> bytes:
        return self._frames.popleft().SerializeToString()

    def cancel(self) -> None:
        self._frames.clear()


def test_a_device_that_servers_send_from_task_to_task_waits_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers = Servers(num_changes=2)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: servers)
    chosen = load(
        None,
        {
            "task": "tests/tasks.py:TwoLayers",
            "client.tasks": [f"Signs={SIGNS}"],
            "client.state": tmp_path,
            "check_task": False,
            "threads": 1,
        },
    )
    with caplog.at_level(logging.WARNING):
        take_part(chosen)
    assert servers.loaded == [*TASKS, TASKS[0]]
    waits = [line.split()[-2] for line in caplog.messages if "one task after another" in line]
    assert waits == ["0.2"]
