"""Faults told as data: ``FaultPlan().cut(after_bytes=6_000_000)`` of the network,
``FaultPlan().drop(client="d03", after="share_keys")`` of a secure session's devices and server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

Way = Literal["up", "down"]

READ_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """End connection number ``connection``, counted from 0, when so many bytes went one way."""

    after_bytes: int
    way: Way
    connection: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """A device answers a phase of a secure session and then no other; None: it never answers."""

    client: str
    after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lie:
    """A message of a secure session is changed on its way: the server's to a device, or back."""

    action: str
    client: str | None  # None: everybody's
    by_server: bool
    change: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """What goes wrong, and when."""

    cuts: tuple[Cut, ...] = ()
    drops: tuple[Drop, ...] = ()
    lies: tuple[Lie, ...] = ()

    def cut(self, *, after_bytes: int, way: Way = "up", connection: int = 0) -> FaultPlan:
        """Also cut a connection."""
        cut = Cut(after_bytes=after_bytes, way=way, connection=connection)
        return replace(self, cuts=(*self.cuts, cut))

    def drop(self, *, client: str, after: str | None) -> FaultPlan:
        """Also let a device vanish behind a phase of a secure session."""
        return replace(self, drops=(*self.drops, Drop(client=client, after=after)))

    def tell(
        self, action: str, change: Callable[[Any], Any], *, client: str | None = None
    ) -> FaultPlan:
        """Also change what the server tells a device, or all, in a phase."""
        lie = Lie(action=action, client=client, by_server=True, change=change)
        return replace(self, lies=(*self.lies, lie))

    def answer(self, action: str, change: Callable[[Any], Any], *, client: str) -> FaultPlan:
        """Also change what a device answers in a phase."""
        lie = Lie(action=action, client=client, by_server=False, change=change)
        return replace(self, lies=(*self.lies, lie))

    def limit(self, way: Way, connection: int) -> int | None:
        """Return after how many bytes this way of a connection ends; None: never."""
        found = [c.after_bytes for c in self.cuts if (c.way, c.connection) == (way, connection)]
        return min(found, default=None)


class Proxy:
    """Passes TCP connections on to a port, and does to them what a plan says."""

    def __init__(self, port: int, plan: FaultPlan) -> None:
        self.num_cuts = 0
        self.num_connections = 0
        self._target = port
        self._plan = plan
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _end(self._listener)
        self._threads[0].join()
        for end in self._open:
            _end(end)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                device, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            number, self.num_connections = self.num_connections, self.num_connections + 1
            self._open += [device, server]
            ways: tuple[tuple[Way, socket.socket, socket.socket], ...]
            ways = (("up", device, server), ("down", server, device))
            for way, source, sink in ways:
                limit = self._plan.limit(way, number)
                thread = threading.Thread(target=self._pass, args=(source, sink, limit))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        num_passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                num_passed += len(data)
                if limit is not None and num_passed > limit:
                    self.num_cuts += 1
                    break
                sink.sendall(data)
        _end(source)
        _end(sink)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
