"""Where simulated devices come from: torch and the task are loaded once, then a fork per device.

``headwater.simulation.run.client_processes`` starts it, sends it the run and then the port, one line of JSON
each, and hears a line of JSON of each device that has ended.

What must not be shared comes behind the fork: each device opens its own data, holds its own model
and vector (pages are copied as they are written), and makes its own grpc objects and threads, which
would not live through a fork. Before it there is no thread but the first. The task is tried on real
examples in a process of its own, so that nothing of that is inherited.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwater.client.device.availability import availability_of
from headwater.client.flower.node import Node
from headwater.client.training.trainer import Identity, Trainer, trainer_of
from headwater.client.transport.connection import Connection, stay_connected
from headwater.common.errors import HeadwaterError, TaskError
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.system.console import start_log, stderr
from headwater.common.system.heap import use_one_heap
from headwater.simulation.engines.client_processes import ROUND, STATE
from headwater.simulation.engines.device_app import simulated_app
from headwater.simulation.engines.shared_round import SharedRound

REAP_SECONDS = 0.05
PATIENCE_SECONDS = 60.0  # of a device whose server is on the same machine

Failure = list[str]
"""The code and the message of an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Brood:
    """All that the devices of a run have in common."""

    settings: Settings
    trainer: Trainer
    folder: Path
    is_verbose: bool

    @property
    def num_devices(self) -> int:
        """How many there are."""
        return self.settings.simulation.clients

    def identity(self, part: int) -> Identity:
        """Return who a device is: the same on every engine."""
        rule = self.settings.partition.rule(seed=self.settings.seed)
        return Identity(name=str(part), data=None, part=part, num_parts=self.num_devices, rule=rule)


def main() -> None:
    """Load what is told, fork the devices, and end with the last of them or with the engine."""
    news = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task may print
    torch.set_num_threads(1)
    use_one_heap()
    orders = _orders()

    def tell(told: dict[str, Any]) -> None:
        os.write(news, json.dumps(told).encode() + b"\n")

    told = next(orders)
    try:
        brood = _brood(told)
    except HeadwaterError as error:
        tell({"failed": [error.code, error.message]})
        return
    failure = _tried(brood) if told["settings"]["check_task"] else None
    if failure is not None:
        tell({"failed": failure})
        return
    told = next(orders, {})
    if not told:
        return
    gc.collect()
    gc.freeze()  # else each collection would write into every object, and so copy its page
    parts = {}
    for part in range(brood.num_devices):
        parts[_fork(lambda: _take_part(brood, part, told["port"]))] = part  # noqa: B023 - at once
    _watch(parts, tell)


def _orders() -> Iterator[dict[str, Any]]:
    """Yield the lines of the standard input, until the engine is gone."""
    rest = b""
    while said := os.read(sys.stdin.fileno(), 1 << 16):
        *lines, rest = (rest + said).split(b"\n")
        yield from map(json.loads, lines)


def _brood(told: dict[str, Any]) -> Brood:
    """Load the task and build its model.

    Raises:
        HeadwaterError: see ``client.training.trainer.Resident``.
    """
    settings = Settings.model_validate({**told["settings"], "check_task": False})
    own = settings.client.model_copy(update={"spool": None})
    settings = settings.model_copy(update={"client": own})
    assert settings.task is not None  # the server has loaded it
    trainer = trainer_of(
        settings.task, replace_batch_norm=settings.model.replace_batch_norm, check_task=False
    )
    return Brood(
        settings=settings,
        trainer=trainer,
        folder=Path(told["folder"]),
        is_verbose=told["is_verbose"],
    )


# The task, once.


def _tried(brood: Brood) -> Failure | None:
    """Try the task on the first device that has examples; return what is wrong with it, if so."""
    here, there = os.pipe()

    def tell() -> int:
        failure = _failure(brood)
        if failure is not None:
            os.write(there, json.dumps(failure).encode())
        return 0

    child = _fork(tell)
    os.close(there)
    with os.fdopen(here, "rb") as heard:
        said = heard.read()
    _, status = os.waitpid(child, 0)
    if said:
        failure: Failure = json.loads(said)
        return failure
    code = os.waitstatus_to_exitcode(status)
    return ["TaskFailed", f"the process that tried it ended with {code}"] if code else None


def _failure(brood: Brood) -> Failure | None:
    for part in range(brood.num_devices):
        identity = brood.identity(part)
        try:
            brood.trainer.check(brood.trainer.examples(identity), identity.name)
        except TaskError as error:
            return [error.code, error.message]
        except HeadwaterError:
            continue  # a device without data: it says so itself when it is asked
        return None
    return None


# A device.


def _fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a child of its own, which ends with the status that it returns."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # what the nursery has open is not this one's to close


def _take_part(brood: Brood, part: int, port: int) -> int:
    """Be a device until the run ends: its own data, model and connection. Return its status."""
    _write_to(brood.folder / f"{part}.log")
    threading.Thread(target=_end_with_the_engine, name="engine", daemon=True).start()
    start_log(verbose=brood.is_verbose)
    settings, layout = brood.settings, brood.trainer.image.layout
    torch.set_num_threads(settings.threads or 1)
    app = simulated_app(settings, part, SharedRound(brood.folder / ROUND))
    node = Node(app, brood.trainer, brood.identity(part), settings, brood.folder / STATE)
    uplink = Connection(
        node,
        f"127.0.0.1:{port}",
        renewal=None,
        absence=availability_of(ClientSettings(), str(part), layout),
        patience_seconds=PATIENCE_SECONDS,
    )
    try:
        asyncio.run(stay_connected(uplink, stay=False))
    except HeadwaterError as error:
        stderr.print(f"{error.code}: {error.message}", markup=False, soft_wrap=True)
        return error.exit_status
    return 0


def _write_to(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _end_with_the_engine() -> None:
    """End this process when the engine has gone, however it went."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


# All of them.


def _watch(parts: dict[int, int], tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell of each device that ends; return when all have, and end them if the engine is gone."""
    while parts:
        gone, _, _ = select.select([sys.stdin.fileno()], [], [], REAP_SECONDS)
        if gone:
            for child in parts:
                os.kill(child, signal.SIGKILL)
            return
        for child, status in _reaped():
            part = parts.pop(child)
            tell({"ended": part, "status": os.waitstatus_to_exitcode(status)})


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield the children that have ended."""
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        yield child, status
