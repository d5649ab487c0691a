"""A TCP proxy on loopback that does to a link what a ``FaultPlan`` says, at the byte that it says.

Each way of a connection is read by one thread and written by another, with a queue between them, so
that a delay costs no throughput. gRPC's messages are told apart by their lengths in HTTP/2's DATA
frames (RFC 9113, section 4.1), which only plain text shows.
"""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from types import TracebackType
from typing import Self

from tests.faults import Blow, FaultPlan, Way

READ_BYTES = 1 << 14
LOOK_SECONDS = 0.05
QUEUED_READS = 64  # a megabyte on the way
SEGMENT_BYTES = 1448
THROTTLED_BYTES = 4096  # at once

Read = tuple[float, bytes] | None


class Proxy:
    """Passes TCP connections on to an address, and does to them what a plan says."""

    def __init__(self, port: int, plan: FaultPlan, *, host: str = "127.0.0.1") -> None:
        self.plan = plan
        self.num_connections = 0
        self.num_blows = 0
        self.num_lost_segments = 0
        self.num_holds = 0
        """The places of "hold" that were reached."""
        self.target = (host, port)
        self._listener = socket.create_server((host, 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._is_closing = threading.Event()
        self._goes_on = threading.Event()
        self._parted_until = 0.0
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
        self._is_closing.set()
        self._goes_on.set()
        end(self._listener)
        self._threads[0].join()
        for one in self._ends:
            end(one)
        for thread in self._threads[1:]:
            thread.join()

    @property
    def has_struck(self) -> bool:
        """Whether all that the plan does once was done."""
        return self.num_blows == len(self.plan.blows)

    def hold(self) -> None:
        """Wait for ``go_on``."""
        self._goes_on.clear()
        self.num_holds += 1
        self._goes_on.wait()

    def go_on(self) -> None:
        """End the present hold."""
        self._goes_on.set()

    def part(self, seconds: float) -> None:
        """Let nothing through for so long."""
        self._parted_until = time.monotonic() + seconds

    def wait_while_parted(self) -> None:
        """Wait until the ends are no longer parted, which ``part`` may let be sooner."""
        while (left := self._parted_until - time.monotonic()) > 0:
            if self._is_closing.wait(min(left, LOOK_SECONDS)):
                return

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until the proxy is closed."""
        if seconds > 0:
            self._is_closing.wait(seconds)

    def _accept(self) -> None:
        while True:
            try:
                device, _ = self._listener.accept()
            except OSError:
                return
            self.wait_while_parted()
            try:
                server = socket.create_connection(self.target)
            except OSError:
                end(device)  # there is no server at the moment
                continue
            number, self.num_connections = self.num_connections, self.num_connections + 1
            for one in (device, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends += [device, server]
            passages = (
                Passage(self, "up", number, device, server),
                Passage(self, "down", number, server, device),
            )
            for passage in passages:
                for work in (passage.read_all, passage.write_all):
                    thread = threading.Thread(target=work)
                    self._threads.append(thread)
                    thread.start()


class Passage:
    """One way of one connection."""

    def __init__(
        self, proxy: Proxy, way: Way, number: int, source: socket.socket, sink: socket.socket
    ) -> None:
        self._proxy, self._source, self._sink = proxy, source, sink
        self._weather = proxy.plan.weather
        self._blows = [
            blow for blow in proxy.plan.blows if (blow.at.way, blow.at.connection) == (way, number)
        ]
        knows_messages = any(blow.at.message is not None for blow in self._blows)
        self._messages = Messages(way) if knows_messages else None
        self._reads: queue.Queue[Read] = queue.Queue(QUEUED_READS)
        self._random = random.Random(f"{self._weather.seed} {way} {number}")
        self._num_passed = 0
        self._num_left_out = 0
        self._next_lost = self._draw_lost()

    def read_all(self) -> None:
        """Read to the end of the stream."""
        with contextlib.suppress(OSError):
            while data := self._source.recv(READ_BYTES):
                self._reads.put((time.monotonic(), data))
        self._reads.put(None)

    def write_all(self) -> None:
        """Pass on what is read; then end both ends, and let the reader go."""
        with contextlib.suppress(OSError):
            while (read := self._reads.get()) is not None:
                self._proxy.sleep(read[0] + self._weather.delay_seconds - time.monotonic())
                if self._messages is not None:
                    self._messages.feed(read[1])
                if not self._pass(bytearray(read[1])):
                    break
        end(self._source)
        end(self._sink)
        while read is not None:
            read = self._reads.get()

    def _pass(self, data: bytearray) -> bool:
        """Pass bytes on, with what happens among them; False if the connection was cut there."""
        self._leave_out(data)
        while data:
            blow, place = self._next_blow(len(data))
            self._send(data[:place])
            del data[:place]
            if blow is None:
                continue
            self._blows.remove(blow)
            match blow.what:
                case "cut":
                    data.clear()
                case "corrupt":
                    data[0] ^= 1
                case "stall":
                    self._proxy.sleep(blow.seconds)
                case "part":
                    self._proxy.part(blow.seconds)
                case "hold":
                    self._proxy.hold()
                case "truncate":
                    self._num_left_out = blow.num_bytes
                    self._leave_out(data)
            self._proxy.num_blows += 1
            if blow.what == "cut":
                return False
        return True

    def _leave_out(self, data: bytearray) -> None:
        """Drop what is to be left out, as far as it was read."""
        num_bytes = min(self._num_left_out, len(data))
        del data[:num_bytes]
        self._num_left_out -= num_bytes
        self._num_passed += num_bytes

    def _next_blow(self, num_bytes: int) -> tuple[Blow | None, int]:
        """Return what happens within the next bytes, and behind how many of them."""
        found: tuple[Blow | None, int] = (None, num_bytes)
        for blow in self._blows:
            place = self._place(blow)
            if place is not None and 0 <= place - self._num_passed < found[1]:
                found = (blow, place - self._num_passed)
        return found

    def _place(self, blow: Blow) -> int | None:
        if blow.at.message is None:
            return blow.at.after_bytes
        begins = [] if self._messages is None else self._messages.begins
        if len(begins) < blow.at.message:
            return None
        return begins[blow.at.message - 1] + blow.at.after_bytes

    def _send(self, data: bytearray) -> None:
        rate = self._weather.bytes_per_second
        most = THROTTLED_BYTES if rate or self._weather.lost_share else len(data)
        for start in range(0, len(data), max(most, 1)):
            piece = data[start : start + most]
            self._proxy.wait_while_parted()
            if rate:
                self._proxy.sleep(len(piece) / rate)
            self._num_passed += len(piece)
            while self._num_passed > self._next_lost:
                self._next_lost += self._draw_lost()
                self._proxy.num_lost_segments += 1
                self._proxy.sleep(self._weather.round_trip_seconds)
            self._sink.sendall(piece)

    def _draw_lost(self) -> float:
        share = self._weather.lost_share
        return self._random.expovariate(share / SEGMENT_BYTES) if share else float("inf")


class Messages:
    """Tells where gRPC's messages begin in one way of an HTTP/2 connection in plain text."""

    def __init__(self, way: Way) -> None:
        self.begins: list[int] = []
        self._place = 0
        self._preface = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") if way == "up" else 0
        self._head = bytearray()  # of a frame, 9 bytes
        self._left_of_frame = 0
        self._is_data = False
        self._prefix = bytearray()  # of a message, 5 bytes
        self._left_of_message = 0

    def feed(self, data: bytes) -> None:
        """Look through the next bytes."""
        at = min(self._preface, len(data))
        self._preface -= at
        while at < len(data):
            if self._left_of_frame == 0:
                taken = data[at : at + 9 - len(self._head)]
                self._head += taken
                at += len(taken)
                if len(self._head) == 9:
                    self._left_of_frame = int.from_bytes(self._head[:3], "big")
                    self._is_data = self._head[3] == 0
                    self._head.clear()
                continue
            part = data[at : at + self._left_of_frame]
            if self._is_data:
                self._feed_payload(part, self._place + at)
            self._left_of_frame -= len(part)
            at += len(part)
        self._place += len(data)

    def _feed_payload(self, part: bytes, place: int) -> None:
        at = 0
        while at < len(part):
            if self._left_of_message == 0:
                if not self._prefix:
                    self.begins.append(place + at)
                taken = part[at : at + 5 - len(self._prefix)]
                self._prefix += taken
                at += len(taken)
                if len(self._prefix) == 5:
                    self._left_of_message = int.from_bytes(self._prefix[1:], "big")
                    self._prefix.clear()
                continue
            skipped = min(self._left_of_message, len(part) - at)
            self._left_of_message -= skipped
            at += skipped


def end(one: socket.socket) -> None:
    """End a socket, and wake whoever waits for it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
