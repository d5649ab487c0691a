"""A process that computes devices for a simulator, one after another, by the device's own code.

It has a model of its own and loads each round's from shared memory; it is told a device, its plan
and its place, and answers with the report, the place behind it, and the vector in a slot of shared
memory. What else it knows of a device would be the same in any other process, so it does not matter
which one computes it. It holds nothing that is missed when it is killed, and it ends when there is
nobody left to ask.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from pydantic import BaseModel, ConfigDict

from headwater.client.training.micro_batches import Walk
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.settings.schema import Settings
from headwater.common.system.heap import keep_freed


class Said(BaseModel):
    """A message between the simulator and a worker."""

    model_config = ConfigDict(frozen=True)


class Start(Said):
    """What a worker is told first."""

    settings: Settings
    num_slots: int
    is_verbose: bool


class Order(Said):
    """A device that is to be computed; its vector goes into this slot."""

    slot: int
    run_id: int
    part: int
    plan: Plan
    walk: Walk
    is_checkpointed: bool


class Answer(Said):
    """What a device came to: a report, or the name and message of an error."""

    walk: Walk
    is_checkpointed: bool
    report: UpdateReport | None = None
    error: tuple[str, str] | None = None


def work(connection: Connection, descriptor: int, start: Start) -> None:
    """Compute what is asked for, until nobody asks."""
    # Here rather than at the top: the simulator reads this file for its messages alone.
    import torch

    from headwater.simulation.compute.one_by_one import OneByOne
    from headwater.simulation.compute.shared_memory import Shared
    from headwater.simulation.fleet.devices import Called, Devices

    torch.set_num_threads(start.settings.threads or 1)
    keep_freed()
    devices = Devices(start.settings)
    resident, one_by_one = devices.resident, OneByOne(devices)
    shared = Shared(descriptor, resident.image.layout, start.num_slots)
    os.close(descriptor)
    while True:
        try:
            order = Order.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        called = Called(str(order.part), order.part, order.plan)
        devices.walks[order.part] = order.walk
        if order.is_checkpointed:
            resident.checkpointed.add(called.name)
        given = one_by_one.answer(called, shared.image, run_id=order.run_id)
        report = error = None
        if isinstance(given, Update):
            shared.slots[order.slot].copy_(given.values_P)
            report = given.report
        else:
            # Nobody but the user of this machine reads it: nothing of it is kept back.
            error = type(given.error).__name__, given.error.message
        answer = Answer(
            walk=devices.walks[order.part],
            is_checkpointed=called.name in resident.checkpointed,
            report=report,
            error=error,
        )
        connection.send_bytes(answer.model_dump_json().encode())


def main() -> None:
    """Work for the process that has started this one, on the descriptors that it names."""
    from headwater.common.system.console import start_log

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the simulator, which ends this one
    asked, descriptor = int(sys.argv[1]), int(sys.argv[2])
    os.dup2(2, 1)  # a task that prints does not print into what the simulator says
    with Connection(asked) as connection:
        try:
            start = Start.model_validate_json(connection.recv_bytes())
            start_log(verbose=start.is_verbose)
            work(connection, descriptor, start)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logging.getLogger(__name__).debug("the simulator has ended")


if __name__ == "__main__":
    main()
