"""A run whose task is a signed bundle: the next version is published while a round runs.

The operator's way is that of docs/operation.md: drain the run, publish, and start the next run with
the next version. The devices stay, fetch it over the wire and go on with it. The two versions train
alike, so that each run is held against the same reference.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headwater.common.task_bundles.signed_bundle import TaskBundle
from headwater.server.operations import orders
from headwater.server.task_bundles.publish import publish
from tests.chaos import machines
from tests.chaos.checks import Counted, check_folders, check_places
from tests.chaos.deaths import arm_at, point_of_client
from tests.chaos.proxy import Proxy
from tests.chaos.runner import ROUNDS_BEHIND, SMALL_DISK_BYTES, Trial
from tests.faults import FaultPlan
from tests.processes import Process, until
from tests.task_bundles.bundles import new_key

PADDING_BYTES = 600_000  # a bundle takes a while on the wire, and may have 900 kB
CUT_BYTES = 300_000
MOST_LOOKS = 2  # connections by which a device may look whose the server is, before it fetches
UNPACKED = point_of_client("task_bundles.kept_tasks:unpacked", "behind")


class BundleTrial(Trial):
    """A run, and the next one with the next version of the task; ``out`` is the present one's."""

    def _write_files(self) -> None:
        super()._write_files()
        self._key, self._trust = new_key(self._file("signer.key"))
        (self._folder / "code").mkdir()
        (self._folder / "code" / "padding.bin").write_bytes(os.urandom(PADDING_BYTES))
        self._bundle, self._served = self._publish(1)

    @property
    def _is_gated(self) -> bool:
        return True

    def _publish(self, version: int) -> tuple[TaskBundle, Path]:
        code = self._folder / "code" / "task.py"
        code.write_text(self._file("task.py").read_text() + f"\n# Version {version}\n")
        return publish(
            f"{code}:Task",
            key=self._key,
            folder=code.parent,
            version=version,
            out=self._file(f"Task-{version}.task"),
        )

    def _prepare_machines(self) -> None:
        super()._prepare_machines()
        if self.plan.bundles == "disk full":
            disk = machines.small_disk(self._state_of("0"), SMALL_DISK_BYTES)
            self._stack.enter_context(disk)

    @property
    def _served_task(self) -> str:
        return str(self._served)

    def _state_of(self, name: str) -> Path:
        return self._file("states") / name

    def _start_client(
        self, name: str, *, prepare: Callable[[], object] | None = None, by_proxy: bool = False
    ) -> Process:
        port = self._proxy.port if by_proxy and self._proxy is not None else self._port
        flags: list[object] = ["--server", f"127.0.0.1:{port}", "--name", name, "--part", name]
        flags += ["--num-parts", len(self._names), "--threads", 1, "--spool", self._file("spool")]
        flags += ["--state", self._state_of(name), "--verbose", "--stay", "--trust", self._trust]
        if self.plan.bundles == "pinned" and name == "1" and self._served.stem == "Task-1":
            flags += ["--pin-task", self._bundle.digest]
        client = self._processes.start("client", *flags, prepare=prepare)
        self._clients[name] = client
        return client

    def strike(self) -> None:
        """Let the devices come back, and publish the next version while they train."""
        num_joined = self._num_joined()
        self._proxy = self._stack.enter_context(Proxy(self._port, FaultPlan()))
        is_killed = self.plan.bundles == "device killed"
        prepare = partial(arm_at, UNPACKED, self._file("taking")) if is_killed else None
        for name in self._names:
            is_it = name == "0"
            self._start_client(name, prepare=prepare if is_it else None, by_proxy=is_it)
        self._wait_for_all(num_joined)
        self._file("trigger").touch()
        orders.write_order(self.out, "resume")
        for name in self._names:
            until(self._file(f"begun-{name}").exists, what=lambda: "all devices at work")
        bundle, file = self._publish(2)
        if self.plan.bundles == "server killed":
            self._kill_server()
        self._file("gate").touch()
        self._wait_for_rounds(self._num_rounds() + 1)
        orders.write_order(self.out, "drain")
        assert self.server.wait() == 0, self.server.text()
        self.check()
        self._serve_next(bundle, file)
        self._wait_for_rounds(ROUNDS_BEHIND)
        until(lambda: self._stands() != "paused", what=lambda: f"no pause:\n{self._told()}")

    def _kill_server(self) -> None:
        self.server.kill()
        assert self.server.wait() == -signal.SIGKILL
        self._start_server(port=self._port)

    def _serve_next(self, bundle: TaskBundle, file: Path) -> None:
        """Start the next run, with what the plan lets go wrong while its bundle arrives."""
        how, proxy = self.plan.bundles, self._proxy
        assert proxy is not None
        self._bundle, self._served, self.out = bundle, file, self._file("out-2")
        first, second = self._clients["0"], self._clients["1"]
        filler = machines.fill(self._state_of("0")) if how == "disk full" else None
        if how == "link cut":
            for number in range(proxy.num_connections, proxy.num_connections + MOST_LOOKS):
                proxy.plan = proxy.plan.cut(way="down", after_bytes=CUT_BYTES, connection=number)
        self._file("taking").touch()
        self._start_server(port=self._port)
        if how == "server killed":
            self.server.wait_for("joined: ")
            self._kill_server()
        if how == "device killed":
            assert first.wait() == -signal.SIGKILL, first.text()
            self._start_client("0", by_proxy=True)
        if filler is not None:
            assert first.wait() == 1, first.text()
            assert "No space left on device" in first.text()
            filler.unlink()
            self._start_client("0", by_proxy=True)
        if how == "pinned":
            self.server.wait_for("1 takes no part: TaskBundleRefused: 1: the server's task Task 2")
            second.kill(signal.SIGTERM)
            assert second.wait() == 0, second.text()
            self._start_client("1")
        self._wait_for_all(0)
        assert (proxy.num_blows > 0) == (how == "link cut")

    def _check_files(self, done: Counted) -> None:
        """Hold what each device says, and what lies in its folder, for the run at ``out``."""
        for name, place in done.places.items():
            state = self._state_of(name)
            check_places(self.out, state, {name: place})
            runs = [name] * self._bundle.content.version  # each run has a file of its own
            check_folders(self.out, state, self._file("spool"), [*runs, "tasks"])
