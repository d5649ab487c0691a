"""What is done to the processes from outside, at a moment of a round: restarts, rivals, proxies.

A moment is caught, and lasts until the event is over: between rounds the run is paused, in training
every device waits in a micro-batch, and in mid-upload or mid-download the link of device 0 stands
still behind so many bytes (``tests.chaos.proxy``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from headwater.server.operations import orders
from tests.chaos import machines
from tests.chaos.proxy import Proxy
from tests.chaos.runner import ROUNDS_BEHIND, Measured, Trial
from tests.chaos.scenario import Scenario
from tests.faults import At, Blow, Event, FaultPlan, Release, Side, Way
from tests.http_proxy import OTHER_PASSWORD, PASSWORD, USER, HttpProxy, own_address
from tests.processes import Process, Processes, until

HOLD_BYTES = 300_000  # beyond all that is sent before an update or a model, and within each
AWAY_SECONDS = 1.0
WAYS: dict[str, Way] = {"uploading": "up", "downloading": "down"}
STATUS = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (0, 130, 143)}


class EventTrial(Trial):
    """A run to which the plan's events happen, each in its moment."""

    def __init__(self, scenario: Scenario, processes: Processes, stack: ExitStack) -> None:
        self._releases: dict[str, Release] = dict.fromkeys(scenario.plan.begins_earlier, "earlier")
        self._http_proxy: HttpProxy | None = None
        self._address = own_address() if scenario.has_http_proxy else None
        super().__init__(scenario, processes, stack)

    # The processes.

    @property
    def _host(self) -> str:
        return self._address or super()._host

    @property
    def _is_gated(self) -> bool:
        return any(event.when == "training" for event in self.plan.events)

    def _prepare_machines(self) -> None:
        super()._prepare_machines()
        if self.scenario.has_http_proxy:
            has_password = any("password" in event.action for event in self.plan.events)
            user = f"{USER}:{PASSWORD}" if has_password else ""
            self._http_proxy = HttpProxy(self._folder, user=user)
            self._start_http_proxy(PASSWORD)
            self._stack.callback(self._http_proxy.kill)

    def _start_http_proxy(self, password: str) -> None:
        assert self._http_proxy is not None
        has_password = PASSWORD in self._http_proxy.url
        self._http_proxy.start(f"BasicAuth {USER} {password}" if has_password else "")

    def _start_server(self, *, port: int = 0, prepare: Callable[[], object] | None = None) -> None:
        super()._start_server(port=port, prepare=prepare or self._as_release("server"))

    def _start_client(
        self, name: str, *, prepare: Callable[[], object] | None = None, by_proxy: bool = False
    ) -> Process:
        first = self._through_http_proxy if self._http_proxy else None
        then = prepare or self._as_release(name)
        steps = [step for step in (first, then) if step is not None]
        both = partial(in_turn, steps) if steps else None
        return super()._start_client(name, prepare=both, by_proxy=by_proxy)

    @property
    def _through_http_proxy(self) -> Callable[[], object]:
        assert self._http_proxy is not None
        return partial(set_variables, {"http_proxy": self._http_proxy.url, "no_proxy": ""})

    def _as_release(self, name: str) -> Callable[[], object] | None:
        release = self._releases.get(name, "present")
        if release == "present":
            return None
        tree = machines.tree_of(release, self._folder)
        return partial(machines.start_anew, tree, machines.UNKNOWN_FLAGS)

    def _prepared(self, side: Side) -> Callable[[], object] | None:
        return None if side == "client" else super()._prepared(side)

    # The moments.

    def strike(self) -> None:
        """Let the devices come back, and each event happen in its moment."""
        num_joined = self._num_joined()
        plan = self._with_holds()
        if plan.blows:
            proxy = Proxy(self._port, plan, host=self._host)
            self._proxy = self._stack.enter_context(proxy)
        for name in self._names:
            self._start_client(name, by_proxy=name == "0")
        self._wait_for_all(num_joined)
        for event in self.plan.events:
            if event.when == "between rounds":
                self._do_between_rounds(event)
        num_before = self._num_rounds()
        self._file("trigger").touch()
        orders.write_order(self.out, "resume")
        for event in self.plan.events:
            for number in range(event.times if event.when != "between rounds" else 0):
                self._wait_for(event, number)
                self._do(event)
                self._let_go()
        if self._proxy is not None:
            proxy = self._proxy
            until(lambda: proxy.has_struck, what=lambda: f"{proxy.num_blows}:\n{self._told()}")
        self._wait_for_rounds(max(self._num_rounds(), num_before) + ROUNDS_BEHIND)
        until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")

    def _with_holds(self) -> FaultPlan:
        """Return the plan of the proxy: its own blows, and a hold for each moment on the link."""
        held = [
            Blow(
                what="hold", at=At(way=WAYS[event.when], connection=number, after_bytes=HOLD_BYTES)
            )
            for event in self.plan.events
            if event.when in WAYS
            for number in range(event.times)
        ]
        return replace(self.plan, blows=(*held, *self.plan.blows))

    def _do_between_rounds(self, event: Event) -> None:
        for number in range(event.times):
            if number:
                orders.write_order(self.out, "resume")
                until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")
                self._wait_for_rounds(self._num_rounds() + 1)
                self._pause()
            self._do(event)

    def _wait_for(self, event: Event, number: int) -> None:
        if event.when == "training":
            for name in self._names:
                until(self._file(f"begun-{name}").exists, what=lambda: "all devices at work")
            return
        proxy = self._proxy
        assert proxy is not None
        until(lambda: proxy.num_holds > number, what=lambda: f"a hold:\n{self._told()}")

    def _let_go(self) -> None:
        """Let the moment be over."""
        self._file("gate").touch()
        if self._proxy is not None:
            self._proxy.go_on()

    def check_measured(self, before: Measured, after: Measured) -> None:
        """Hold that the server has back what it had, unless it is of another release now."""
        begun = "earlier" if "server" in self.plan.begins_earlier else "present"
        if self._releases.get("server", "present") == begun:
            super().check_measured(before, after)

    # The events.

    def _do(self, event: Event) -> None:
        match event.action:
            case "restart the server":
                self._end(self.server, event.by)
                self._releases["server"] = event.release
                self._start_server(port=self._port)
            case "take the server back":
                self._end(self.server, event.by)
                self._take_back()
            case "restart the device":
                self._end_device(event.by)
                self._start_device(event.release)
            case "let in another protocol":
                self._end_device(event.by)
                self._releases["0"] = "other protocol"
                self._refused(self._start_client("0"), "ProtocolMismatch")
                self._start_device("present")
            case "start a second server":
                flags = [*self._settings, "--resume", *self._link("server")]
                second = self._processes.server(*flags, task=self.task)
                self._refused(second, "SettingsError: another process writes here")
            case "start a second simulator":
                flags = ["--out", self.out, "--task", self.task, "--resume", "--threads", 1]
                second = self._processes.start("simulation", *flags)
                self._refused(second, "SettingsError: another process writes here")
            case "start a second device":
                self._start_second_device()
            case "race for the folder":
                self._race()
            case "restart the HTTP proxy":
                self._restart_http_proxy(PASSWORD)
            case "change the HTTP proxy's password":
                num_waiting = self._num_waiting()
                self._restart_http_proxy(OTHER_PASSWORD)
                until(
                    lambda: self._num_waiting() > num_waiting,
                    what=lambda: f"devices that are refused:\n{self._told()}",
                )
                self._restart_http_proxy(PASSWORD)

    def _end(self, process: Process, by: signal.Signals) -> None:
        """End a process; one that ends in peace needs the moment to be over."""
        process.kill(by)
        if by != signal.SIGKILL:
            self._let_go()
        assert process.wait() in STATUS[by], process.text()

    def _take_back(self) -> None:
        """Let the earlier release refuse the run's folder by name; then the present one goes on."""
        tree = machines.tree_of("earlier", self._folder)
        prepare = partial(machines.start_anew, tree, machines.UNKNOWN_FLAGS)
        flags = [*self._settings, "--resume", *self._link("server")]
        earlier = self._processes.server(*flags, task=self.task, prepare=prepare)
        self._refused(earlier, "SettingsError")
        self._start_server(port=self._port)

    def _end_device(self, by: signal.Signals) -> None:
        """End device 0, and let the server see it: without TLS it takes no second one of a name."""
        self._end(self._clients["0"], by)
        self._let_go()

    def _start_device(self, release: Release) -> None:
        self._releases["0"] = release
        self._start_client("0", by_proxy=True).wait_for("connected to")

    def _refused(self, process: Process, why: str) -> None:
        """Hold that a process ends by name."""
        assert process.wait() in (1, 2), process.text()
        assert why in process.text(), process.text()

    def _start_second_device(self) -> None:
        """Start a device with the name and the state folder of another one.

        Only TLS shows that it is the same device: then it takes over, and the first one ends.
        """
        first = self._clients["0"]
        second = self._start_client("0")
        if self._tls is None:
            self._clients["0"] = first
            self._refused(second, "IdentityRefused: a device named 0 is already connected")
            return
        second.wait_for("connected to")
        self._let_go()
        self._refused(first, "IdentityRefused: another stream has the key of 0")

    def _race(self) -> None:
        """Kill the server, and let two start at once in its folder, on its port."""
        self._end(self.server, signal.SIGKILL)
        flags = ["--rounds", 100_000, "--listen", f"{self._host}:{self._port}", "--verbose"]
        flags += ["--min-clients", self.scenario.num_devices, *self._settings, "--resume"]
        flags += ["--metrics", "127.0.0.1:0", *self._link("server")]
        both = [self._processes.server(*flags, task=self.task) for _ in range(2)]
        until(lambda: any(one.poll() is not None for one in both), what=lambda: "one that ends")
        (lost,) = [one for one in both if one.poll() is not None]
        self._refused(lost, "SettingsError: another process writes here")
        (self.server,) = [one for one in both if one is not lost]
        self.server.wait_for("listening on")

    def _restart_http_proxy(self, password: str) -> None:
        assert self._http_proxy is not None
        self._http_proxy.kill()
        self._let_go()
        time.sleep(AWAY_SECONDS)
        self._start_http_proxy(password)

    def _num_waiting(self) -> int:
        return sum(one.text().count("(http_proxy)") for one in self._clients.values())


def in_turn(steps: list[Callable[[], object]]) -> None:
    """Call one after the other."""
    for step in steps:
        step()


def set_variables(variables: dict[str, str]) -> None:
    """Set variables of this process's environment."""
    os.environ |= variables
