"""`flwr run` of a converted Flower app, on Flower's own SuperLink and simulated SuperNodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psutil
import pytest

from headwater.simulation.cluster.ray_cluster import QUIET, RAY_FOLDER_PARENT
from tests.processes import free_port, until
from tests.venvs import ROOT

APP = ROOT / "examples" / "flower_app" / "quickstart"
NUM_NODES = 3
PATIENCE_SECONDS = 270  # a run takes half a minute on two idle cores


class SuperLink:
    """A SuperLink of this test alone; a mark in the environment finds all that it starts."""

    def __init__(self, folder: Path, ray_folder: str) -> None:
        self._mark = uuid4().hex
        self._folder = folder
        self._port = free_port()
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink.loopback]\naddress = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | QUIET | {
            "MARK": self._mark,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "RAY_TMPDIR": ray_folder,  # else Ray joins what it finds in its usual folder
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }  # fmt: skip

    def start(self) -> None:
        self._run(
            *("flower-superlink", "--insecure", "--simulation"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
        )
        until(self._answers, what=lambda: "the SuperLink to answer")

    def flwr_run(self, *options: str) -> str:
        """Run the app to its end and return what it said."""
        run = self._run("flwr", "run", str(APP), "loopback", "--stream", *options)
        until(lambda: run.poll() is not None, seconds=PATIENCE_SECONDS, what=self._said)
        return self._said()

    def _said(self) -> str:
        return (self._folder / "flwr.log").read_text()

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{command[0]}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def stop(self) -> None:
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self._mark:
                    process.kill()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        for started in self._started:
            started.wait()


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    with TemporaryDirectory(
        prefix="headwater-", dir=RAY_FOLDER_PARENT, ignore_cleanup_errors=True
    ) as ray_folder:
        it = SuperLink(tmp_path, ray_folder)
        try:
            it.start()
            yield it
        finally:
            it.stop()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flwr_run_trains_the_quickstart_and_says_what_the_rate_is(superlink: SuperLink) -> None:
    said = superlink.flwr_run(
        "--run-config", "num-server-rounds=2", "--federation-config", f"num-supernodes={NUM_NODES}"
    )
    assert "FedAvg's clients does not carry over" in said
    assert "2: {'num-examples': '1437', 'num-refused': '0'" in said, said
