from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from pydantic import BaseModel

from common.settings import Settings, from_run_config

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 180
NUM_NODES = 2
# Each belongs to one machine, or to an engine that `flwr run` is not.
NOT_OF_A_FLOWER_RUN = (
    "insecure",
    "tls.",
    "server.",
    "client.",
    "simulation.",
    "cohort.reconnect",
    "secure.",
)
RUN_CONFIG = (
    "rounds=2 threads=1 cohort.min_clients=2 plan.accumulation_steps=2 plan.micro_batch_size=8 "
    "optimizer.learning_rate=0.1"
)


class Deployment:
    """A SuperLink and its SuperNodes on loopback, with a home of their own.

    SuperLink and SuperNodes start processes in turn, some in sessions of their own: a mark in the
    environment finds them all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._environment = os.environ | {
            "MARK": self._mark,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self) -> None:
        port, *node_ports = free_ports(1 + NUM_NODES)
        address = f"127.0.0.1:{port}"
        (self.folder / "home").mkdir()
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink.loopback]\naddress = "{address}"\ninsecure = true\n'
        )
        self.run("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        for part, node_port in enumerate(node_ports):
            self.run(
                "flower-supernode", "--insecure", "--superlink", address,
                "--host", "127.0.0.1", "--port", str(node_port),
                "--node-config", f"partition-id={part} num-partitions={NUM_NODES}",
            )  # fmt: skip
        self._await_health(f"http://{address}/health")

    def _await_health(self, url: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                with urllib.request.urlopen(url, timeout=1):
                    return
            except OSError:
                assert time.monotonic() < end, self.said()
                time.sleep(0.2)

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}-{uuid4().hex[:4]}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)

    def stop(self) -> None:
        end = time.monotonic() + 20
        for process in self._alive():
            process.terminate()
        while self._alive() and time.monotonic() < end:
            time.sleep(0.2)
        for process in self._alive():
            process.kill()
        for started in self._started:
            started.wait()

    def _alive(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_marked = process.environ().get("MARK") == self._mark
            return is_marked and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            return False


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    it = Deployment(tmp_path)
    yield it
    it.stop()


@pytest.mark.slow
def test_flwr_run_on_two_supernodes_gives_the_in_process_model_bit_for_bit(
    deployment: Deployment,
) -> None:
    out, alone = deployment.folder / "out", deployment.folder / "in-process"
    deployment.start()
    run = deployment.run(
        "flwr", "run", str(ROOT), "loopback", "--stream",
        "--run-config", f'{RUN_CONFIG} out="{out}"',
    )  # fmt: skip
    assert run.wait(PATIENCE_SECONDS) == 0, deployment.said()
    reference = subprocess.run(
        [
            sys.executable, "-m", "simulation", "--task", "examples/digits.py:Digits",
            "--clients", str(NUM_NODES), "--rounds", "2", "--threads", "1",
            "--accumulation-steps", "2", "--micro-batch-size", "8", "--out", str(alone),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )  # fmt: skip
    assert reference.returncode == 0, reference.stderr
    assert (out / "model.safetensors").exists(), deployment.said()
    assert (out / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    assert names_by_round(out) == names_by_round(alone) == [["0", "1"]] * 2


def names_by_round(out: Path) -> list[list[str]]:
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [[client["name"] for client in row["clients"]] for row in rounds]


def test_every_setting_of_a_run_can_be_set_by_run_config() -> None:
    settable = {key for key in flat(run_config()) if ".arguments." not in key}
    of_a_run = {key for key in scalars(Settings) if not key.startswith(NOT_OF_A_FLOWER_RUN)}
    assert settable == of_a_run | {"client.memory_limit_bytes"}


def test_the_run_config_of_the_bundle_is_a_valid_tree_of_settings() -> None:
    settings = from_run_config(flat(run_config()))
    assert settings.optimizer.arguments == settings.schedule.arguments == {}
    assert settings.out is None


def run_config() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    config: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return config


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        under = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        leaves |= under
    return leaves


def scalars(branch: type[BaseModel], prefix: str = "") -> set[str]:
    """The dotted name of every field below a branch, free dictionaries apart."""
    names: set[str] = set()
    for name, field in branch.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names |= scalars(kind, f"{prefix}{name}.")
        elif name != "arguments":
            names.add(prefix + name)
    return names
