"""Worker processes and device processes of a simulation, forked from a process that has torch.

A simulation starts ``python -c CODE`` for each worker, and for the fork server of its devices: of
its 3 s of CPU time almost all were imports. ``Forked`` has the part of ``subprocess.Popen`` that
the simulator uses, and the same descriptors, environment and folder reach the code.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import reduction
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import preloaded_process

PATCHED = (
    "headwater.simulation.compute.local_workers.subprocess",
    "headwater.simulation.engines.client_processes.subprocess",
)
ABOVE_ALL = 200
"""Below are the descriptors that the code knows by number."""


class Passed:
    """A descriptor on its way to the child, where it is a number again."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(sent: Any) -> int:
    found: int = sent.detach()
    return found


class Forked:
    """What ``subprocess.Popen`` is to the simulator."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: Any = None,
        pass_fds: Iterable[int] = (),
        env: Mapping[str, str] | None = None,
        process_group: int | None = None,
        creationflags: int = 0,
    ) -> None:
        assert creationflags == 0
        at = command.index("-c")
        assert command[0] == sys.executable
        theirs: list[int] = []
        self.stdin = self.stdout = None
        if stdin == subprocess.PIPE:
            reader, writer = os.pipe()
            theirs.append(reader)
            self.stdin = os.fdopen(writer, "wb")
        else:
            theirs.append(os.open(os.devnull, os.O_RDONLY))
        if stdout == subprocess.PIPE:
            reader, writer = os.pipe()
            theirs.append(writer)
            self.stdout = os.fdopen(reader, "rb")
        else:
            theirs.append(os.dup(1))
        theirs.append(os.dup(2 if stderr is None else stderr.fileno()))
        numbers = {number: Passed(sent) for number, sent in enumerate(theirs)}
        numbers |= {number: Passed(number) for number in pass_fds}
        self._child = preloaded_process(
            _run,
            command[at + 1],
            ["-c", *command[at + 2 :]],
            numbers,
            dict(os.environ if env is None else env),
            os.getcwd(),
            process_group is not None,
        )
        self._child.start()
        self.pid: int = self._child.pid
        for descriptor in theirs:
            os.close(descriptor)

    @property
    def returncode(self) -> int | None:
        """The exit status, once it has ended."""
        status: int | None = self._child.exitcode
        return status

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            TimeoutExpired: it still runs.
        """
        self._child.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(
    code: str,
    arguments: list[str],
    numbers: dict[int, int],
    environment: dict[str, str],
    folder: str,
    has_own_group: bool,
) -> None:
    """Go on as ``python -c CODE`` does."""
    if has_own_group:
        os.setpgrp()
    for number, found in numbers.items():
        numbers[number] = fcntl.fcntl(found, fcntl.F_DUPFD, ABOVE_ALL)
        os.close(found)
    for number, found in numbers.items():
        os.dup2(found, number)
        os.close(found)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def fork_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulations of a test fork what they would start."""
    forked = SimpleNamespace(
        Popen=Forked,
        PIPE=subprocess.PIPE,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    for name in PATCHED:
        monkeypatch.setattr(name, forked)
