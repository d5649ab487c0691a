"""The fork server of ``--engine grpc``: loads torch and the task once, then forks every device.

``client_processes`` starts it and sends two lines of JSON: the run, then the server's port. The
fork server answers with a line for an error of the task, one for the examples that cannot be
trained on, and one for each device that has ended.

State that devices must not share is created after the fork: each device opens its data, gets its
own copy of model and vector (pages are copied when they are written), and creates its own grpc
objects and threads, which do not survive a fork. Before the fork there is only one thread. The task
is checked on real examples in a separate child, so that devices inherit nothing of the check.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwater.client.flower.node import Node
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.transport.lasting_connection import Connection, stay_connected
from headwater.common.errors import (
    HeadwaterError,
    NoFiniteExample,
    NonFiniteUpdate,
    TaskError,
    TaskFailed,
)
from headwater.common.settings.schema import Settings
from headwater.common.system.console import start_log, stderr
from headwater.common.system.heap import use_one_heap
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.printable import printable
from headwater.simulation.engines.client_processes import ROUND, STATE
from headwater.simulation.engines.device_app import process_app
from headwater.simulation.engines.shared_round import SharedRound
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.reports.data_survey import survey_devices

PATIENCE_SECONDS = 60.0  # for the server, which is on the same machine
CHECK_FAILED = 3  # exit status of the child that checks the task, after it has reported why

POLL_SECONDS = 0.05
MAX_UNUSABLE = 5  # devices on which the check fails: a fault of the task shows on each
RUN_DEVICE = (
    "import sys; sys.path[:] = {path!r}; "
    "from headwater.simulation.engines.fork_server import run_spawned_device; run_spawned_device()"
)

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedRun:
    """The state that the devices of a run inherit from the fork server."""

    settings: Settings
    trainer: Trainer
    folder: Path
    is_verbose: bool

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.settings.simulation.clients

    def identity(self, part: int) -> Identity:
        """Return a device's name and its part of the data, the same on every engine."""
        return identities_of(self.settings).of(part)


def main() -> None:
    """Load the task, fork the devices, and end with the last of them or with the engine."""
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task may print
    torch.set_num_threads(1)
    use_one_heap()
    with lasting_output():  # also in the devices: a task that prints needs no disk for it
        _serve(replies)


def _serve(replies: int) -> None:
    def send(message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # the engine has been killed, and the devices end with it
            os.write(replies, json.dumps(message).encode() + b"\n")

    order = json.loads(sys.stdin.readline())
    try:
        run = _load(order)
    except HeadwaterError as error:
        send({"failed": [error.code, error.message]})
        return
    check = _check_in_child if hasattr(os, "fork") else _check_here
    if order["settings"]["check_task"] and not check(run, send):
        return
    line = sys.stdin.readline()
    if not line:
        return
    port = json.loads(line)["port"]
    if hasattr(os, "fork"):
        _fork_devices(run, port, send)
    else:
        _spawn_devices(order, run.num_devices, port, send)


def _fork_devices(run: ForkedRun, port: int, send: Send) -> None:
    """Fork the devices and report the end of each."""
    gc.collect()
    gc.freeze()  # a collection would write into every object, and so copy its page
    parts: dict[int, int] = {}  # by process id
    for part in range(run.num_devices):
        parts[_fork(lambda: _run_device(run, part, port))] = part  # noqa: B023 - called at once
    threading.Thread(target=_end_with_the_engine, args=(parts,), daemon=True).start()
    while parts:
        child, wait_status = os.waitpid(-1, 0)
        send({"ended": parts.pop(child), "status": os.waitstatus_to_exitcode(wait_status)})


def _spawn_devices(order: dict[str, Any], num_devices: int, port: int, send: Send) -> None:
    """Start each device as a new process, and report the end of each: Windows has no fork.

    Each one imports torch and loads the task by itself, which takes seconds and about 200 MB.
    """
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    command = [sys.executable, "-P", "-c", RUN_DEVICE.format(path=sys.path)]
    devices: dict[int, subprocess.Popen[bytes]] = {}
    for part in range(num_devices):
        # It ends when this process does, because then its standard input is closed.
        devices[part] = device = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert device.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: reported below
            device.stdin.write(json.dumps({**order, "part": part, "port": port}).encode() + b"\n")
            device.stdin.flush()
    while devices:
        for part, device in list(devices.items()):
            status = device.poll()
            if status is not None:
                del devices[part]
                send({"ended": part, "status": status})
        time.sleep(POLL_SECONDS)


def run_spawned_device() -> None:
    """Run the device that the first line of the standard input describes."""
    torch.set_num_threads(1)
    use_one_heap()
    order = json.loads(sys.stdin.readline())
    with lasting_output():
        sys.exit(_run_device(_load(order), order["part"], order["port"]))


def _load(order: dict[str, Any]) -> ForkedRun:
    """Load the task and build its model.

    Raises:
        HeadwaterError: see ``run_trainer``.
    """
    settings = Settings.model_validate({**order["settings"], "check_task": False})
    client = settings.client.model_copy(update={"spool": None})
    settings = settings.model_copy(update={"client": client})
    return ForkedRun(
        settings=settings,
        trainer=run_trainer(settings),
        folder=Path(order["folder"]),
        is_verbose=order["is_verbose"],
    )


def _check_in_child(run: ForkedRun, send: Send) -> bool:
    """Check the task in a child process; send the error and return False if the check fails."""

    def check() -> int:
        error = _task_error(run, send)
        if error is None:
            return 0
        send({"failed": [error.code, error.message]})
        return CHECK_FAILED

    _, wait_status = os.waitpid(_fork(check), 0)
    status = os.waitstatus_to_exitcode(wait_status)
    if status not in (0, CHECK_FAILED):
        message = f"the process that checked the task ended with status {status}"
        send({"failed": ["TaskFailed", message]})
    return status == 0


def _check_here(run: ForkedRun, send: Send) -> bool:
    """Check the task in this process; send the error and return False if the check fails."""
    error = _task_error(run, send)
    if error is not None:
        send({"failed": [error.code, error.message]})
    return error is None


def _task_error(run: ForkedRun, send: Send) -> TaskError | NonFiniteUpdate | None:
    """Check the task on the first device that has examples; return the error, if any.

    If there is none, send a summary of all devices' examples that cannot be trained on.
    """
    unusable: list[TaskError | NonFiniteUpdate] = []
    for part in range(run.num_devices):
        identity = run.identity(part)
        try:
            examples = run.trainer.examples(identity)
        except HeadwaterError:
            continue  # this device cannot open its data: it reports so when it describes itself
        try:
            report = run.trainer.check(examples, identity.name)
        except (TaskFailed, NoFiniteExample, NonFiniteUpdate) as error:
            unusable.append(error)  # the data of another device may be better
            if len(unusable) == MAX_UNUSABLE:
                break
        except TaskError as error:
            return error
        except HeadwaterError:
            continue  # as above
        if report.num_seen:
            identities, size = identities_of(run.settings), report.survey_batch_size
            text = survey_devices(run.trainer, identities, batch_size=size).summary()
            if text is not None:
                send({"left_out": text})
        return None
    return unusable[0] if unusable else None


def _fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a child, which exits with the returned status; return the child's id."""
    assert hasattr(os, "fork")  # else the devices are spawned
    child: int = os.fork()
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
        os._exit(status)  # without the exit handlers of the fork server


def _run_device(run: ForkedRun, part: int, port: int) -> int:
    """Run one device until the run ends; return its exit status."""
    identity = run.identity(part)
    log_file = os.open(
        run.folder / f"{identity.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log_file, stream.fileno())
    os.close(log_file)
    threading.Thread(target=_end_with_the_engine, daemon=True).start()
    start_log(verbose=run.is_verbose)
    settings = run.settings
    torch.set_num_threads(settings.threads or 1)
    app = process_app(settings, part, SharedRound(run.folder / ROUND))
    node = Node(app, run.trainer, identity, settings, run.folder / STATE)
    connection = Connection(
        node,
        [f"127.0.0.1:{port}"],
        certificate=None,
        limits=None,
        patience_seconds=PATIENCE_SECONDS,
    )
    try:
        asyncio.run(stay_connected(connection, stay=False))
    except HeadwaterError as error:
        stderr.print(printable(f"{error.code}: {error.message}"), markup=False, soft_wrap=True)
        return error.exit_status
    return 0


def _end_with_the_engine(children: Collection[int] = ()) -> None:
    """Kill the children and end this process when the engine's process ends, for any reason."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    for child in list(children):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    os._exit(1)
