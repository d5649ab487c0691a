"""The processes of simulated devices, as the engine sees them: started, watched and ended.

A nursery (``headwater.simulation.run.fork_server``) imports torch and loads the task once, and every device is forked
from it: with the memory of what is imported shared, a process per device costs what it writes.

The engine holds one end of a pipe whose other end is the standard input of them all. Whatever ends
the engine closes it, and every one of them ends: nothing is left behind by an error, Ctrl-C or
SIGKILL. A process group of their own keeps the terminal's Ctrl-C from them: the engine decides.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.common.errors import ConnectionLost, error_of
from headwater.common.settings.schema import Settings

log = logging.getLogger(__name__)

STATE, ROUND, NURSERY_LOG = "state", "round", "nursery.log"

FAREWELL_SECONDS = 10.0  # for the devices to read the server's goodbye and leave
END_SECONDS = 5.0

# The nursery finds what this process finds, from wherever that was started.
COMMAND = "import sys; sys.path[:] = {path!r}; from headwater.simulation.engines.fork_server import main; main()"


class ClientProcesses:
    """One nursery and its devices, for as long as the context is entered."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Begin to load torch and the task; ``folder`` gets a log for each device."""
        self.dismissed: set[int] = set()
        """The devices that the server has turned away."""
        self.state_folder = folder / STATE
        self._folder = folder
        self._ended: dict[int, int] = {}
        self._heard = b""
        with (folder / NURSERY_LOG).open("ab") as own_log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=own_log,
                # grpc would write each broken connection to the logs in words of its own.
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
                process_group=0,
            )
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._orders, self._news = self._nursery.stdin, self._nursery.stdout
        os.set_blocking(self._news.fileno(), False)
        is_verbose = logging.getLogger().isEnabledFor(logging.INFO)
        self._order(
            {
                "settings": settings.model_dump(mode="json"),
                "folder": str(folder),
                "is_verbose": is_verbose,
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
        """Wait for the devices to leave, as the server has said goodbye; after an error end them.

        Those that do not leave in good order are counted in the log.
        """
        try:
            if error is None:
                self._see_off()
        finally:
            self._end()

    def start(self, port: int) -> None:
        """Fork the devices, which connect to this port of the loopback."""
        self._order({"port": port})

    def dismiss(self, part: int) -> None:
        """Take note that the server has turned a device away: it ends, and is not missed."""
        self.dismissed.add(part)
        log.warning("device %d is turned away; why stands in %s", part, self._log_of(part))

    def check(self) -> None:
        """Hold that every device's process is there.

        Raises:
            ConnectionLost: one has ended, or the nursery has.
            HeadwaterError: why the task or its data could not be loaded.
        """
        self._listen()
        for part in self._ended.keys() - self.dismissed:
            file = self._log_of(part)
            raise ConnectionLost(
                f"the process of device {part} {_how(self._ended[part])}{_last_line(file)}",
                remedy=f"see {file}; fewer --clients take less memory",
            )
        if self._nursery.poll() is not None and not self._ended:
            file = self._folder / NURSERY_LOG
            raise ConnectionLost(
                "the process that starts the devices "
                f"{_how(self._nursery.returncode)}{_last_line(file)}",
                remedy=f"see {file}",
            )

    def _log_of(self, part: int) -> Path:
        return self._folder / f"{part}.log"

    def _order(self, order: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: ``check`` says so
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def _listen(self) -> None:
        """Take the news of the nursery that is here."""
        while said := self._news.read():
            *lines, self._heard = (self._heard + said).split(b"\n")
            for line in lines:
                news = json.loads(line)
                if "failed" in news:
                    raise error_of(*news["failed"])
                self._ended[news["ended"]] = news["status"]

    def _see_off(self) -> None:
        """Wait until the devices have left."""
        try:
            self._nursery.wait(FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("not all devices have left within %g s: ended", FAREWELL_SECONDS)
        self._listen()
        failed = [part for part in self._ended.keys() - self.dismissed if self._ended[part]]
        if failed:
            log.warning(
                "%d devices ended in an error; see %s", len(failed), self._log_of(failed[0])
            )

    def _end(self) -> None:
        """Close the pipe on which all of them hang, and wait for the last."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        try:
            self._nursery.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._nursery.pid, signal.SIGKILL)
            self._nursery.wait()
        self._news.close()


def _how(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _last_line(file: Path) -> str:
    """Return the last line of a log, if there is one."""
    try:
        lines = file.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return f": {said[-1][:500]}" if said else ""
