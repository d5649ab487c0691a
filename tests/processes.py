"""Servers and devices in processes of their own, over real sockets.

Each process leads a process group, writes to a log of its own, and is killed when its ``Processes``
is left. To spare two cores, most of them are forked from a process that has imported torch already,
and go on like the command itself; ``as_command`` starts the command.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.server.operations import orders
from headwater.server.operations.round_log import row_of_line

ROOT = Path(__file__).resolve().parent.parent
WAIT_SECONDS = 280.0  # twenty times what most of them take on two idle cores
POLL_SECONDS = 0.02
# Below the ports that Linux, macOS and Windows give to those who name none.
LOWEST_PORT, NUM_PORTS = 20_000, 12_000
MAX_WORKERS = 16
PRELOADED = [
    "headwater.server.serve",
    "headwater.server.operations.progress",
    "headwater.client.transport.lasting_connection",
    "headwater.client.app",
    "headwater.client.flower.node",
    "headwater.simulation.run",
    "tensorboard.summary.writer.record_writer",
    "tensorboard.compat.proto.event_pb2",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "numpy.random",
    "headwater.client.cli",
    "headwater.client.operations.display",
    "headwater.common.system.console",
    "headwater.common.transport.tls",
    "headwater.server.cli",
    "headwater.simulation.cli",
    # What a plain run does without.
    "headwater.client.compression.error_feedback",
    "headwater.client.device.worker_processes",
    "headwater.client.frozen.frozen_parts",
    "headwater.client.masked_rounds.masked_answers",
    "headwater.client.masked_rounds.masked_plans",
    "headwater.client.masked_rounds.of_request",
    "headwater.client.masked_rounds.session_phases",
    "headwater.client.privacy.round_spending",
    "headwater.common.compression.planned_bytes",
    "headwater.common.local_training.local_terms",
    "headwater.common.sums.named_sums",
    "headwater.server.aggregation.extra_sums",
    "headwater.server.flower.grid_fleet",
    "headwater.server.run_sequence",
    "headwater.server.secagg.masked_rounds",
    "headwater.server.secagg.planning.share_limit",
    "headwater.server.tracking.tensorboard_tracker",
    "headwater.simulation.compute.local_workers",
    "headwater.simulation.engines.fork_server",
    "headwater.simulation.engines.shared_round",
    "headwater.simulation.reports.fault_summary",
    "headwater.simulation.reports.fleet_summary",
    "cryptography.hazmat.backends.openssl.backend",
    "sqlite3",
    "tomli_w",
    "torch.fx.experimental.symbolic_shapes",  # 480 modules, to draw a parameter without memory
    "torch.profiler._cupti_monitor",
    "tests.processes",
    "tests.without_curves",
    "tests.frozen_heap",
]

TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Task:
    def new_model(self):
        return nn.Sequential(nn.Linear(4, {hidden}), nn.ReLU(), nn.Linear({hidden}, 2))

    def train_examples(self, *, data, part, num_parts):
        self.part = part
        random = torch.Generator().manual_seed(part)
        inputs = torch.randint(-3, 4, (50 + 7 * part, 4), generator=random).float()
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        if torch.is_grad_enabled() and len(labels) == {size} and self.part == 0:
            self.pass_gate()
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels), {{"correct": (model(inputs).argmax(1) == labels).sum()}}

    def pass_gate(self):
        with open({gate!r} + ".begun", "a") as file:
            file.write("x")
            num_begun = file.tell()
        while num_begun > {open_for} and not os.path.exists({gate!r}):
            time.sleep(0.01)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedTask:
    """A task file whose device 0 stops in mid-round until the gate is opened."""

    spec: str
    gate: Path
    open_for: int

    def wait_until_reached(self) -> None:
        """Wait until device 0 has begun the micro-batch at which it stops."""
        begun = self.gate.with_name(self.gate.name + ".begun")
        until(
            lambda: begun.exists() and begun.stat().st_size > self.open_for,
            what=lambda: "device 0 at the gate",
        )

    def open(self) -> None:
        """Let it go on."""
        self.gate.touch()


def write_task(
    folder: Path, *, hidden: int = 16, open_for: int = 1 << 30, size: int = 8
) -> GatedTask:
    """Write a task of 7 x hidden + 2 parameters.

    Device 0 has 50 examples, device 1 has 57. Of its micro-batches of ``size``, device 0 does
    ``open_for`` before it stops.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, gate = folder / "task.py", folder / "gate"
    path.write_text(TASK.format(hidden=hidden, gate=str(gate), open_for=open_for, size=size))
    return GatedTask(spec=f"{path}:Task", gate=gate, open_for=open_for)


@dataclass(kw_only=True)
class Process:
    """A command of ours that runs."""

    log: Path
    pid: int
    poll: Callable[[], int | None] = field(repr=False)

    def text(self) -> str:
        """Return all it has printed."""
        return self.log.read_text()

    def wait_for(self, pattern: str, *, seconds: float = WAIT_SECONDS) -> re.Match[str]:
        """Wait until it has printed this."""
        found: list[re.Match[str]] = []

        def is_printed() -> bool:
            ended = self.poll()
            found.extend(re.finditer(pattern, self.text()))
            assert found or ended is None, f"ended with {ended} before {pattern!r}:\n{self.text()}"
            return bool(found)

        until(is_printed, seconds=seconds, what=lambda: f"{pattern!r} in:\n{self.text()}")
        return found[0]

    def wait(self, *, seconds: float = WAIT_SECONDS) -> int:
        """Wait for its end and return its exit status."""
        until(lambda: self.poll() is not None, seconds=seconds, what=lambda: f"end:\n{self.text()}")
        status = self.poll()
        assert status is not None
        return status

    def succeed(self) -> None:
        """Wait for its end, which must be one without a word of complaint."""
        assert self.wait() == 0, self.text()
        assert_tidy(self)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it alone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def assert_tidy(process: Process) -> None:
    """Hold that nothing went wrong in silence: no traceback, no noise of the libraries."""
    for noise in (
        "Traceback",
        "never awaited",
        "never retrieved",
        "Exception ignored",
        "was destroyed",
        ".cc:",
    ):
        assert noise not in process.text(), process.text()


def until(
    is_so: Callable[[], bool], *, seconds: float = WAIT_SECONDS, what: Callable[[], str]
) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds} s for {what()}"
        time.sleep(POLL_SECONDS)


class Processes:
    """The processes of one test, with their logs and state in one folder."""

    def __init__(self, folder: Path, **environment: str) -> None:
        """Keep the processes' files in a folder, and add variables to their environment."""
        self.folder = folder
        self._variables = environment
        folder.mkdir(parents=True, exist_ok=True)
        self._started: list[Process] = []
        self._joins: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for join in self._joins:
            join()

    def server(self, *arguments: object, task: str, **how: Any) -> Process:
        """Start a server; by default on a free port, with one thread, into ``folder / out``."""
        given = [str(argument) for argument in arguments]
        defaults = {"--listen": "127.0.0.1:0", "--out": self.folder / "out", "--threads": 1}
        return self._start("server", [*_with(defaults, given), "--task", task], **how)

    def client(
        self,
        port: int,
        part: int,
        *arguments: object,
        task: str,
        waits: bool = False,
        **how: Any,
    ) -> Process:
        """Start device number ``part``, which bears it as its name.

        It ends with its run, unless it ``waits`` for the next one, as devices do by default.
        """
        given = [str(argument) for argument in arguments]
        defaults = {
            "--server": f"127.0.0.1:{port}",
            "--name": part,
            "--part": part,
            "--num-parts": 2,
            "--threads": 1,
            "--state": self.folder / "state",
            "--patience": 600,
        }
        ends = () if waits or "--stay" in given else ("--once",)
        return self._start("client", [*_with(defaults, given), *ends, "--task", task], **how)

    def start(self, module: str, *arguments: object, **how: Any) -> Process:
        """Start a command."""
        return self._start(module, [str(argument) for argument in arguments], **how)

    def run(self, module: str, *arguments: object, **how: Any) -> Process:
        """Run a command to its end."""
        process = self.start(module, *arguments, **how)
        process.wait()
        return process

    def complete(
        self, module: str, *arguments: object, status: int = 0, **how: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which has this status; tell its two streams apart."""
        errors = self.folder / f"{len(self._started)}-{module}.errors"
        given = [str(argument) for argument in arguments]
        process = self._start(module, given, errors=errors, **how)
        ended = subprocess.CompletedProcess(
            [module, *map(str, arguments)],
            process.wait(),
            stdout=process.text(),
            stderr=errors.read_text(),
        )
        assert ended.returncode == status, ended
        return ended

    def _start(
        self,
        module: str,
        arguments: list[str],
        *,
        as_command: bool = False,
        prepare: Callable[[], object] | None = None,
        errors: Path | None = None,
    ) -> Process:
        """Start a command; a forked one calls ``prepare`` in itself before it begins.

        What it writes to stderr goes to ``errors``, or else to its log.
        """
        log = self.folder / f"{len(self._started)}-{module}.log"
        log.touch()
        if as_command:
            process = self._start_command(module, arguments, log)
        else:
            process = self._fork(module, arguments, log, prepare, errors or log)
        self._started.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        return {
            "XDG_STATE_HOME": str(self.folder / "xdg"),
            "OMP_NUM_THREADS": "1",
            **self._variables,
        }

    def _start_command(self, module: str, arguments: list[str], log: Path) -> Process:
        with log.open("w") as file:
            command = subprocess.Popen(
                [sys.executable, "-m", f"headwater.{module}", *arguments],
                cwd=ROOT,
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._joins.append(command.wait)
        return Process(log=log, pid=command.pid, poll=command.poll)

    def _fork(
        self,
        module: str,
        arguments: list[str],
        log: Path,
        prepare: Callable[[], object] | None,
        errors: Path,
    ) -> Process:
        streams = (str(log), str(errors))
        child = _nursery().Process(
            target=_become, args=(module, arguments, streams, self._environment(), prepare)
        )
        child.start()
        assert child.pid is not None
        self._joins.append(child.join)
        return Process(log=log, pid=child.pid, poll=lambda: child.exitcode)


def _with(defaults: dict[str, object], given: Sequence[str]) -> list[str]:
    kept = [text for flag, value in defaults.items() if flag not in given for text in (flag, value)]
    return [*map(str, kept), *given]


@lru_cache
def _nursery() -> Any:
    # As the commands do before they import grpc; the preloading process must have it too.
    os.environ["GRPC_VERBOSITY"] = "NONE"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _become(
    module: str,
    arguments: list[str],
    streams: tuple[str, str],
    environment: dict[str, str],
    prepare: Callable[[], object] | None,
) -> None:
    """Turn this forked process into a command."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.update(environment)
    for path, stream in zip(streams, (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), stream.fileno())
    sys.argv = [f"headwater-{module}", *arguments]
    if prepare is not None:
        prepare()
    if module == "server":
        from headwater.server.cli import main
    elif module == "client":
        from headwater.client.cli import main
    elif module == "simulation":
        from headwater.simulation.cli import main
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    main()


def work_in(folder: Path) -> None:
    """Make a folder this process's own, where Python looks for modules first."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))


def ended(target: Callable[..., object], *arguments: object) -> int:
    """Call a function in a process of its own, and return how that ended."""
    child = preloaded_process(target, *arguments)
    child.start()
    child.join(WAIT_SECONDS)
    assert child.exitcode is not None, f"{target} did not end"
    return int(child.exitcode)


def preloaded_process(target: Callable[..., object], *arguments: object) -> Any:
    """Return a ``multiprocessing.Process`` with torch in it, which is not started yet."""
    return _nursery().Process(target=target, args=arguments)


def port_of(server: Process) -> int:
    """Return the port that a server says it listens on."""
    return int(server.wait_for(r"listening on \S+:(\d+)").group(1))


def free_port() -> int:
    """Return a port that nobody holds, another one each time.

    The system gives it to nobody by itself, nor does pytest's other worker take it: else it could
    be gone before its server binds it, or while the server is away.
    """
    while True:
        port = next(_ports())
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@lru_cache
def _ports() -> Iterator[int]:
    """Return this worker's own ports in a random order, again and again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MAX_WORKERS
    ports = [*range(LOWEST_PORT + worker, LOWEST_PORT + NUM_PORTS, MAX_WORKERS)]
    random.SystemRandom().shuffle(ports)  # hypothesis seeds the others
    return itertools.cycle(ports)


def hold_rounds(out: Path) -> None:
    """Let no round of a run begin. To be certain, call it before the server starts."""
    out.mkdir(parents=True, exist_ok=True)
    orders.write_order(out, "pause")


def release_rounds(out: Path, server: Process, *, joined: Iterable[object]) -> None:
    """Let the rounds begin once the devices of these names have joined the server.

    The server says so with ``--verbose`` alone.
    """
    for name in joined:
        server.wait_for(rf"(?m)\b{re.escape(str(name))} joined: ")
    orders.write_order(out, "resume")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what a run noted of its rounds, without a line that is being written."""
    path = folder / "rounds.jsonl"
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [row_of_line(json.loads(line)) for line in whole.splitlines()]


def model_digest(folder: Path) -> str:
    """Return the SHA-256 of the saved model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
