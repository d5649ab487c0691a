"""The clients as the rounds see them: the protocol ``Fleet``, without Flower and without sockets.

``server.flower.grid_fleet`` implements it with messages, the simulator by calls in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from headwater.common.errors import HeadwaterError
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Plan,
    ReadyReport,
    Update,
    UpdateReport,
    WireMessage,
)
from headwater.common.model.parameters import ModelImage
from headwater.server.aggregation.cohort_sum import PartialSum
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.aggregation.round_reports import ReportBatch
from headwater.server.aggregation.round_seconds import LinkSeconds
from headwater.server.planning.cohort import ConnectedClients

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import SentModel
    from headwater.common.phases import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """A client that was sent a request and did not finish, and why."""

    name: str
    error: HeadwaterError


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateBlock:
    """The updates of several clients: a vector for each, or one that is their sum in float64.

    Only the simulator sends several at once: their reports are columns already.
    """

    vectors: Sequence[Tensor] = field(repr=False)
    reports: ReportBatch = field(repr=False)


BeyondNorm = Literal["refuse", "clip", "keep"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRules:
    """What a round's updates are held against, on the server and on an aggregator."""

    max_weight_per_example: int = 1
    norm_watch: NormWatch | None = None
    """The limit of the updates' norms; None: they are not watched."""
    beyond_norm: BeyondNorm = "refuse"


PLAIN_RULES = UpdateRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchOrder:
    """An aggregator's part of a round: its devices' plans, and the rules of the server above."""

    plans: Mapping[str, Plan] = field(repr=False)
    scale_bits: tuple[int, ...]
    """Of the round's sum, one for each tensor."""
    rules: UpdateRules


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchSum:
    """What an aggregator sends to the server above in place of its devices' updates.

    ``norms`` has the norm per unit of weight of each update that arrived; ``outliers`` names those
    beyond the norm's limit; ``refused`` says why a device is not in the sum.
    """

    name: str
    total: PartialSum = field(repr=False)
    extra: Mapping[str, PartialSum] = field(default_factory=dict, repr=False)
    """The sums beside the model's, by name."""
    reports: Sequence[UpdateReport] = field(repr=False)
    unused: Sequence[int] = field(repr=False)
    """The places of the trained tensors that none of its updates' losses used."""
    norms: Mapping[str, float] = field(repr=False)
    outliers: Sequence[str]
    clip_bits: Sequence[int]
    refused: Mapping[str, HeadwaterError]
    refusals: Mapping[str, int]


Answer = Update | UpdateBlock | BranchSum | ReadyReport | Dropout
"""An answer to plans: of one client, or of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A client's reply in a phase of a conversation, and the bytes that came with it."""

    name: str
    message: Any
    vector: memoryview | bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The bytes that have been sent and received so far.

    ``links`` has each client's seconds so far, where the transport measures them; ``num_nodes`` are
    the machines that compute the clients, where these are simulated on a cluster.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    links: Mapping[str, LinkSeconds] = field(default_factory=dict, repr=False)
    num_nodes: int | None = None

    def since(self, before: Traffic) -> Traffic:
        """Return what was sent and received after ``before``; a client's new session counts whole.

        Clients that have no session any more are not in ``links``.
        """
        links = {}
        for name, now in self.links.items():
            then = before.links.get(name, LinkSeconds())
            is_same = then.down <= now.down and then.up <= now.up
            links[name] = (
                LinkSeconds(down=now.down - then.down, up=now.up - then.up) if is_same else now
            )
        return Traffic(
            bytes_up=self.bytes_up - before.bytes_up,
            bytes_down=self.bytes_down - before.bytes_down,
            links=links,
            num_nodes=self.num_nodes,
        )


Counts = Callable[[DeviceReport], bool]


def everyone(_: DeviceReport) -> bool:
    """Return True."""
    return True


class Fleet(Protocol):
    """The clients that a run trains with."""

    @property
    def has_virtual_clock(self) -> bool:
        """Whether the clients' seconds are those of a simulator's clock."""
        ...

    @property
    def can_repeat_rounds(self) -> bool:
        """Whether the checkpoint has all that its clients know.

        The rounds after it can then be run again to the bit: it is written every few seconds.
        """
        ...

    def share_frozen(self, image: ModelImage) -> None:
        """Take the model whose frozen part is sent to clients that lack it, before ``describe``."""
        ...

    def describe(
        self, request: DescribeRequest, *, min_clients: int, counts: Counts = everyone
    ) -> ConnectedClients:
        """Wait until ``min_clients`` are connected, and return all that are, with their reports.

        ``counts`` says whether a client counts among ``min_clients``.

        A simulator may make a report only when it is looked up. If the device then turns out to be
        unable to describe itself, the lookup raises a KeyError.
        """
        ...

    def ask_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Ask clients to describe themselves again, without waiting for the answers.

        A later ``describe`` returns them. Clients that have not answered before are skipped.
        """
        ...

    def turn_seconds(self) -> float:
        """Return the server's seconds to check and add one update; 0 as long as it is unknown."""
        ...

    def train(
        self,
        plans: Mapping[str, Plan],
        image: SentModel,
        *,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Answer]:
        """Send plans and model, and yield each answer as it arrives: a ReadyReport if masked.

        The vectors of an answer are valid until the next answer is requested. With fewer
        than ``num_needed`` answers the round would be aborted, so a lost connection is awaited for
        longer.
        """
        ...

    def converse(
        self,
        phase: Phase,
        requests: Mapping[str, WireMessage],
        *,
        vector: bytes | None = None,
        reply_bytes: int = 0,
        num_needed: int = 0,
        timeout_seconds: float | None,
    ) -> Iterator[Reply | Dropout]:
        """Send the requests of one phase of a conversation, and yield each reply as it arrives.

        ``vector`` is sent with every request; ``reply_bytes`` come with every reply and are valid
        until the next reply is requested. With fewer than ``num_needed`` replies the conversation
        would end, so a lost connection is awaited for longer.
        """
        ...

    def evaluate(
        self, plans: Mapping[str, Plan], image: SentModel, *, timeout_seconds: float | None
    ) -> Iterator[EvaluateReport | Dropout]:
        """Send the model for evaluation, and yield each answer as it arrives."""
        ...

    def traffic(self) -> Traffic:
        """Return the bytes sent and received so far."""
        ...

    def simulated_state(self) -> dict[str, Any]:
        """Return the devices' own state if they live in this process; otherwise nothing."""
        ...

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Restore what ``simulated_state`` returned."""
        ...
