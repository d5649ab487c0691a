"""The engine flower-ray: the same two apps on Flower's Ray simulation.

Flower provides nodes, messages and worker processes. This module gives Flower the apps and the
settings, raises an error or Ctrl-C as it occurred, and leaves no process running. Flower's only
public function, ``flwr.simulation.run_simulation``, is deprecated and cannot pass a ``run_config``
to clients. ``common.flower.grid`` calls the private function that can, as ``flwr run`` does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from headwater.client.app import client_app
from headwater.common.errors import SettingsError
from headwater.common.flower.grid import simulate_on_ray
from headwater.common.settings.schema import Settings
from headwater.common.system.stop_signals import StopRequests, at_stop_signals, interrupt_at_once
from headwater.server.app import server_app, server_context
from headwater.server.rounds.checkpoint import saved_round
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_loop import NO_OBSERVER, OnRound
from headwater.server.rounds.run_folder import interrupt_after
from headwater.simulation.cluster.ray_cluster import (
    QUIET,
    RAY_FOLDER_PARENT,
    cpus_per_client,
    joined,
)
from headwater.simulation.cluster.ray_grid import RayGrid, Stopped
from headwater.simulation.engines.device_app import ray_app
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

REGISTRATION_POLL_SECONDS = 0.05


def run_on_ray(settings: Settings, *, on_round: OnRound, observer: Observer = NO_OBSERVER) -> None:
    """Run the settings with ``settings.simulation.clients`` nodes on Ray.

    The nodes are named 0 to N-1, as on the in-process engine. With RAY_ADDRESS set, the workers
    are those of that cluster; otherwise Ray runs on this machine until this call returns. Workers
    resolve relative paths in the current folder of this process.

    Raises:
        SettingsError: ray is not installed, or the cluster cannot be joined.
        WorkerDied: a worker, or its machine, has failed.
        HeadwaterError: the error that ended the ServerApp, as it was raised there.
    """
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            "the engine flower-ray needs ray, which is not installed",
            remedy="pip install 'headwater[ray]', or take --engine in-process",
        )
    os.environ.update(QUIET)
    threads = settings.threads or 1
    settings = settings.model_copy(update={"threads": threads})
    app, out = _WatchedServerApp(settings, on_round, observer), settings.out
    with tempfile.TemporaryDirectory(
        prefix="headwater-", dir=RAY_FOLDER_PARENT, ignore_cleanup_errors=True
    ) as folder:
        _write_project(Path(folder), settings)
        with joined(settings, Path(folder)), _warnings_only("flwr"), _interrupt_in_order(app, out):
            try:
                _simulate(app, settings, Path(folder))
            except Exception:
                if app.error is None:
                    raise
    if app.error is not None:
        raise app.error


def _simulate(app: _WatchedServerApp, settings: Settings, folder: Path) -> None:
    """Run Flower's engine until the ServerApp has returned or failed."""
    try:
        simulate_on_ray(
            app.app,
            ray_app(client_app(virtual_hardware), settings, Path.cwd()),
            num_clients=settings.simulation.clients,
            app_folder=folder,
            client_resources={"num_cpus": cpus_per_client(settings), "num_gpus": 0.0},
        )
    finally:
        app.stop()


def _write_project(folder: Path, settings: Settings) -> None:
    """Write a Flower project whose run-config contains the settings."""
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
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


@contextmanager
def _warnings_only(logger_name: str) -> Iterator[None]:
    """Let a logger log only warnings and errors."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _interrupt_in_order(app: _WatchedServerApp, folder: Path | None) -> Iterator[None]:
    """On Ctrl-C stop the ServerApp, then Flower's workers, and then raise KeyboardInterrupt.

    Raised immediately, it makes Flower shut Ray down while threads wait for Ray's replies, and one
    of these threads then blocked the process for ever. A second request is raised immediately.
    """
    was_interrupted = False

    def stop() -> None:
        nonlocal was_interrupted
        was_interrupted = True
        app.request_stop()

    with at_stop_signals(StopRequests(stop, interrupt_at_once)):
        yield
    if was_interrupted:
        done = None if folder is None else saved_round(folder)
        raise interrupt_after(done or 0, folder)


class _WatchedServerApp:
    """The ServerApp, with access to its error and a method to stop it.

    Flower runs it in another thread, and wraps or only logs the errors that are raised there.
    """

    def __init__(self, settings: Settings, on_round: OnRound, observer: Observer) -> None:
        self.error: Exception | None = None
        self._settings = settings
        self._inner = server_app(on_round=on_round, observer=observer)
        self._stop_requested = threading.Event()
        self._thread: threading.Thread | None = None
        self.app = ServerApp()
        self.app.main()(self._main)

    def _main(self, grid: Grid, _: Context) -> None:
        self._thread = threading.current_thread()
        context = server_context(self._settings, run_id=grid.run.run_id)
        try:
            self._inner(self._wait_for_nodes(grid), context)
        except Stopped:
            pass
        except Exception as error:
            self.error = error

    def _wait_for_nodes(self, grid: Grid) -> Grid:
        """Wait for Flower to register every node, which it does while the ServerApp runs."""
        stoppable = RayGrid(grid, self._stop_requested)
        while len(list(stoppable.get_node_ids())) < self._settings.simulation.clients:
            time.sleep(REGISTRATION_POLL_SECONDS)
        return stoppable

    def request_stop(self) -> None:
        """Make the ServerApp end at its next use of the grid."""
        self._stop_requested.set()

    def stop(self) -> None:
        """Stop the ServerApp, and wait until it has saved its model."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join()
