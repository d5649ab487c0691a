"""A simulated device at work: its hardware under a virtual clock, and how long it stood idle.

The clock and who is there are pure functions of the run's seed, the device's number, the round and
the micro-batch; the machine that simulates has no part in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from client.device import Hardware
from client.growth import WORKING_FACTOR, Speed
from client.micro_batches import seed_of
from client.probe import activation_bytes
from client.resident import Identity
from client.workplace import Clock, Restraint, Workplace
from common.line import Line
from common.parameters import ModelLayout
from common.settings import Settings
from common.update import Vitals
from simulation.profiles import MIB, SimulatedDevice, device_of

# What Python, torch and this client hold before any model: about 250 MB on amd64 and arm64.
IDLE_BYTES = 250 * MIB

# A laptop's seconds per example on a model of P parameters: 6 P operations at 5e9 a second, and
# the dispatch of some fifty operators per micro-batch.
OPERATIONS_PER_PARAMETER = 6
OPERATIONS_PER_SECOND = 5e9
DISPATCH_SECONDS = 4e-4


# Rounds in which quotas settle to what was measured; the idle time is that of the rounds behind.
SETTLING_ROUNDS = 3

# Flower's ClientApp makes a device's hardware without a word of the round; the grid knows it.
_round: ContextVar[int] = ContextVar("round", default=0)


@contextmanager
def at_round(number: int) -> Iterator[None]:
    """Let the hardware that is made here be that of this round."""
    token = _round.set(number)
    try:
        yield
    finally:
        _round.reset(token)


def is_there(settings: Settings, part: int, *, round_number: int, look: int) -> bool:
    """Say whether a device is there when the round's cohort is chosen, at the n-th look from 0.

    A server that finds too few looks again, and so does this draw.
    """
    share = device_of(settings, part).availability
    if share == 1:
        return True
    seed = seed_of("availability", settings.seed, part, round_number, look)
    return bool(np.random.default_rng(seed).random() < share)


class Jitter:
    """Factors by which micro-batches take longer or shorter: lognormal, of mean 1.

    exp(s z - s^2 / 2) with z normal; the n-th factor depends on the seed and n alone.
    """

    def __init__(self, relative: float, seed: int) -> None:
        self._relative = relative
        self._generator = np.random.default_rng(seed) if relative else None

    def next_factor(self) -> float:
        """Return the factor of the next micro-batch; exactly 1 where there is no jitter."""
        if self._generator is None:
            return 1.0
        normal = float(self._generator.standard_normal())
        return math.exp(self._relative * normal - self._relative**2 / 2)


class VirtualClock:
    """Seconds that pass only when a micro-batch is done."""

    def __init__(
        self, speed: Speed, jitter: Jitter | None = None, *, transfer_seconds: float = 0.0
    ) -> None:
        self._speed = speed
        self._jitter = jitter or Jitter(0.0, 0)
        self._seconds = 0.0
        self._transfer_seconds = transfer_seconds

    def seconds(self) -> float:
        """Return the time; the model and the update travel behind the first look at the clock.

        So a round's seconds hold the transfer, as they do for the server, and a step's do not.
        """
        now = self._seconds
        self._seconds += self._transfer_seconds
        self._transfer_seconds = 0.0
        return now

    def worked(self, num_examples: int) -> None:
        seconds = (
            self._speed.seconds_per_micro_batch + num_examples * self._speed.seconds_per_example
        )
        self._seconds += seconds * self._jitter.next_factor()


class VirtualMemory:
    """The memory of a simulated device: a line in the micro-batch size, and a limit."""

    def __init__(self, *, limit_bytes: int, base_bytes: int) -> None:
        self.each_bytes: float | None = None
        self._limit_bytes = limit_bytes
        self._base_bytes = base_bytes

    @property
    def line(self) -> Line | None:
        if self.each_bytes is None:
            return None
        return Line(base=float(self._base_bytes), each=self.each_bytes)

    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    def fitting(self) -> int | None:
        return None

    def begin(self, num_examples: int) -> None:
        """Nothing is measured."""

    def end(self, num_examples: int) -> int:
        """Return the bytes of the line."""
        return int(self._base_bytes + (self.each_bytes or 0.0) * num_examples)

    def relieve(self, bytes_per_example: float | None) -> None:
        if self.each_bytes is not None and bytes_per_example is not None:
            self.each_bytes = min(self.each_bytes, bytes_per_example)


class SimulatedMachine:
    """A device's hardware under a virtual clock."""

    def __init__(
        self, device: SimulatedDevice, num_parameters: int, *, jitter_seed: int = 0
    ) -> None:
        self._device = device
        self._num_parameters = num_parameters
        self.clock: Clock = VirtualClock(
            self._timing(),
            Jitter(device.jitter, jitter_seed),
            transfer_seconds=2 * 4 * num_parameters / device.upload_bytes_per_second,
        )
        self.memory = VirtualMemory(
            limit_bytes=device.memory_bytes, base_bytes=IDLE_BYTES + 2 * 4 * num_parameters
        )

    def cores(self) -> float:
        return self._device.cores

    def vitals(self) -> Vitals:
        line = self.memory.line
        return Vitals(
            memory_limit_bytes=self._device.memory_bytes,
            base_bytes=None if line is None else int(line.base),
            bytes_per_example=None if line is None else line.each,
            upload_bytes_per_second=self._device.upload_bytes_per_second,
            download_bytes_per_second=self._device.upload_bytes_per_second,
        )

    def restraint(self) -> Restraint:
        return Restraint()

    def speed(self, place: Workplace) -> Speed:
        self.memory.each_bytes = activation_bytes(place) * WORKING_FACTOR
        return self._timing()

    def _timing(self) -> Speed:
        device = self._device
        dispatch, rate = device.micro_batch_seconds, device.examples_per_second
        if dispatch is None:
            dispatch = DISPATCH_SECONDS / device.relative_speed
        operations = OPERATIONS_PER_PARAMETER * self._num_parameters
        each = operations / OPERATIONS_PER_SECOND / device.relative_speed
        return Speed(
            seconds_per_micro_batch=dispatch,
            seconds_per_example=each if rate is None else 1 / rate,
        )


def simulated_machine(identity: Identity, settings: Settings, layout: ModelLayout) -> Hardware:
    """Return the hardware of a simulated device, in the round that the grid is at."""
    return SimulatedMachine(
        device_of(settings, identity.part),
        layout.num_parameters,
        jitter_seed=seed_of("jitter", settings.seed, identity.part, _round.get()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """How long a round's devices waited for the last of them.

    ``share`` is 1 - mean(finish) / T over the devices that the planner was free to give more or
    less to, T or ``free_seconds`` the last finish among them; None where there was no such device.
    The others are counted apart, with the last finish of those that were asked for one example,
    the least there is: it may lie behind T.
    """

    share: float | None
    free_seconds: float
    num_free: int
    num_bound_by_data: int
    num_bound_by_one_example: int
    one_example_seconds: float


def idle_time(row: Mapping[str, Any]) -> Idle:
    """Return the idle time of a row of rounds.jsonl.

    Bound by its own data is a device that was asked for all its examples, or came to the end of
    its epoch; a device that dropped out is not in the row's clients and does not count.
    """
    free, one, num_data = [], [], 0
    for client in row["clients"]:
        if client["plan"].startswith("all its ") or client["reason"] == "epoch end":
            num_data += 1
        elif client["num_examples"] == 1:
            one.append(client["seconds"])
        else:
            free.append(client["seconds"])
    last = max(free, default=0.0)
    return Idle(
        # The mean may round to above the largest.
        share=max(1 - math.fsum(free) / len(free) / last, 0.0) if last else None,
        free_seconds=last,
        num_free=len(free),
        num_bound_by_data=num_data,
        num_bound_by_one_example=len(one),
        one_example_seconds=max(one, default=0.0),
    )


def idle_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in a line what the rounds behind the third come to, or all if there are not so many."""
    settled = [row for row in rows if row["round"] > SETTLING_ROUNDS] or list(rows)
    idle = [idle_time(row) for row in settled]
    shares = [one.share for one in idle if one.share is not None]
    if not shares:
        return "no device that was free to be given more or less"
    rounds = f"rounds {settled[0]['round']} to {settled[-1]['round']}"
    last = idle[-1]
    line = f"{math.fsum(shares) / len(shares):.1%}, mean over {rounds}; in the last "
    line += f"{last.num_free} devices were done by {last.free_seconds:.2f} s; apart: "
    line += f"{last.num_bound_by_data} bound by their own data"
    if last.num_bound_by_one_example:
        line += (
            f", {last.num_bound_by_one_example} by one example (the last of them after "
            f"{last.one_example_seconds:.2f} s)"
        )
    return line
