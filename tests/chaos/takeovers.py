"""A server with a standby, that fails again and again: each time the other server takes over.

The two servers have a port, a proxy and a folder each; the one that failed comes back as the next
standby, on what it left in its folder. A killed and a stopped server fail where it matters most:
all is in its folder, and the next call would make the round count for both.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from headwater.server.operations import orders
from tests.chaos.deaths import arm
from tests.chaos.proxy import Proxy
from tests.chaos.runner import ROUNDS_BEHIND, Measured, Trial
from tests.chaos.scenario import Scenario
from tests.faults import Death, Failure, FaultPlan
from tests.processes import Process, Processes, free_port, until

TERM_SECONDS = 8  # a busy disk or machine must not end the term of a server that is well
PARTED_SECONDS = 1e6
PARTED = "CHAOS_PARTED"
# The folder that both reach, but not a process that has been parted from it.
STORE = f"""
import os
from pathlib import Path
from headwater.server.standby.shared_folder import SharedFolder


class Store(SharedFolder):
    def __init__(self):
        super().__init__(Path(__file__).parent / "shared")

    def __getattribute__(self, name):
        if name[0] != "_" and os.path.exists(os.environ.get("{PARTED}", "")):
            raise OSError("no route to the store")
        return super().__getattribute__(name)
"""


class TakeoverTrial(Trial):
    """A run whose server fails again and again; ``server`` and ``out`` are those that serve."""

    def __init__(self, scenario: Scenario, processes: Processes, stack: ExitStack) -> None:
        self._ports = [free_port(), free_port()]
        self._proxies = [stack.enter_context(Proxy(port, FaultPlan())) for port in self._ports]
        self._serving = 0
        self._num_started = 0
        (processes.folder / "store.py").write_text(STORE)
        super().__init__(scenario, processes, stack)

    @property
    def _failures(self) -> tuple[Failure, ...]:
        return self.plan.failures

    def _start_server(self, *, port: int = 0, prepare: Callable[[], object] | None = None) -> None:
        """Start the first server, and its standby."""
        self.server = self._start(0)
        self.server.wait_for("listening on")
        self.out = self._out(0)
        self._standby = self._start(1, "--standby")

    def _out(self, which: int) -> Path:
        return self._file(f"out-{which}")

    def _start(self, which: int, *more: object) -> Process:
        """Start a server that will fail as the plan says, when its trigger is there."""
        number, self._num_started = self._num_started, self._num_started + 1
        failure = self._failures[number] if number < len(self._failures) else None
        flags: list[object] = ["--listen", f"127.0.0.1:{self._ports[which]}", "--verbose"]
        flags += ["--out", self._out(which), "--metrics", "127.0.0.1:0"]
        flags += ["--shared-state", f"{self._file('store.py')}:Store"]
        flags += ["--term-seconds", TERM_SECONDS, *more]
        if "--standby" not in more:
            flags += ["--rounds", 100_000, "--min-clients", self.scenario.num_devices]
            flags += self._settings
        trigger = self._file(f"trigger-{number}")
        prepare: Callable[[], object] | None = None
        if failure == "parted":
            prepare = partial(part_by, trigger)
        elif failure is not None:
            number_sent = signal.SIGKILL if failure == "killed" else signal.SIGSTOP
            death = Death(side="server", point="before the shared commit", number=number_sent)
            prepare = partial(arm, death, trigger)
        return self._processes.server(*flags, task=self.task, prepare=prepare)

    def _start_client(
        self, name: str, *, prepare: Callable[[], object] | None = None, by_proxy: bool = False
    ) -> Process:
        both = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self._proxies)
        flags: list[object] = ["--server", both, "--name", name, "--verbose"]
        flags += ["--num-parts", self.scenario.num_devices, "--spool", self._file("spool")]
        client = self._processes.client(1, int(name), *flags, task=self.task, prepare=prepare)
        self._clients[name] = client
        return client

    def strike(self) -> None:
        """Let the devices come back, and each server fail in its turn."""
        num_joined = self._num_joined()
        for name in self._names:
            self._start_client(name)
        self._wait_for_all(num_joined)
        orders.write_order(self.out, "resume")
        for number, failure in enumerate(self._failures):
            self._wait_for_rounds(self._num_rounds() + 1)
            self._fail(number, failure)
        self._wait_for_rounds(self._num_rounds() + ROUNDS_BEHIND)
        until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")

    def _fail(self, number: int, failure: Failure) -> None:
        """Let the serving server fail, and the other one take over and commit a round."""
        self._standby.wait_for("serves it with term")
        failing, parted = self.server, self._proxies[self._serving]
        if failure == "parted":
            parted.part(PARTED_SECONDS)
        self._file(f"trigger-{number}").touch()
        before = self._num_rounds()
        self._serving = 1 - self._serving
        self.server, self.out = self._standby, self._out(self._serving)
        self.server.wait_for(rf"takes over from .* with term {number + 2}, after round")
        if failure == "killed":
            assert failing.wait() == -signal.SIGKILL, failing.text()
        else:
            failing.kill(signal.SIGCONT)  # its devices are still there, and so is all of its round
            assert failing.wait() == 1, failing.text()
            assert f"TermEnded: term {number + 1} " in failing.text(), failing.text()
        self._wait_for_rounds(before + 1)
        if failure == "parted":
            parted.part(0)
        self._standby = self._start(1 - self._serving, "--standby")

    def end(self) -> Measured:
        """End the run; the standby learns that its operator drained it."""
        measured = super().end()
        self._standby.wait_for("was drained; waits until it is resumed")
        return measured

    def check_measured(self, before: Measured, after: Measured) -> None:
        """Hold nothing: they are of two processes."""


def part_by(trigger: Path) -> None:
    """Let this process reach the store until a file appears."""
    os.environ[PARTED] = str(trigger)
