"""A server, two aggregators and their devices: an aggregator is killed, or the server above.

Each process of a side that dies is armed for its own death, and dies once its own trigger is there.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from headwater.server.operations import orders
from tests.chaos.deaths import arm
from tests.chaos.runner import ROUNDS_BEHIND, Measured, Trial
from tests.chaos.scenario import Scenario
from tests.faults import Death, Side
from tests.processes import Process, Processes, assert_tidy, free_port, until

AGGREGATORS = ("north", "south")


class TreeTrial(Trial):
    """A run in which the first aggregator dies, or the server above; north has the first half."""

    def __init__(self, scenario: Scenario, processes: Processes, stack: ExitStack) -> None:
        self._ports = [free_port() for _ in AGGREGATORS]
        self._aggregators: list[Process] = []
        self._num_started: defaultdict[Side, int] = defaultdict(int)
        super().__init__(scenario, processes, stack)

    @property
    def _settings(self) -> list[object]:
        return [*super()._settings, "--trusted-aggregators", ",".join(AGGREGATORS)]

    def _start_server(self, *, port: int = 0, prepare: Callable[[], object] | None = None) -> None:
        super()._start_server(port=port, prepare=prepare)
        if not self._aggregators:
            self._aggregators = [self._start_aggregator(0), self._start_aggregator(1)]

    def _start_aggregator(self, which: int) -> Process:
        name = AGGREGATORS[which]
        path = self._file(f"{name}.toml")
        path.write_text(f'[client]\nname = "{name}"\nstate = "{self._file("above")}"\n')
        flags: list[object] = ["--upstream", f"{self._host}:{self._port}"]
        flags += ["--upstream-config", path, "--listen", f"127.0.0.1:{self._ports[which]}"]
        flags += ["--task", self.task, "--threads", 1, "--verbose"]
        prepare = self._prepared("aggregator") if which == 0 else None
        return self._processes.start("server", *flags, prepare=prepare)

    def _prepared(self, side: Side) -> Callable[[], object] | None:
        """Return how the next process of a side is armed; None once it has no further death."""
        number, self._num_started[side] = self._num_started[side], self._num_started[side] + 1
        own = [death for death in self.plan.deaths if death.side == side]
        if number >= len(own):
            return None
        return partial(arm, own[number], self._file(f"trigger-{side}-{number}"))

    def _start_client(
        self, name: str, *, prepare: Callable[[], object] | None = None, by_proxy: bool = False
    ) -> Process:
        port = self._ports[int(name) * len(self._ports) // len(self._names)]
        flags: list[object] = ["--name", name, "--num-parts", len(self._names), "--verbose"]
        flags += ["--spool", self._file("spool")]
        client = self._processes.client(port, int(name), *flags, task=self.task, prepare=prepare)
        self._clients[name] = client
        return client

    def _num_joined(self) -> int:
        """Count the devices' connections: one that was gone for a moment needs no new list."""
        told = [one.text() for one in self._aggregators]
        return sum(len(re.findall(r"\d+ connected from", text)) for text in told)

    def strike(self) -> None:
        """Let the devices come back, and each death happen in its turn."""
        num_joined = self._num_joined()
        for name in self._names:
            self._start_client(name)
        self._wait_for_all(num_joined)
        orders.write_order(self.out, "resume")
        numbers: defaultdict[Side, int] = defaultdict(int)
        for death in self.plan.deaths:
            self._wait_for_rounds(self._num_rounds() + 1)
            self._die(death, numbers[death.side])
            numbers[death.side] += 1
        self._wait_for_rounds(self._num_rounds() + ROUNDS_BEHIND)
        until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")

    def _die(self, death: Death, number: int) -> None:
        dying = self.server if death.side == "server" else self._aggregators[0]
        self._file(f"trigger-{death.side}-{number}").touch()
        assert dying.wait() == -signal.SIGKILL, dying.text()
        if death.side == "server":
            self._start_server(port=self._port, prepare=self._prepared("server"))
        else:
            self._aggregators[0] = self._start_aggregator(0)

    def _told(self) -> str:
        return "\n".join([super()._told(), *(one.text() for one in self._aggregators)])

    def _settled(self) -> Measured:
        """Measure nothing: the aggregators stay connected."""
        return Measured(descriptors=(), memory_bytes=0)

    def end(self) -> Measured:
        """End the run; the aggregators end with it."""
        measured = super().end()
        for aggregator in self._aggregators:
            assert aggregator.wait() == 0, aggregator.text()
            assert_tidy(aggregator)
        return measured
