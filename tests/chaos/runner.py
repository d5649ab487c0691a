"""Runs a scenario of failures with real processes; the same checks follow every scenario.

1. A server and its devices do some rounds without a failure. The operator pauses the run, the
   devices leave, and the server's descriptors and memory are measured.
2. The devices return, and the scenario's failures happen.
3. Some rounds later the run is paused again, the devices leave, and the server is measured again.
4. The server is drained, and its run is compared with the reference (``tests.chaos.checks``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headwater.common.model.trained_model import MODEL
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.server.operations import orders
from headwater.server.operations.status import read_status
from tests.certificates import HOSTS, files, make_folder
from tests.chaos import machines
from tests.chaos.checks import (
    OPTIMIZER,
    Counted,
    check_folders,
    check_model,
    check_places,
    counted,
    doubled,
    is_whole,
    run_in_process,
)
from tests.chaos.deaths import arm
from tests.chaos.proxy import Proxy
from tests.chaos.scenario import MODES, OWNERS_FLAGS, Mode, Scenario
from tests.faults import Death, FaultPlan, Side
from tests.processes import Process, Processes, free_port, port_of, rows, until

MANY_ROUNDS = 100_000
ROUNDS_BEHIND = 2
STEPS, SIZE = 2, 8
PAUSE_SECONDS = 0.02  # in each micro-batch: else hundreds of rounds go by while it is looked at
SMALL_DISK_BYTES = 3 << 20
# Of anonymous memory: what a process that has done a few rounds has yet to touch. An update that is
# not given back at each of twenty cuts is twice that.
SLACK_BYTES = 24 << 20
NEW_VERSION = "9.9.9"
SETTLED_LOOKS = 10  # at tests.processes.POLL_SECONDS
LISTENING = "0A"  # in /proc/net/tcp

# The answer to a gate is given by the file ``trigger`` (it has begun) and ``gate`` (go on).
TASK = """
import os, time
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, {hidden}), nn.Linear({hidden}, 2)

    def forward(self, inputs):
        # Smooth, and of the same size and speed of learning for every width.
        return self.outer(torch.tanh(self.inner(inputs))) / {hidden} ** 0.5


class Task:
    def new_model(self):
        return Net()

    def train_examples(self, *, data, part, num_parts):
        self.part = part
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn((50 + 7 * part, 4), generator=random)
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        if torch.is_grad_enabled() and not os.path.exists("{folder}/hurry"):
            self.work()
        loss = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
        return loss, len(labels)

    def work(self):
        time.sleep({pause_seconds})
        if os.path.exists("{folder}/trigger") and not os.path.exists("{folder}/gate"):
            open(f"{folder}/begun-{{self.part}}", "w").close()
            while not os.path.exists("{folder}/gate"):
                time.sleep(0.01)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a server without devices holds."""

    descriptors: tuple[str, ...]
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a scenario."""

    seconds: float
    num_rounds: int
    num_aborted: int
    num_left_out: int
    off_in_examples: float
    is_unbroken: bool
    """Whether nobody missed a round, and the model was held against an unbroken run's bits."""
    before: Measured
    after: Measured


def run(scenario: Scenario, folder: Path) -> Outcome:
    """Run one scenario.

    Raises:
        AssertionError: something that must hold does not; the message says what.
    """
    begun = time.monotonic()
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(folder))
        trial = trial_of(scenario, processes, stack)
        before = trial.calm()
        trial.strike()
        after = trial.end()
        trial.check_measured(before, after)
        off, is_unbroken = trial.check()
        found = rows(trial.out)
        return Outcome(
            seconds=time.monotonic() - begun,
            num_rounds=len(found),
            num_aborted=sum(row["num_aborted"] for row in found),
            num_left_out=sum(scenario.num_devices - len(row["clients"]) for row in found),
            off_in_examples=off,
            is_unbroken=is_unbroken,
            before=before,
            after=after,
        )


def trial_of(scenario: Scenario, processes: Processes, stack: ExitStack) -> Trial:
    """Return the trial of a scenario: one server that comes back, or two, or a tree."""
    # They import this module.
    from tests.chaos.bundles import BundleTrial
    from tests.chaos.events import EventTrial
    from tests.chaos.takeovers import TakeoverTrial
    from tests.chaos.trees import TreeTrial

    if any(death.side == "aggregator" for death in scenario.plan.deaths):
        return TreeTrial(scenario, processes, stack)
    kind = TakeoverTrial if scenario.plan.failures else Trial
    if scenario.plan.events or scenario.plan.begins_earlier:
        kind = EventTrial
    if scenario.plan.bundles:
        kind = BundleTrial
    return kind(scenario, processes, stack)


class Trial:
    """One run to which something happens."""

    def __init__(self, scenario: Scenario, processes: Processes, stack: ExitStack) -> None:
        self.scenario, self.plan = scenario, scenario.plan
        self.out = processes.folder / "out"
        self._processes, self._stack, self._folder = processes, stack, processes.folder
        self._names = [str(part) for part in range(scenario.num_devices)]
        self._clients: dict[str, Process] = {}
        self._proxy: Proxy | None = None
        self._namespace: machines.Namespace | None = None
        self._clock: Path | None = None
        self._write_files()
        self._prepare_machines()
        self._start_server()

    def _write_files(self) -> None:
        if not self._is_gated:
            self._file("gate").touch()
        text = TASK.format(
            hidden=self.scenario.hidden, folder=self._folder, pause_seconds=PAUSE_SECONDS
        )
        self._file("task.py").write_text(text)
        self.task = f"{self._file('task.py')}:Task"
        self._file("settings.toml").write_text(self._settings_text(self.scenario.mode))
        self._tls = self._file("certificates") if self.scenario.has_tls else None
        if self._tls is not None:
            make_folder(self._tls, *self._names, hosts=[*dict.fromkeys((*HOSTS, self._host))])

    def _settings_text(self, mode: Mode) -> str:
        return (
            "[optimizer.arguments]\nmomentum = 0.9\n"
            "[cohort]\nreconnect_seconds = 90.0\nmax_aborted_rounds = 1000\n"
            + MODES[mode].format(num_devices=self.scenario.num_devices)
        )

    @property
    def _is_gated(self) -> bool:
        return bool(self.plan.num_gone) or self.plan.is_upgraded

    def _prepare_machines(self) -> None:
        """Make what the plan needs besides processes; it goes when the trial does."""
        disk = {"server": self.out, "client": self._file("state"), None: None}[self.plan.full_disk]
        if disk is not None:
            self._stack.enter_context(machines.small_disk(disk, SMALL_DISK_BYTES))
        if self.plan.narrow is not None:
            made = machines.namespace(self.plan.narrow.bits_per_second)
            self._namespace = self._stack.enter_context(made)
        if self.plan.clock_seconds:
            self._clock = machines.clock_library(self._folder)

    def _file(self, name: str) -> Path:
        return self._folder / name

    # Processes.

    def _start_server(self, *, port: int = 0, prepare: Callable[[], object] | None = None) -> None:
        """Start the server: the first one, or at its ``port`` the next."""
        is_first = port == 0
        self._port = port or free_port()
        flags: list[object] = ["--rounds", MANY_ROUNDS, "--verbose"]
        flags += ["--listen", f"{self._host}:{self._port}"]
        flags += ["--min-clients", 1 if self.scenario.may_lose else self.scenario.num_devices]
        flags += [*self._settings, "--metrics", "127.0.0.1:0", "--out", self.out]
        flags += self._link("server")
        flags += ["--resume"] if (self.out / "settings.toml").exists() else []
        prepare = prepare or (self._prepared("server") if is_first else None)
        self.server = self._processes.server(*flags, task=self._served_task, prepare=prepare)
        port_of(self.server)

    @property
    def _served_task(self) -> str:
        return self.task

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self._namespace is None else self._namespace.outer_address

    def _link(self, name: str) -> list[object]:
        """Return the flags by which a process protects its connections."""
        if self._tls is not None:
            return [*files(self._tls, name)]
        return [] if self._host == "127.0.0.1" else ["--plain-text"]

    @property
    def _settings(self) -> list[object]:
        config = self._file("settings.toml")
        work = ["--accumulation-steps", STEPS, "--micro-batch-size", SIZE]
        step = ["--optimizer", "SGD", "--learning-rate", OPTIMIZER["lr"]]
        return [*work, *step, "--config", config]

    def _start_client(
        self, name: str, *, prepare: Callable[[], object] | None = None, by_proxy: bool = False
    ) -> Process:
        port = self._proxy.port if by_proxy and self._proxy is not None else self._port
        flags: list[object] = ["--server", f"{self._host}:{port}", "--name", name]
        flags += ["--num-parts", self.scenario.num_devices, "--spool", self._file("spool")]
        flags += ["--verbose", *self._link(name), *OWNERS_FLAGS.get(self.scenario.mode, ())]
        client = self._processes.client(port, int(name), *flags, task=self.task, prepare=prepare)
        self._clients[name] = client
        return client

    def _prepared(self, side: Side) -> Callable[[], object] | None:
        """Return what a process does to itself before it begins, if the plan says so."""
        for death in self.plan.deaths:
            if death.side == side:
                return partial(arm, death, self._file("trigger"))
        for of, seconds in self.plan.clock_seconds:
            if of == side and self._clock is not None:
                return partial(machines.set_clock, self._clock, seconds)
        if side == "client" and self._namespace is not None:
            return self._namespace.enter
        return None

    # What happens, in its order.

    def calm(self) -> Measured:
        """Do some rounds in peace, and measure the server once the devices are gone."""
        for name in self._names:
            self._start_client(name)
        self._wait_for_all(0)
        self._wait_for_rounds(1)
        self._pause()
        self._send_home()
        return self._settled()

    def strike(self) -> None:
        """Let the devices come back, the run go on, and what was planned happen."""
        num_joined = self._num_joined()
        if self.plan.blows or self.plan.weather != FaultPlan().weather:
            self._proxy = self._stack.enter_context(Proxy(self._port, self.plan))
        for name in self._names:
            is_it = name == "0"
            prepare = self._prepared("client") if is_it else None
            self._start_client(name, prepare=prepare, by_proxy=is_it)
        self._wait_for_all(num_joined)
        num_before = self._num_rounds()
        self._file("trigger").touch()
        orders.write_order(self.out, "resume")
        for number, death in enumerate(self.plan.deaths):
            self._await_death(death, self.plan.deaths[number + 1 :])
        if self._proxy is not None:
            proxy = self._proxy
            until(lambda: proxy.has_struck, what=lambda: f"{proxy.num_blows} blows")
        if self.plan.full_disk is not None:
            self._fill_disk(self.plan.full_disk)
        if self.plan.num_gone:
            self._lose_devices(self.plan.num_gone)
        if self.plan.is_upgraded:
            self._upgrade()
        if self.plan.narrow is not None and self.plan.narrow.down_seconds:
            self._take_link_down(self.plan.narrow.down_seconds)
        self._wait_for_rounds(max(self._num_rounds(), num_before) + ROUNDS_BEHIND)
        # The server says how it stands once a second: the first pause must not pass for the next.
        until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")

    def _await_death(self, death: Death, others: tuple[Death, ...]) -> None:
        """Wait for a process's end, and start it anew; it may have to die again."""
        dying = self.server if death.side == "server" else self._clients["0"]
        assert dying.wait() == -signal.SIGKILL, dying.text()
        prepare = next(
            (
                partial(arm, other, self._file("trigger"))
                for other in others
                if other.side == death.side
            ),
            None,
        )
        if death.side == "server":
            self._start_server(port=self._port, prepare=prepare)
        else:
            self._start_client("0", prepare=prepare).wait_for("connected to")

    def _fill_disk(self, of: Side) -> None:
        """Fill a disk, see what comes of it, and make room again."""
        if of == "server":
            filler = machines.fill(self.out)
            assert self.server.wait() in (1, 2), self.server.text()
            assert "No space left on device" in self.server.text()
            filler.unlink()
            self._start_server(port=self._port)
            return
        filler = machines.fill(self._file("state"))
        self._clients["0"].wait_for("the device cannot write its state file")
        filler.unlink()

    def _lose_devices(self, num_gone: int) -> None:
        for name in self._names:
            until(self._file(f"begun-{name}").exists, what=lambda: "all devices at work")
        gone = self._names[:num_gone]
        for name in gone:
            self._clients[name].kill()
        self._file("gate").touch()
        self._wait_for_rounds(self._num_rounds() + ROUNDS_BEHIND)
        for name in gone:
            self._start_client(name).wait_for("connected to")

    def _upgrade(self) -> None:
        until(self._file("begun-0").exists, what=lambda: "the device at work")
        checkout = machines.copy_version(self._folder / "release", NEW_VERSION)
        old = self._clients["0"]
        old.kill(signal.SIGTERM)
        old.wait_for("stopping: what is summed")
        self._file("gate").touch()
        old.succeed()
        new = self._start_client("0", prepare=partial(machines.start_anew, checkout))
        new.wait_for("connected to")
        assert os.readlink(f"/proc/{new.pid}/cwd") == str(checkout)

    def _take_link_down(self, seconds: float) -> None:
        assert self._namespace is not None
        begun = self._namespace.num_bytes_up()
        half = self.scenario.vector_bytes // 2
        namespace = self._namespace
        until(lambda: namespace.num_bytes_up() > begun + half, what=lambda: "an upload")
        namespace.set_up(False)
        time.sleep(seconds)
        namespace.set_up(True)

    def end(self) -> Measured:
        """Pause, send the devices home, measure the server, and end it."""
        self._pause()
        self._send_home()
        measured = self._settled()
        orders.write_order(self.out, "drain")
        assert self.server.wait() == 0, self.server.text()
        return measured

    # Waiting.

    def _wait_for_all(self, num_before: int) -> None:
        """Wait until every device has said what it is; who is still starting knows no SIGTERM."""
        until(
            lambda: self._num_joined() >= num_before + len(self._names),
            what=lambda: f"all devices:\n{self._told()}",
        )

    def _num_joined(self) -> int:
        return self.server.text().count(" joined: ")

    def _num_rounds(self) -> int:
        path = self.out / "rounds.jsonl"
        return path.read_text().count("\n") if path.exists() else 0  # the last may be half a line

    def _wait_for_rounds(self, number: int) -> None:
        def is_there() -> bool:
            for process in (self.server, *self._clients.values()):
                assert process.poll() in (None, -signal.SIGKILL), process.text()
            return self._num_rounds() >= number

        until(is_there, what=lambda: f"round {number}:\n{self._told()}")

    def _told(self) -> str:
        """Return what all processes have printed."""
        return "\n".join(one.text() for one in (self.server, *self._clients.values()))

    def _stands(self) -> Any:
        with contextlib.suppress(Exception):
            return read_status(self.out)["stands"]
        return None

    def _pause(self) -> None:
        orders.write_order(self.out, "pause")
        until(lambda: self._stands() == "paused", what=lambda: f"pause:\n{self.server.text()}")

    def _send_home(self) -> None:
        for client in self._clients.values():
            client.kill(signal.SIGTERM)
        for client in self._clients.values():
            assert client.wait() == 0, client.text()
        self._clients.clear()

    # Measuring and checking.

    def _settled(self) -> Measured:
        """Measure the server once its connections are closed and nothing changes any more."""
        seen: list[tuple[str, ...]] = []

        def is_settled() -> bool:
            seen.append(tuple(sorted(_descriptors(self.server.pid))))
            looks = seen[-SETTLED_LOOKS:]
            is_alone = not _connections(self.server.pid).intersection(seen[-1])
            return is_alone and len(looks) == SETTLED_LOOKS and len(set(looks)) == 1

        until(is_settled, what=lambda: f"descriptors to settle: {seen[-1]}")
        until(self._holds_nothing, what=lambda: f"no device: {self._scrape()}")
        status = Path(f"/proc/{self.server.pid}/status").read_text()
        (anonymous,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
        return Measured(descriptors=seen[-1], memory_bytes=int(anonymous.split()[1]) * 1024)

    def _holds_nothing(self) -> bool:
        told = self._scrape()
        # An asynchronous run keeps what came before the step that it is for.
        kept = self.scenario.num_devices if self.scenario.mode == "asynchronous" else 0
        is_empty = told["staged_bytes"] <= kept * self.scenario.vector_bytes
        return is_empty and told["connected_devices"] == 0

    def _scrape(self) -> dict[str, float]:
        url = self.server.wait_for(r"metrics at (\S+)").group(1)
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.split() for line in lines if line.startswith("headwater_server_"))
        return {
            name.removeprefix("headwater_server_"): float(value)
            for name, value in pairs
            if "{" not in name
        }

    def check_measured(self, before: Measured, after: Measured) -> None:
        """Hold that the server has back what it had."""
        assert len(after.descriptors) == len(before.descriptors), f"{before}\n{after}"
        most = before.memory_bytes + SLACK_BYTES
        assert after.memory_bytes <= most, (before.memory_bytes, after.memory_bytes)

    def check(self) -> tuple[float, bool]:
        """Hold what was left against the reference; return how far off it is, and if unbroken."""
        found, task = rows(self.out), load_task(self.task)
        assert [row["round"] for row in found] == list(range(1, len(found) + 1))
        number = self.scenario.num_devices
        data = {
            name: doubled(task.train_examples(data=None, part=int(name), num_parts=number))
            for name in self._names
        }
        self._file("hurry").touch()
        done = counted(found, data)
        off = check_model(self.out, self.task, done) if self.scenario.has_reference else 0.0
        self._check_files(done)
        is_unbroken = all(is_whole(row, number) for row in found)
        assert is_unbroken or self.scenario.may_lose, "an update was left out of a round"
        has_bits = is_unbroken and self.scenario.mode != "masked"
        if has_bits:
            self._check_bits(len(found))
        return off, has_bits

    def _check_files(self, done: Counted) -> None:
        if self.scenario.mode != "masked":  # which examples a device took then, no row tells
            check_places(self.out, self._file("state"), done.places)
        check_folders(self.out, self._file("state"), self._file("spool"), self._names)

    def _check_bits(self, num_rounds: int) -> None:
        """Hold that the model is that of the same apps in one process, where nothing goes wrong."""
        out = self._file(f"unbroken-{self.out.name}")
        told = {
            "task": self.task,
            "rounds": num_rounds,
            "threads": 1,
            "out": out,
            "simulation.clients": self.scenario.num_devices,
            "plan.accumulation_steps": STEPS,
            "plan.micro_batch_size": SIZE,
            "optimizer.name": "SGD",
            "optimizer.learning_rate": OPTIMIZER["lr"],
        }
        # A step for which all devices are awaited is a synchronous round.
        mode: Mode = "" if self.scenario.mode == "asynchronous" else self.scenario.mode
        self._file("unbroken.toml").write_text(self._settings_text(mode))
        run_in_process(load(self._file("unbroken.toml"), told))
        # The files also record the settings, which may differ.
        found, unbroken = (load_file(folder / MODEL) for folder in (self.out, out))
        assert found.keys() == unbroken.keys()
        assert all(torch.equal(found[name], unbroken[name]) for name in found), "other bits"


def _descriptors(pid: int) -> list[str]:
    """Return what a process's descriptors stand for."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return found


def _connections(pid: int) -> set[str]:
    """Return the descriptors that would be TCP connections, whoever has them; not what listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != LISTENING:
                found.add(f"socket:[{fields[9]}]")
    return found
