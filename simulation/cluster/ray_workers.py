"""Workers on a Ray cluster: an actor for each client at a time, on every machine that there is.

They compute what processes of one machine would (``simulation.compute.worker_pool``), with the same
bits. A model is stored once a round, and each machine fetches it once. Machines that
have joined have workers from the next round on. If a machine is lost, the devices that its workers
had are dropouts of the round.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.common.errors import HeadwaterError, SettingsError, WorkerDied
from headwater.common.flower.sent_model import SentModel
from headwater.common.settings.schema import Settings
from headwater.common.system.console import print_text, start_log
from headwater.common.wording import counted
from headwater.simulation.cluster.ray_cluster import (
    QUIET,
    RAY_FOLDER_PARENT,
    cpus_per_client,
    joined,
)
from headwater.simulation.compute.orders import Order, Result, SumOrder, WorkerSettings
from headwater.simulation.compute.worker import Worker
from headwater.simulation.compute.worker_pool import WorkerPool, num_slots
from headwater.simulation.fleet.devices import Devices

log = logging.getLogger(__name__)

# How long a run without any machine waits for one; in so long a machine that is there answers.
PATIENCE_SECONDS, CONNECT_SECONDS = 60.0, 2.0
POLL_SECONDS = 0.1


@contextmanager
def cluster(settings: Settings) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or start Ray on this machine, until the context ends.

    Raises:
        SettingsError: ray is not installed, or the cluster cannot be joined.
    """
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            "the engine ray needs ray, which is not installed",
            remedy="pip install 'headwater[ray]', or take --workers N on this machine",
        )
    os.environ.update(QUIET)
    with (
        TemporaryDirectory(
            prefix="headwater-", dir=RAY_FOLDER_PARENT, ignore_cleanup_errors=True
        ) as folder,
        joined(settings, Path(folder)),
    ):
        yield


def ray_pool(devices: Devices, number: int) -> WorkerPool:
    """Return a pool of at most so many workers, on the cluster that this process has joined."""
    return WorkerPool(devices, RayWorkers(devices, most=number))


class RayWorker:
    """What runs in an actor of Ray: a worker, in the folder in which the simulator was started."""

    def __init__(self, arguments: tuple[WorkerSettings, Path, NDArray[np.uint8]]) -> None:
        start, folder, frozen = arguments
        os.dup2(2, 1)  # what a task prints must not mix with the simulator's output
        try:
            os.chdir(folder)
        except OSError as error:
            raise SettingsError(
                f"{socket.gethostname()}, a machine of the Ray cluster, has no folder {folder}, in "
                f"which the simulator was started: {error.strerror}",
                remedy="put the task and its data at the same paths on every machine",
            ) from error
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        start_log(verbose=start.is_verbose)
        self._worker = Worker(start)
        if start.frozen is not None:
            own = frozen.copy()  # Ray's memory is only to be read
            self._worker.adopt_frozen(torch.from_numpy(own), torch.from_numpy(own.copy()))

    def carry_out(
        self, order: Order, model: NDArray[np.uint8]
    ) -> tuple[Result, list[NDArray[np.float32]]]:
        """Return an order's result, and the vectors that it would have put into slots."""
        number = 0 if isinstance(order, SumOrder) else len(order.slots)
        worker = self._worker
        if len(worker.vectors) < number:
            num_values = worker.image.layout.num_parameters
            worker.use([torch.zeros(num_values) for _ in range(number)])
        if not isinstance(order, SumOrder):
            order = replace(order, slots=range(number))
        result = worker.carry_out(order, model.data)
        return result, [vector.numpy() for vector in worker.vectors[:number]]


@dataclass(kw_only=True, slots=True)
class _Actor:
    handle: Any
    node: str
    orders: deque[tuple[Any, Order]] = field(default_factory=deque)
    """The references to the results of its orders, in their turn."""


class RayWorkers:
    """See ``simulation.compute.worker_pool.Workers``."""

    def __init__(self, devices: Devices, *, most: int) -> None:
        """Start at most so many, with the first round."""
        import ray

        self._ray: Any = ray
        self._most = most
        self._settings = devices.settings
        self._cpus = cpus_per_client(devices.settings)
        layout, source = devices.trainer.image.layout, devices.trainer.loaded_model.frozen_source
        self.slots: Sequence[Tensor] = [
            torch.zeros(layout.num_parameters) for _ in range(num_slots(devices, most))
        ]
        start = WorkerSettings(
            # The task was checked in this process, which reports its problems.
            settings=devices.settings.model_copy(update={"check_task": False}),
            frozen=None if source is None else source[1],
            is_verbose=log.isEnabledFor(logging.INFO),
        )
        frozen = np.zeros(0, dtype=np.uint8) if source is None else source[0].numpy()
        self._arguments = ray.put((start, Path.cwd(), frozen))
        self._actors: dict[int, _Actor] = {}
        self._num_started = 0
        self._model: Any = None
        self._said = -1

    @property
    def num_nodes(self) -> int:
        """The machines that have workers."""
        return len({actor.node for actor in self._actors.values()})

    def begin(self, image: SentModel) -> Sequence[int]:
        self._model = self._ray.put(np.frombuffer(image.buffer(), dtype=np.uint8))
        end = time.monotonic() + PATIENCE_SECONDS
        while not self._start_missing():
            if time.monotonic() >= end:
                raise WorkerDied(
                    "no machine of the Ray cluster is left",
                    remedy="add one (`ray start --address HEAD:PORT`); the completed rounds are "
                    "saved, and --resume goes on after them",
                )
            time.sleep(POLL_SECONDS)
        if self.num_nodes != self._said:
            self._said = self.num_nodes
            number = counted(len(self._actors), "client")
            print_text(f"Ray: {number} at a time on {counted(self._said, 'node')}")
        return list(self._actors)

    def _start_missing(self) -> bool:
        """Start workers on the machines that have none yet; return whether there are any."""
        nodes = {
            node["NodeID"]: int(node["Resources"].get("CPU", 0.0) // self._cpus)
            for node in self._ray.nodes()
            if node["Alive"]
        }
        for number in [n for n, actor in self._actors.items() if actor.node not in nodes]:
            del self._actors[number]
        for node, room in nodes.items():
            own = sum(actor.node == node for actor in self._actors.values())
            for _ in range(min(room - own, self._most - len(self._actors))):
                self._start(node)
        return bool(self._actors)

    def _start(self, node: str) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = self._ray.remote(RayWorker)
        here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        handle = kind.options(
            num_cpus=self._cpus, max_restarts=0, max_task_retries=0, scheduling_strategy=here
        ).remote(self._arguments)
        self._actors[self._num_started] = _Actor(handle=handle, node=node)
        self._num_started += 1

    def send(self, worker: int, order: Order) -> None:
        actor = self._actors[worker]
        actor.orders.append((actor.handle.carry_out.remote(order, self._model), order))

    def receive(self, *, is_patient: bool) -> Sequence[tuple[int, Result | WorkerDied]]:
        first = {actor.orders[0][0]: n for n, actor in self._actors.items() if actor.orders}
        if not first:
            return []
        ready, _ = self._ray.wait(
            list(first), num_returns=1, timeout=None if is_patient else 0, fetch_local=True
        )
        if ready:  # all that have come by now
            ready, _ = self._ray.wait(list(first), num_returns=len(first), timeout=0)
        return [(first[one], self._result(first[one])) for one in ready]

    def _result(self, number: int) -> Result | WorkerDied:
        """Return the result of a worker's first order, with its vectors in their slots."""
        actor = self._actors[number]
        reference, order = actor.orders[0]
        try:
            result, vectors = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _of_task(error) from None
        except self._ray.exceptions.RayError as error:
            if self._is_there(actor.node):
                raise WorkerDied(f"a worker of Ray ended: {_shown(error)}") from None
            del self._actors[number]
            log.warning("a machine of the Ray cluster is gone: node %s", actor.node)
            return WorkerDied("its worker was lost with a machine of the Ray cluster")
        actor.orders.popleft()
        if not isinstance(order, SumOrder):
            for slot, vector in zip(order.slots, vectors, strict=True):
                self.slots[slot].numpy()[:] = vector
        found: Result = result
        return found

    def _is_there(self, node_id: str) -> bool:
        """Whether a machine of the cluster can be reached: Ray says so only after some seconds."""
        for node in self._ray.nodes():
            if node["NodeID"] == node_id and node["Alive"]:
                place = node["NodeManagerAddress"], node["NodeManagerPort"]
                try:
                    socket.create_connection(place, CONNECT_SECONDS).close()
                except OSError:
                    return False
                return True
        return False

    def close(self) -> None:
        """End the workers: they hold nothing that is needed."""
        for actor in self._actors.values():
            self._ray.kill(actor.handle)
        self._actors.clear()


def _of_task(error: Any) -> HeadwaterError:
    """Return the error that a worker's code raised."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HeadwaterError):
        return cause
    return WorkerDied(
        f"a worker of Ray failed: {_shown(cause or error)}",
        remedy="every machine of the cluster needs the same Headwater, Python and packages, and "
        "memory for a worker per core; the completed rounds are saved",
    )


def _shown(error: object) -> str:
    return " ".join(str(error).split())[:600]
