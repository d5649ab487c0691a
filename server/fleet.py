"""The devices as the rounds see them: who is there, what they answer. No Flower, no sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from headwater.common.errors import HeadwaterError
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    ReadyReport,
    ReportFields,
    Update,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg import protocol as secagg
from headwater.common.secagg.protocol import Phase, Request
from headwater.common.stats.gradient_noise import NoiseSums
from headwater.server.aggregation.round_sum import ReportColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """A client that was asked and did not finish, and why."""

    name: str
    error: HeadwaterError


class Reports(Sequence[ReportFields], ABC):
    """The reports of several devices, which can be read one by one and all at once."""

    @property
    @abstractmethod
    def columns(self) -> ReportColumns:
        """The reports as columns."""

    @abstractmethod
    def noise(self, owned: Mapping[str, int]) -> NoiseSums:
        """Return their part in the round's sums, see ``common.stats.gradient_noise.sums_of``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOfMany:
    """The updates of several devices, already added up; only a simulator has them so.

    ``values_P`` is their sum, in float64.
    """

    values_P: Tensor = field(repr=False)
    reports: Reports = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A device's reply in a secure session, with the bytes that came beside it."""

    name: str
    said: secagg.Reply
    beside: memoryview | bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that went over the wire so far."""

    bytes_up: int = 0
    bytes_down: int = 0


class Fleet(Protocol):
    """The devices, as the rounds see them."""

    def describe(self, request: DescribeRequest, *, min_clients: int) -> Mapping[str, DeviceReport]:
        """Wait until ``min_clients`` are there, and return the report of every device that is.

        A simulator may make a report when it is asked for. It then has none, and its ``get``
        returns None, of a device that turns out to be unable to describe itself.
        """
        ...

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Ask devices anew what they are, and wait for none: a later ``describe`` has the answers.

        A device that is still at its last answer is not asked.
        """
        ...

    def turn_seconds(self) -> float:
        """Return the server's seconds for one update, check and fold; 0 as long as unknown."""
        ...

    def train(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[Update | UpdateOfMany | ReadyReport | Dropout]:
        """Send plans and model, and yield each answer as it comes: Ready where a plan is masked.

        An update's vector is valid until the next one is asked for.
        """
        ...

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, Request],
        *,
        beside: bytes | None = None,
        reply_bytes: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        """Send one phase's requests of a secure session, and yield each reply as it comes.

        ``beside`` goes with every request; ``reply_bytes`` come with every reply, valid until the
        next one is asked for.
        """
        ...

    def evaluate(
        self, plans: Mapping[str, Plan], image: ModelImage, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        """Send the model for evaluation, and yield each answer as it comes."""
        ...

    def traffic(self) -> Traffic:
        """Return the bytes sent and received so far."""
        ...

    def simulated_state(self) -> dict[str, Any]:
        """Return the devices' own state, if they live and die with this process; else nothing."""
        ...

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Take up what ``simulated_state`` gave."""
        ...
