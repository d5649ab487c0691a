"""``headwater-client`` as a whole, on a network without sockets."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc.aio
import pytest

import headwater
from headwater.client.commands import take_part
from headwater.client.trainer.run_trainer import trainer_of
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import AggregatorRefused, HeadwaterError
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.transport.limits import PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import (
    ClientFrame,
    Goodbye,
    OtherTask,
    ServerFrame,
    Welcome,
)
from headwater.server.transport.uploads import fault_frame
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


def two_tasks(state: Path) -> Settings:
    return load(
        None,
        {
            "task": "tests/tasks.py:TwoLayers",
            "client.tasks": [f"Signs={SIGNS}"],
            "client.state": state,
            "client.stay": False,
            "check_task": False,
            "threads": 1,
        },
    )


def take_part_in_python(state: Path) -> None:
    headwater.take_part(
        "tests/tasks.py:TwoLayers",
        server="127.0.0.1:1",
        also_task=[f"Signs={SIGNS}"],
        state=state,
        settings={"check_task": False},
        threads=1,
        progress=False,
    )


@pytest.mark.parametrize("in_python", [False, True])
def test_a_device_loads_the_next_task_when_it_has_freed_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_python: bool
) -> None:
    trainer_of.cache_clear()  # an earlier test may have left this task's
    servers, loading = Servers(num_changes=1), Trainer.__init__
    alive: list[int] = []

    def noting(self: Trainer, *args: Any, **options: Any) -> None:
        alive.append(len(models))
        loading(self, *args, **options)
        models.add(self.image)

    models: weakref.WeakSet[ModelImage] = weakref.WeakSet()
    monkeypatch.setattr(Trainer, "__init__", noting)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: servers)
    if in_python:
        take_part_in_python(tmp_path)
    else:
        take_part(two_tasks(tmp_path))
    assert servers.loaded == [*TASKS]
    assert alive == [0, 0]


def test_a_device_that_servers_send_from_task_to_task_waits_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers = Servers(num_changes=2)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: servers)
    with caplog.at_level(logging.WARNING):
        take_part(two_tasks(tmp_path))
    assert servers.loaded == [*TASKS, TASKS[0]]
    waits = [line.split()[-2] for line in caplog.messages if "one task after another" in line]
    assert waits == ["0.2"]


def test_a_device_in_python_goes_on_with_the_task_that_a_server_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(num_changes=1)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: servers)
    take_part_in_python(tmp_path)
    assert servers.loaded == [*TASKS]


class Refusing(Servers):
    """The stream of a server that refuses the device."""

    def __init__(self, error: HeadwaterError) -> None:
        super().__init__(num_changes=0)
        self._error = error

    async def write(self, data: bytes) -> None:
        self._frames.append(fault_frame(self._error))


@pytest.mark.parametrize("remedy", [None, "start the server above with --trusted-aggregators pi"])
def test_a_refused_device_gets_the_remedy_of_the_error_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remedy: str | None
) -> None:
    sent = AggregatorRefused("pi is not among the aggregators", remedy=remedy)
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *_, **__: Refusing(sent))
    given = {"client.state": tmp_path, "check_task": False, "threads": 1}
    with pytest.raises(AggregatorRefused) as caught:
        take_part(load(None, {"task": "tests/tasks.py:TwoLayers", **given}))
    assert (caught.value.message, caught.value.remedy) == (sent.message, sent.remedy)
