from __future__ import annotations

import itertools
import os
import subprocess
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from pydantic import BaseModel

from headwater.client.enrolment.signing_identity import make_identity
from headwater.common.model.trained_model import BEST, MODEL, read_model
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import from_run_config
from headwater.server.operations.round_log import read_rows
from headwater.simulation.fleet.fleet_spec import fleet_spec
from headwater.simulation.fleet.random_events import vanishes_at
from headwater.simulation.run import run_engine
from tests import fork_server
from tests.processes import free_port, until
from tests.venvs import make_venv

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 280
NUM_NODES = 4
# Each is started for every message, run or node, and imports the same.
STARTED_OFTEN = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")
PARTS = range(NUM_NODES)
# Each belongs to one machine, or to an engine that `flwr run` is not.
NOT_OF_A_FLOWER_RUN = (
    "plain_text",
    "public_metrics",
    "submitted_code",
    "privacy.budget",
    "privacy.new_budget",
    "tls.",
    "server.",
    "alerts.",
    "standby.",
    "client.",
    "simulation.",
    "cohort.reconnect",
    "secure.identity",
    "secure.allow_list",
    "secure.order_seed",
    "secure.declared_examples",
)
RUN_CONFIG = (
    f"threads=1 cohort.min_clients={NUM_NODES - 1} plan.accumulation_steps=2 "
    'plan.micro_batch_size=8 optimizer.name="sgd" optimizer.learning_rate=0.1 '
    "secure.phase_seconds=1000"
)
# A SuperNode that does not wait: how often it looks for messages and replies cannot be set. Given
# a type of message it stops, in good order as on Ctrl-C, when it is sent one of that.
SUPERNODE = """
import os, signal, sys, time
from types import SimpleNamespace
from flwr.supernode import start_client_internal as inner
from flwr.supernode.cli import flower_supernode

def log(level, text, *arguments):
    said(level, text, *arguments)
    if text.startswith("Receiving") and arguments[0] == vanishes_at:
        os.kill(os.getpid(), signal.SIGTERM)

vanishes_at = sys.argv.pop(1)
said, inner.log = inner.log, log
inner.time = SimpleNamespace(sleep=lambda seconds: time.sleep(0.1))
flower_supernode()
"""


class Deployment:
    """A SuperLink and its SuperNodes on loopback, with a home of their own.

    Headwater is not installed where they run: they have it from the bundle that `flwr run` sends.
    SuperLink and SuperNodes start processes in turn, some in sessions of their own: a mark in the
    environment finds them all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._owners = ""
        self._port, *self._node_ports = (free_port() for _ in range(1 + NUM_NODES))
        self._bin = make_venv(folder / "venv")
        self._environment = os.environ | {
            "MARK": self._mark,
            # The bundle is compiled once, and not by the process of each message.
            "PYTHONDONTWRITEBYTECODE": "",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
        }

    def start(self) -> None:
        without = subprocess.run([self._bin / "python", "-c", "import headwater"], cwd=self.folder)
        assert without.returncode != 0
        address = f"127.0.0.1:{self._port}"
        forks = self.folder / "forks"
        for command in STARTED_OFTEN:
            fork_server.make_preloaded(self._bin / command, forks)
        self.run(str(self._bin / "python"), "-P", fork_server.__file__, str(forks))
        (self.folder / "home").mkdir()
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink.loopback]\naddress = "{address}"\ninsecure = true\n'
        )
        lines = [make_identity(self.of(part) / "key", str(part))[0].line for part in PARTS]
        (self.folder / "allow-list").write_text("\n".join(lines))
        self._await(forks.exists)
        self.run("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self._port))
        self._await_health(f"http://{address}/health")

    def of(self, part: int) -> Path:
        """The folder of a device's own files."""
        return self.folder / f"device-{part}"

    def keys(self, part: int) -> list[Path]:
        """The keys of updates that await a message."""
        return list((self.of(part) / "runtime").glob("*"))

    def start_nodes(self, *, last_vanishes_at: str = "never", owners: str = "") -> None:
        """Start the SuperNodes that do not run, the last anew if it is to vanish; wait for all.

        ``owners`` is what their owners add to the nodes' configuration; if it changes, all restart.
        """
        is_as_before, self._owners = owners == self._owners, owners
        for part, port in zip(PARTS, self._node_ports, strict=True):
            when = last_vanishes_at if part == PARTS[-1] else "never"
            if part in self._nodes and self._nodes[part].poll() is None:
                if when == "never" and is_as_before:
                    continue
                self._nodes[part].terminate()
                self._nodes[part].wait(PATIENCE_SECONDS)
            files = {
                "state": self.of(part) / "state",
                "runtime": self.of(part) / "runtime",
                "identity": self.of(part) / "key",
                "allow-list": self.folder / "allow-list",
            }
            config = [f"partition-id={part} num-partitions={NUM_NODES} order-seed=0 {owners}"]
            config += [f'{key}="{path}"' for key, path in files.items()]
            self._nodes[part] = self.run(
                str(self._bin / "python"), "-c", SUPERNODE, when,
                "--insecure", "--superlink", f"127.0.0.1:{self._port}",
                "--host", "127.0.0.1", "--port", str(port), "--node-config", " ".join(config),
            )  # fmt: skip
        for node in self._nodes.values():
            self._await(partial(self._has_joined, node))

    def flwr_run(self, *run_config: str, is_refused: bool = False) -> Path:
        """Run the project to its end; return the folder that it leaves."""
        out = self.folder / f"out-{uuid4().hex[:4]}"
        run = self.run(
            "flwr", "run", str(ROOT), "loopback", "--stream",
            "--run-config", " ".join([RUN_CONFIG, *run_config, f'out="{out}"']),
        )  # fmt: skip
        code = run.wait(PATIENCE_SECONDS)
        assert is_refused or code == 0, self.said()
        assert is_refused or (out / MODEL).exists(), self.said()
        return out

    def _await_health(self, url: str) -> None:
        def is_healthy() -> bool:
            with suppress(OSError), urllib.request.urlopen(url, timeout=1):
                return True
            return False

        self._await(is_healthy)

    def _has_joined(self, node: subprocess.Popen[bytes]) -> bool:
        return "SuperNode ID" in self._logs[node.pid].read_text()

    def _await(self, is_so: Callable[[], bool]) -> None:
        until(is_so, seconds=PATIENCE_SECONDS, what=self.said)

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        path = self.folder / f"{Path(command[0]).name}-{uuid4().hex[:4]}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        self._logs[process.pid] = path
        return process

    def said(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)

    def stop(self) -> None:
        end = time.monotonic() + 20
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        while self._alive() and time.monotonic() < end:
            time.sleep(0.2)
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
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


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    it = Deployment(tmp_path_factory.mktemp("deployment"))
    it.start()
    yield it
    it.stop()


def alone(out: Path, **changes: Any) -> Path:
    """Run the same in this process; return the folder that it leaves."""
    settings = in_process(out, **changes)
    run_engine(settings, on_round=lambda row: None, resume=False)
    return out


def in_process(out: Path, **changes: Any) -> Settings:
    return Settings.model_validate(
        {
            "task": "examples/digits.py:Digits",
            "threads": 1,
            "out": out,
            "plan": {"accumulation_steps": 2, "micro_batch_size": 8},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            **changes,
            "simulation": {"clients": NUM_NODES, **changes.get("simulation", {})},
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flwr_run_on_supernodes_stops_early_with_the_in_process_model_bit_for_bit(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Its loss falls from round 1 to round 2, so that it has no new maximum and the run stops.

    DiLoCo: an optimizer with state on the devices, and momentum on the server. (The exact sum is in
    the session below.)
    """
    deployment.start_nodes()
    out = deployment.flwr_run(
        "rounds=9",
        'local.algorithm="diloco"',
        "local.steps=3",
        'evaluation.best="accuracy"',
        'evaluation.stop_when="max:test_loss"',
        "evaluation.patience=1",
    )
    reference = alone(tmp_path, rounds=2, local={"algorithm": "diloco", "steps": 3})
    assert (out / MODEL).read_bytes() == (reference / MODEL).read_bytes(), deployment.said()
    for row in read_rows(out):
        assert [len(client["step_loss"]) for client in row["clients"]] == [3 * 2] * NUM_NODES
    assert read_model(out / BEST)[0].best is not None
    assert names_by_round(out) == names_by_round(reference) == [["0", "1", "2", "3"]] * 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_active_session_on_supernodes_gives_the_in_process_model_though_one_vanishes(
    deployment: Deployment, tmp_path: Path
) -> None:
    """The same device vanishes at the same point in this process, by a seed that is looked for.

    Of an active session of four one device may drop out; semi-honest ones have a phase less.
    """
    last, action = NUM_NODES - 1, "query.masked_update"
    chosen: dict[str, Any] = {
        "rounds": 1,
        "secure": {"aggregation": "active"},
        "simulation": {"dropout": 0.1},
    }
    seed = next(
        seed
        for seed in itertools.count()
        if vanishing(in_process(tmp_path, seed=seed, **chosen)) == [None] * last + [action]
    )
    deployment.start_nodes(last_vanishes_at=action)
    out = deployment.flwr_run("rounds=1", f"seed={seed}", 'secure.aggregation="active"')
    reference = alone(tmp_path, seed=seed, **chosen)
    assert (out / MODEL).read_bytes() == (reference / MODEL).read_bytes(), deployment.said()
    [row] = read_rows(out)
    assert (row["num_clients"], row["num_aborted"], list(row["refused"])) == (last, 0, [str(last)])
    assert [deployment.keys(part) for part in PARTS[:last]] == [[]] * last


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_masked_asynchronous_step_on_supernodes_gives_the_in_process_model_bit_for_bit(
    deployment: Deployment, tmp_path: Path
) -> None:
    """A buffer of all devices, so that both take the same updates."""
    deployment.start_nodes()
    out = deployment.flwr_run(
        "rounds=1",
        "asynchronous.is_on=true",
        f"asynchronous.buffer={NUM_NODES}",
        'secure.aggregation="semi-honest"',
    )
    reference = alone(
        tmp_path,
        rounds=1,
        cohort={"min_clients": NUM_NODES - 1},
        asynchronous={"is_on": True, "buffer": NUM_NODES},
        secure={"aggregation": "semi-honest"},
    )
    assert (out / MODEL).read_bytes() == (reference / MODEL).read_bytes(), deployment.said()
    [row] = read_rows(out)
    assert [client["name"] for client in row["masked_clients"]] == ["0", "1", "2", "3"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_s_values_take_no_limit_from_the_owners_of_supernodes(
    deployment: Deployment,
) -> None:
    """Each key is one that the bundle ships; with them a session of four opened one's update."""
    deployment.start_nodes(owners="min-members=5")
    out = deployment.flwr_run(
        "rounds=1",
        "cohort.max_aborted_rounds=1",
        'secure.aggregation="active"',
        "secure.min_members=3",
        "secure.min_quota=1",
        "secure.max_share=1.0",
        "secure.min_survivors=0.01",
        "secure.member_bits=1",
        is_refused=True,
    )
    assert not read_rows(out)
    assert "this device masks among at least 5" in deployment.said()


def vanishing(settings: Settings) -> list[str | None]:
    """Return what each simulated device does not answer any more in the first round."""
    return [vanishes_at(fleet_spec(settings), part, round_number=1, attempt=0) for part in PARTS]


def names_by_round(out: Path) -> list[list[str]]:
    return [[client["name"] for client in row["clients"]] for row in read_rows(out)]


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
