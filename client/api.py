"""``headwater.take_part``: one client of a run, from a script, a notebook or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from headwater.client import commands
from headwater.client.local_training.local_work import ClientAlgorithm
from headwater.client.transport.lasting_connection import Connection, stay_connected
from headwater.common.settings.keywords import Call, GivenSettings, api_function
from headwater.common.system.caller_state import caller_state
from headwater.common.system.stop_signals import StopRequests, at_stop_signals
from headwater.common.task import Task
from headwater.common.user_code.run_scope import run_scope

POLL_SECONDS = 0.2  # on Windows a wait without a timeout cannot be interrupted


@api_function
def take_part(
    task: Task | type[Task] | str | Path,
    *,
    server: str | None = None,
    data: str | Path | None = None,
    name: str | None = None,
    part: int | None = None,
    num_parts: int | None = None,
    partition: str | None = None,
    client_algorithm: str | Path | ClientAlgorithm | type[ClientAlgorithm] | None = None,
    feature: str | Path | type | list[str | Path | type] | None = None,
    local_parameters: str | None = None,
    secure_aggregation: Literal["off", "semi-honest", "active"] | None = None,
    memory_limit: int | None = None,
    active_hours: str | None = None,
    state: str | Path | None = None,
    spool: str | Path | None = None,
    threads: int | None = None,
    stay: bool | None = None,
    patience: float | None = None,
    settings: GivenSettings = None,
    progress: bool = True,
    **flags: Any,
) -> None:
    """Take part in a run, as ``headwater-client`` does, until the run ends.

    Each keyword is the flag of that name; what is not given has the flag's default. Works in any
    thread, several in one process too, each with a model of its own. They share torch's random
    numbers: where bits matter, give each client a process. In the main thread Ctrl-C or SIGTERM
    sends what is summed so far and raises KeyboardInterrupt; a second one sends nothing more.

    Args:
        task: an object with a task's methods, its class, or ``FILE.py:Class`` as for ``--task``.
        server: HOST:PORT of the server.
        data: this client's own file or folder of examples.
        name: the client's unique name; not given: the host's.
        part: this client's part of bundled data, from 0.
        num_parts: parts that the task splits bundled data into.
        partition: how to split one data set (docs/data.md); not given: as the task does.
        client_algorithm: how this client makes its vector: an object with ``train(work)``, its
            class, or ``FILE.py:CLASS`` (docs/extend.md); the server must name the same.
        feature: a feature of your own, or several, as the server has it (docs/extend.md).
        local_parameters: those that stay here, as in ``head.*``; the server must name the same.
        secure_aggregation: send no update that the server could read.
        memory_limit: bytes that this process may use.
        active_hours: when to take part, as in ``22:00-06:00``.
        state: folder for the position in the examples; not given: ~/.local/state/headwater.
        spool: folder that keeps a half-summed update through a power cut.
        threads: of torch; not given: all usable cores.
        stay: wait for the next run when one has ended; not given: return with the run's end, as
            with ``--once``.
        patience: seconds without contact after which to give up.
        settings: all other settings, by dotted keys as in ``{"client.bytes_per_day": 10**9}``
            (docs/settings.md), or the path of a TOML file such as headwater-device/client.toml.
        progress: print what the client does.
        flags: every other flag of ``headwater-client``, as in ``privacy_budget=8`` and
            ``min_quota=16`` (``headwater-client --help-all``).

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    call = Call("take_part", locals())  # nothing but the arguments so far
    with caller_state(is_silent=not progress), run_scope(call.objects):
        chosen = call.settings()
        stay = chosen.client.stay or False
        commands.keep_part(
            chosen,
            lambda connection, seconds: Participation(
                connection, stay=stay, after_seconds=seconds
            ).run(),
        )


class Participation:
    """Runs a connection in a thread of its own, as a notebook's thread has a running event loop."""

    def __init__(self, connection: Connection, *, stay: bool, after_seconds: float = 0.0) -> None:
        """See ``stay_connected``."""
        self._connection = connection
        self._after_seconds = after_seconds
        self._stay = stay
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._was_asked_to_stop = False

    def run(self) -> None:
        """Wait for the connection's end; pass requests to stop on to it.

        Raises:
            KeyboardInterrupt: there was such a request; the connection has ended.
            HeadwaterError, OtherTaskOffered: see ``Connection.run``.
        """
        context = contextvars.copy_context()  # the run's scope
        thread = threading.Thread(target=context.run, args=(self._run,), name="take part")
        with at_stop_signals(StopRequests(self.stop, self.stop_at_once)):
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
        if self._was_asked_to_stop:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let the connection send what is summed so far and end; nothing if it has ended."""
        self._was_asked_to_stop = True
        self._call(self._connection.stop)

    def stop_at_once(self) -> None:
        """Cancel the connection; nothing if it has ended."""
        self._call(self._cancel)

    def _call(self, function: Callable[[], object]) -> None:
        # The thread that closes its loop is alive for a moment longer.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._stay_connected())
        except BaseException as error:
            self._error = error

    async def _stay_connected(self) -> None:
        self._task = asyncio.current_task()
        await stay_connected(self._connection, stay=self._stay, after_seconds=self._after_seconds)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
