"""The processes of simulated devices, as the engine grpc starts, watches and ends them.

A fork server (``simulation.engines.fork_server``) imports torch and loads the task once, and forks
every device. Devices share the memory of what is imported, so a process costs only what it writes.

The engine holds one end of a pipe whose other end is the standard input of all these processes. The
pipe closes when the engine ends, by an error, Ctrl-C or SIGKILL, and then every process ends. They
have their own process group, so that the terminal's Ctrl-C reaches only the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.common.errors import ConnectionLost, error_of, system_remedy
from headwater.common.settings.schema import Settings
from headwater.common.wording import counted
from headwater.simulation.fleet.identities import identities_of

log = logging.getLogger(__name__)

STATE, ROUND, FORK_SERVER_LOG = "state", "round", "fork_server.log"

LEAVE_SECONDS = 10.0  # for the devices to read the server's goodbye and leave
END_SECONDS = 5.0

# The fork server uses this process's import path, whichever way this process was started.
COMMAND = (
    "import sys; sys.path[:] = {path!r}; "
    "from headwater.simulation.engines.fork_server import main; main()"
)


class ClientProcesses:
    """The fork server and its devices, for as long as the context is entered."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Start the fork server, which loads torch and the task; ``folder`` holds all logs."""
        self.dismissed: set[int] = set()
        """The devices that the server has refused."""
        self.state_folder = folder / STATE
        self._folder = folder
        self._identities = identities_of(settings)
        self._ended: dict[int, int] = {}
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        with (folder / FORK_SERVER_LOG).open("ab") as own_log:
            self._fork_server = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=own_log,
                # grpc would log each broken connection in its own words.
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
                process_group=0,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # on Windows
            )
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        self._orders, self._replies = self._fork_server.stdin, self._fork_server.stdout
        self._reader = threading.Thread(target=self._collect_lines, daemon=True)
        self._reader.start()
        self._send(
            {
                "settings": settings.model_dump(mode="json"),
                "folder": str(folder),
                "is_verbose": logging.getLogger().isEnabledFor(logging.INFO),
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the devices to leave after the server's goodbye; after an error, end them.

        Logs the number of devices that ended in an error.
        """
        try:
            if error is None:
                self._wait_until_all_left()
        finally:
            self._end()

    def start(self, port: int) -> None:
        """Fork the devices, which connect to this port of the loopback interface."""
        self._send({"port": port})

    def dismiss(self, part: int) -> None:
        """Record that the server has refused a device, which may therefore end."""
        self.dismissed.add(part)
        name = self._identities.name(part)
        log.info("device %s is refused; its log is %s", name, self._log_of(part))

    def check(self) -> None:
        """Check that every device's process is alive.

        Raises:
            ConnectionLost: a device's process has ended, or the fork server has.
            HeadwaterError: the task or its data could not be loaded.
        """
        has_ended = self._fork_server.poll() is not None
        if has_ended:
            self._reader.join(END_SECONDS)
        self._read_replies()
        for part in self._ended.keys() - self.dismissed:
            file = self._log_of(part)
            last_line = _last_line(file)
            todo = system_remedy(last_line) or "fewer --clients take less memory"
            raise ConnectionLost(
                f"the process of device {self._identities.name(part)} "
                f"{_describe(self._ended[part])}{last_line}",
                remedy=f"see {file}; {todo}",
            )
        if has_ended and not self._ended:
            file = self._folder / FORK_SERVER_LOG
            raise ConnectionLost(
                "the process that starts the devices "
                f"{_describe(self._fork_server.returncode)}{_last_line(file)}",
                remedy=f"see {file}",
            )

    def _log_of(self, part: int) -> Path:
        return self._folder / f"{self._identities.name(part)}.log"

    def _send(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(
            BrokenPipeError
        ):  # the fork server has ended: ``check`` reports it
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def _collect_lines(self) -> None:
        """Collect the fork server's replies, in a thread of its own, until all processes ended."""
        for line in self._replies:
            self._lines.put(line)

    def _read_replies(self) -> None:
        """Read the fork server's replies that have arrived."""
        while not self._lines.empty():
            reply = json.loads(self._lines.get())
            if "failed" in reply:
                raise error_of(*reply["failed"], lines="\n")
            if "left_out" in reply:
                log.warning("%s", reply["left_out"])
            else:
                self._ended[reply["ended"]] = reply["status"]

    def _wait_until_all_left(self) -> None:
        try:
            self._fork_server.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("some devices have not left within %g s; they are ended", LEAVE_SECONDS)
        else:
            self._reader.join(END_SECONDS)
        self._read_replies()
        failed = [part for part in self._ended.keys() - self.dismissed if self._ended[part]]
        if failed:
            log.warning(
                "%s ended in an error; see %s",
                counted(len(failed), "device"),
                self._log_of(failed[0]),
            )

    def _end(self) -> None:
        """Close the pipe, which ends all processes, and wait for the fork server."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._fork_server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._fork_server.wait()
        self._reader.join(END_SECONDS)
        if not self._reader.is_alive():
            self._replies.close()

    def _kill(self) -> None:
        """Kill the fork server; without process groups, its children end with its pipes."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg") and hasattr(signal, "SIGKILL"):
                os.killpg(self._fork_server.pid, signal.SIGKILL)
            else:
                self._fork_server.kill()


def _describe(status: int) -> str:
    """Return how a process ended, in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last_line(file: Path) -> str:
    """Return the last line of a log, or nothing if there is none."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return f": {lines[-1][:500]}" if lines else ""
