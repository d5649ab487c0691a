"""Faults told as data: ``FaultPlan().cut(after_bytes=6_000_000)`` of the network,
``FaultPlan().kill("server", "folded")`` of a process, and
``FaultPlan().drop(client="d03", after="share_keys")`` of a secure session's devices and server.

A plan says what goes wrong, where and when; it does nothing. ``tests.chaos.proxy`` does to a link
what a plan says, ``tests.chaos.deaths`` to a process, ``tests.chaos.runner`` to all the rest.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Way = Literal["up", "down"]
Side = Literal["server", "client", "aggregator"]
Failure = Literal["killed", "parted", "stopped"]
"""parted: from the devices and from the shared state. stopped: it continues when it is too late."""
WhatHappens = Literal["cut", "truncate", "corrupt", "stall", "part", "hold"]
Release = Literal["present", "earlier", "other protocol"]
"""earlier: of this protocol, from the history (``tests.chaos.releases``)."""
Moment = Literal["between rounds", "training", "uploading", "downloading"]
"""Of device 0: in a micro-batch, or with a part of its update, or of the model, on the way."""
Action = Literal[
    "restart the server",
    "restart the device",
    "take the server back",
    "let in another protocol",
    "start a second server",
    "start a second simulator",
    "start a second device",
    "race for the folder",
    "restart the HTTP proxy",
    "change the HTTP proxy's password",
]
Bundles = Literal["published", "server killed", "link cut", "device killed", "disk full", "pinned"]
"""What happens while a task's next version is published, and reaches the devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class At:
    """A place in what one way of a connection carries: so many bytes behind a beginning.

    That is the connection's own, or with ``message`` that of gRPC's message of this number, counted
    from 1; in TLS nobody can tell where one begins. Connections count from 0.
    """

    way: Way = "up"
    connection: int = 0
    message: int | None = None
    after_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Blow:
    """What happens to a link once, at a place.

    cut: the connection ends. truncate: ``num_bytes`` are left out, and the rest follows.
    corrupt: a bit of the byte at the place is flipped. stall: this way stands still for
    ``seconds``. part: nothing passes on any connection, either way, for ``seconds``. hold: this way
    stands still until the proxy releases it.
    """

    what: WhatHappens
    at: At
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weather:
    """What a link is like all the time, each way."""

    delay_seconds: float = 0.0
    bytes_per_second: float | None = None
    lost_share: float = 0.0
    """Of the segments: TCP sends each anew, and what is behind it waits for a round trip."""
    round_trip_seconds: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """A process kills itself with SIGKILL at a point of a round (``tests.chaos.deaths``).

    It is the ``call``-th time that it comes there; ``after_bytes`` of what it was about to write
    are written, where the point is one of writing.
    """

    side: Side
    point: str
    call: int = 1
    after_bytes: int | None = None
    number: signal.Signals = signal.SIGKILL
    """SIGSTOP: it stands still there until it gets SIGCONT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrow:
    """A link of so many bits a second, and of a delay, made by the kernel."""

    bits_per_second: int
    down_seconds: float = 0.0
    """For so long the link is down, in mid-upload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that is done to the processes, or to the machine, at a moment of a round.

    ``release`` is that of a process that is started anew, ``by`` the signal that ends the process
    before it. ``times`` says in how many such moments, one after the other, it is done.
    """

    action: Action
    when: Moment
    release: Release = "present"
    by: signal.Signals = signal.SIGKILL
    times: int = 1


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
    """What goes wrong, and when; of the devices it is number 0 that it happens to."""

    blows: tuple[Blow, ...] = ()
    weather: Weather = field(default_factory=Weather)
    deaths: tuple[Death, ...] = ()
    narrow: Narrow | None = None
    full_disk: Side | None = None
    clock_seconds: tuple[tuple[Side, float], ...] = ()
    num_gone: int = 0
    is_upgraded: bool = False
    failures: tuple[Failure, ...] = ()
    events: tuple[Event, ...] = ()
    begins_earlier: tuple[str, ...] = ()
    """The processes that begin as the earlier release: ``"server"``, and devices by name."""
    bundles: Bundles | None = None
    drops: tuple[Drop, ...] = ()
    lies: tuple[Lie, ...] = ()

    # Of the network.

    def cut(
        self,
        *,
        after_bytes: int = 0,
        message: int | None = None,
        way: Way = "up",
        connection: int = 0,
    ) -> FaultPlan:
        """Also cut a connection."""
        at = At(way=way, connection=connection, message=message, after_bytes=after_bytes)
        return self._and(Blow(what="cut", at=at))

    def truncate(
        self, num_bytes: int, *, after_bytes: int = 0, message: int | None = None, way: Way = "up"
    ) -> FaultPlan:
        """Also leave bytes out."""
        at = At(way=way, message=message, after_bytes=after_bytes)
        return self._and(Blow(what="truncate", at=at, num_bytes=num_bytes))

    def corrupt(
        self, *, after_bytes: int = 0, message: int | None = None, way: Way = "up"
    ) -> FaultPlan:
        """Also flip a bit of a byte."""
        at = At(way=way, message=message, after_bytes=after_bytes)
        return self._and(Blow(what="corrupt", at=at))

    def stall(
        self, seconds: float, *, after_bytes: int = 0, message: int | None = None, way: Way = "up"
    ) -> FaultPlan:
        """Also let one way stand still."""
        at = At(way=way, message=message, after_bytes=after_bytes)
        return self._and(Blow(what="stall", at=at, seconds=seconds))

    def part(
        self, seconds: float, *, after_bytes: int = 0, message: int | None = None, way: Way = "up"
    ) -> FaultPlan:
        """Also part the device from the server: no byte is lost, and none comes through."""
        at = At(way=way, message=message, after_bytes=after_bytes)
        return self._and(Blow(what="part", at=at, seconds=seconds))

    def _and(self, blow: Blow) -> FaultPlan:
        return replace(self, blows=(*self.blows, blow))

    def delay(self, seconds: float) -> FaultPlan:
        """Let each byte come so much later, each way."""
        return replace(self, weather=replace(self.weather, delay_seconds=seconds))

    def throttle(self, bytes_per_second: float) -> FaultPlan:
        """Let no more bytes through, each way."""
        return replace(self, weather=replace(self.weather, bytes_per_second=bytes_per_second))

    def lose(self, share: float, *, round_trip_seconds: float, seed: int = 0) -> FaultPlan:
        """Stall as a link does that loses this share of its segments, at moments of ``seed``."""
        weather = replace(
            self.weather, lost_share=share, round_trip_seconds=round_trip_seconds, seed=seed
        )
        return replace(self, weather=weather)

    def confine(self, bits_per_second: int, *, down_seconds: float = 0.0) -> FaultPlan:
        """Put the device behind a narrow link of the kernel's, which may go down in mid-upload."""
        narrow = Narrow(bits_per_second=bits_per_second, down_seconds=down_seconds)
        return replace(self, narrow=narrow)

    # Of machines and their processes.

    def kill(
        self, side: Side, point: str, *, call: int = 1, after_bytes: int | None = None
    ) -> FaultPlan:
        """Also kill a process at a point of a round; it is started anew."""
        death = Death(side=side, point=point, call=call, after_bytes=after_bytes)
        return replace(self, deaths=(*self.deaths, death))

    def fill_disk(self, of: Side) -> FaultPlan:
        """Let a disk be full for a while."""
        return replace(self, full_disk=of)

    def set_clock(self, of: Side, seconds: float) -> FaultPlan:
        """Let a machine's wall clock be so far ahead."""
        return replace(self, clock_seconds=(*self.clock_seconds, (of, seconds)))

    def lose_devices(self, num_gone: int) -> FaultPlan:
        """Kill so many devices in the same moment; they come back some rounds later."""
        return replace(self, num_gone=num_gone)

    def upgrade(self) -> FaultPlan:
        """End the device in mid-round as systemd does, and start another version in its place."""
        return replace(self, is_upgraded=True)

    def fail_over(self, *failures: Failure) -> FaultPlan:
        """Let the serving server fail so many times, each time with a standby behind it."""
        return replace(self, failures=failures)

    # From outside, at a moment of a round.

    def begin_earlier(self, *names: str) -> FaultPlan:
        """Let the server, or devices, begin as the earlier release."""
        return replace(self, begins_earlier=names)

    def do(
        self,
        action: Action,
        when: Moment,
        *,
        release: Release = "present",
        by: signal.Signals = signal.SIGKILL,
        times: int = 1,
    ) -> FaultPlan:
        """Also do something from outside."""
        event = Event(action=action, when=when, release=release, by=by, times=times)
        return replace(self, events=(*self.events, event))

    def publish(self, how: Bundles) -> FaultPlan:
        """Let the task's next version be published while a round runs."""
        return replace(self, bundles=how)

    # Of a secure session.

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
