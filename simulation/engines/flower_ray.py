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
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import tomli_w
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run

from headwater.client.app import client_app
from headwater.client.flower.request import SIMULATED
from headwater.common.errors import SettingsError, WorkerDied
from headwater.common.flower import records
from headwater.common.settings.schema import Settings
from headwater.server.app import server_app
from headwater.server.rounds.run import OnRound
from headwater.simulation.engines.ray_cluster import (
    QUIET,
    RAY_FOLDER_PARENT,
    cpus_per_client,
    joined,
)
from headwater.simulation.engines.vanishing import LastAsked, app_of, refusal_of
from headwater.simulation.fleet.faults import TRAIN
from headwater.simulation.fleet.random_events import at_round
from headwater.simulation.fleet.virtual_hardware import simulated_machine

REGISTRATION_POLL_SECONDS = 0.05
MOST_TOLD = 300  # characters of either end of what Ray says of a worker that failed

ASKED = "asked"  # in a node's context: the round that it was last asked to train in


def run_on_ray(settings: Settings, *, on_round: OnRound) -> None:
    """Run the settings with ``settings.simulation.clients`` nodes on Ray.

    The nodes are named 0 to N-1, as on the in-process engine. With RAY_ADDRESS set, the workers are
    those of that cluster; else of a Ray of our own, which ends with this call. Workers find files
    from the folder in which this process is.

    Raises:
        SettingsError: ray is not installed, or its cluster cannot be joined.
        WorkerDied: a worker, or the machine under it, is gone.
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
        with joined(settings, Path(folder)), _warnings_only("flwr"), _in_order(watched):
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
            client_app=_simulated(client_app(simulated_machine), settings, Path.cwd()),
            app_dir=str(folder),
            is_app=True,  # the clients' run_config comes from the pyproject.toml in app_dir
            backend_config={
                "client_resources": {"num_cpus": cpus_per_client(settings), "num_gpus": 0.0}
            },
        )
    finally:
        watched.stop()


def _write_project(folder: Path, settings: Settings) -> None:
    """Write the settings as the run-config of a Flower project, where Flower looks for it."""
    project = {
        "project": {"name": "headwater", "version": "0"},
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "headwater",
                    "components": {
                        "serverapp": "headwater.server.app:app",
                        "clientapp": "headwater.client.app:app",
                    },
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


@contextmanager
def _in_order(watched: _Watched) -> Iterator[None]:
    """Let Ctrl-C end the ServerApp first, then Flower's workers, and then be raised.

    Raised at once it has Flower shut Ray down under threads that wait for an answer from it; one
    of them then kept the process for ever. A second Ctrl-C is raised at once.
    """
    default = signal.default_int_handler
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    was_asked = False

    def ask(_: int, __: FrameType | None) -> None:
        nonlocal was_asked
        was_asked = True
        signal.signal(signal.SIGINT, default)
        watched.ask_to_stop()

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if was_asked:
        raise KeyboardInterrupt


def _simulated(app: ClientApp, settings: Settings, folder: Path) -> ClientApp:
    """Return an app that runs the other as a simulated device, in the round of its message.

    It runs in ``folder``: a worker on another machine began where somebody started Ray. A device
    that has vanished does not run it: the reply is what the server sees of a lost one.
    """

    def as_it_is(message: Message, context: Context) -> Message:
        try:
            os.chdir(folder)
        except OSError as error:
            return Message(records.refusal(_not_alike(folder, error)), reply_to=message)
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


def _not_alike(folder: Path, error: OSError) -> SettingsError:
    return SettingsError(
        f"{socket.gethostname()}, a machine of the Ray cluster, has no folder {folder}, in which "
        f"the simulator was started: {error.strerror}",
        remedy="put the task, its data and the fleet's file at the same paths on every machine",
    )


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

    def ask_to_stop(self) -> None:
        """Let the ServerApp end at its next look at the grid."""
        self._stop_asked.set()

    def stop(self) -> None:
        """End the ServerApp so, and wait until it has saved its model."""
        self.ask_to_stop()
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
        return _answered(self._checked().pull_messages(message_ids))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return _answered(self._checked().send_and_receive(messages, timeout=timeout))


def _answered(replies: Iterable[Message]) -> Iterator[Message]:
    """Yield the replies that come from an app, or tell of its error.

    Flower goes on to send messages to a worker that is gone, and each comes back at once as an
    error: a run that went on would lose most of its devices.

    Raises:
        WorkerDied: a reply is Flower's own, for a worker that did not get so far.
    """
    for reply in replies:
        if reply.has_error() and reply.error.code == ErrorCode.UNKNOWN:
            raise WorkerDied(
                f"a worker of Ray failed: {_in_short(reply.error.reason or '')}",
                remedy="every machine of the cluster needs the same Headwater, Python and "
                "packages, and memory for a worker per core; the rounds before are kept",
            )
        yield reply


def _in_short(text: str) -> str:
    """Return a text on one line, of a long one its begin and end: what failed, and why."""
    line = " ".join(text.split())
    return line if len(line) <= 2 * MOST_TOLD else f"{line[:MOST_TOLD]} ... {line[-MOST_TOLD:]}"
