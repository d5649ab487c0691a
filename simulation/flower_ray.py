"""The same two apps on Flower's Ray simulation.

Flower keeps the nodes, the messages and the worker processes; this module gives it the apps and the
settings, and takes care that an error or Ctrl-C comes out as itself and that nothing is left
running. Flower's only public way in, ``flwr.simulation.run_simulation``, is deprecated and can give
clients no ``run_config``; what it calls can, and is the one private name used here. It is also what
``flwr run`` calls.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w
from flwr.app import ConfigRecordValues, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run

from client.app import client_app
from client.asked import SIMULATED
from common import records
from common.errors import SettingsError
from common.settings import Settings
from server.app import server_app
from server.rounds import OnRound
from simulation.draws import at_round
from simulation.faults import TRAIN
from simulation.fleet import simulated_machine
from simulation.vanishing import LastAsked, app_of, refusal_of

# Read by Flower and Ray when they are imported or started: no look-up leaves the machine, and Ray
# neither counts its users, nor warns of GPUs that nobody has, nor starts anew behind a shutdown.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# A socket's path may have 107 characters and Ray needs some 70 of them: no long TMPDIR will do.
RAY_FOLDER_PARENT = "/tmp"
REGISTRATION_POLL_SECONDS = 0.05

ASKED = "asked"  # in a node's context: the round that it was last asked to train in


def run_on_ray(settings: Settings, *, on_round: OnRound) -> None:
    """Run the settings with ``settings.simulation.clients`` nodes on Ray.

    The nodes are named 0 to N-1, as on the in-process engine. With RAY_ADDRESS set, the workers are
    those of that cluster; else of a Ray of our own, which ends with this call.

    Raises:
        SettingsError: ray is not installed.
        HeadwaterError: whatever ended the ServerApp, as it was raised there.
    """
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            "the engine flower-ray needs ray, which is not installed",
            remedy="pip install 'headwater[ray]', or take --engine in-process",
        )
    os.environ.update(QUIET)
    threads = settings.threads or 1
    settings = settings.model_copy(update={"threads": threads})
    watched = _Watched(settings, on_round)
    with tempfile.TemporaryDirectory(
        prefix="headwater-", dir=RAY_FOLDER_PARENT, ignore_cleanup_errors=True
    ) as folder:
        _write_project(Path(folder), settings)
        with _warnings_only("flwr"):
            try:
                _simulate(watched, settings, Path(folder))
            except Exception:
                if watched.error is None:
                    raise
    if watched.error is not None:
        raise watched.error


def _simulate(watched: _Watched, settings: Settings, folder: Path) -> None:
    """Run Flower's engine until the ServerApp is done or has failed."""
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    try:
        _run_simulation(
            num_supernodes=settings.simulation.clients,
            exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
            server_app=watched.app,
            client_app=_simulated(client_app(simulated_machine), settings),
            app_dir=str(folder),
            is_app=True,  # the clients' run_config comes from the pyproject.toml in app_dir
            backend_config={
                "init_args": _ray_arguments(settings, folder),
                "client_resources": {"num_cpus": _cpus_per_client(settings), "num_gpus": 0.0},
            },
        )
    finally:
        watched.stop()


def _ray_arguments(settings: Settings, folder: Path) -> dict[str, ConfigRecordValues]:
    quiet: dict[str, ConfigRecordValues] = {"logging_level": "ERROR", "log_to_driver": True}
    if "RAY_ADDRESS" in os.environ:
        return quiet
    # Not "auto": a Ray that somebody else has started on this machine is none of our business.
    cpus = min(os.cpu_count() or 1, settings.simulation.clients * _cpus_per_client(settings))
    return quiet | {"address": "local", "num_cpus": cpus, "_temp_dir": str(folder / "ray")}


def _cpus_per_client(settings: Settings) -> int:
    """Return the cores that a worker reserves; more than there are would leave no worker at all."""
    return min(settings.threads or 1, os.cpu_count() or 1)


def _write_project(folder: Path, settings: Settings) -> None:
    """Write the settings as the run-config of a Flower project, where Flower looks for it."""
    project = {
        "project": {"name": "headwater", "version": "0"},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "headwater",
                    "components": {"serverapp": "server.app:app", "clientapp": "client.app:app"},
                    "config": settings.to_run_config(),
                }
            }
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project))


@contextmanager
def _warnings_only(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _simulated(app: ClientApp, settings: Settings) -> ClientApp:
    """Return an app that runs the other as a simulated device, in the round of its message.

    A device that has vanished does not run it: the reply is what the server sees of a lost one.
    """

    def as_it_is(message: Message, context: Context) -> Message:
        context.node_config[SIMULATED] = True
        return app(message, context)

    def unless_vanished(message: Message, context: Context) -> Message:
        kind, part = message.metadata.message_type, int(context.node_config["partition-id"])
        asked = LastAsked(**(records.kept(context, ASKED) or {}))
        if kind == TRAIN:
            asked = asked.again(int(message.metadata.group_id))
            records.keep(context, ASKED, asked)
        if asked.has_vanished(settings, part, kind):
            return refusal_of(part, message)
        with at_round(asked.round):
            return as_it_is(message, context)

    return app_of(describe=as_it_is, unless_vanished=unless_vanished)


class _Watched:
    """The ServerApp, with its error kept whole and a way to end it from outside.

    Flower runs it in a thread of its own and wraps, or only logs, what is raised there.
    """

    def __init__(self, settings: Settings, on_round: OnRound) -> None:
        self.error: Exception | None = None
        self._settings = settings
        self._inner = server_app(on_round=on_round)
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None
        self.app = ServerApp()
        self.app.main()(self._main)

    def _main(self, grid: Grid, _: Context) -> None:
        self._thread = threading.current_thread()
        context = Context(
            run_id=grid.run.run_id,
            node_id=0,
            node_config={},
            state=RecordDict(),
            run_config=self._settings.to_run_config(),
        )
        try:
            self._inner(self._complete(grid), context)
        except _Stopped:
            pass
        except Exception as error:
            self.error = error

    def _complete(self, grid: Grid) -> Grid:
        """Wait until Flower has registered every node: it does so while the ServerApp runs."""
        stoppable = _StoppableGrid(grid, self._stop_asked)
        while len(list(stoppable.get_node_ids())) < self._settings.simulation.clients:
            time.sleep(REGISTRATION_POLL_SECONDS)
        return stoppable

    def stop(self) -> None:
        """End the ServerApp at its next look at the grid, and wait until it has saved its model."""
        self._stop_asked.set()
        if self._thread is not None:
            self._thread.join()


class _Stopped(Exception):
    """The engine is gone: Ctrl-C, or a fault of its own."""


class _StoppableGrid(Grid):
    """Flower's grid, until the engine behind it is gone."""

    awaits_more = False

    def __init__(self, grid: Grid, stop_asked: threading.Event) -> None:
        self._grid = grid
        self._stop_asked = stop_asked

    def _checked(self) -> Grid:
        if self._stop_asked.is_set():
            raise _Stopped
        return self._grid

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return self._checked().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._checked().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._checked().pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self._checked().send_and_receive(messages, timeout=timeout)
