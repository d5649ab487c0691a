"""Nodes that answer for clients of their own: a plain server has none, and refuses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from flwr.app import Message, RecordDict

from headwater.common.errors import AggregatorRefused
from headwater.common.flower.grid import MessageKind
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, WireMessage
from headwater.common.model.layout import ModelLayout


class SentPlans:
    """A round's plans as they are sent: to clients, and to nodes that answer for some."""

    def __init__(self, direct: Mapping[str, Plan]) -> None:
        self.direct = direct
        """The plans of the nodes that are clients themselves, by name."""

    def replies_needed(self, num_needed: int) -> int:
        """Return the replies without which fewer than ``num_needed`` clients can have answered."""
        return num_needed

    def heads(
        self, *, trains: bool, layout: ModelLayout, num_needed: int, timeout_seconds: float | None
    ) -> Mapping[str, WireMessage]:
        """Return what is sent to the other nodes, by name."""
        return {}

    def kind(self, message_type: str) -> str:
        """Return the type of the messages to the other nodes."""
        return message_type

    def read_sum(self, name: str, content: RecordDict, layout: ModelLayout) -> Any:
        """Return one such node's answer to plans."""
        raise NotImplementedError

    def read_tests(self, name: str, content: RecordDict) -> Any:
        """Return one such node's answer to an evaluation."""
        raise NotImplementedError

    def of_clients(self, answers: Iterable[Any]) -> Iterator[Any]:
        """Yield the answers; such a node's, where it is for several clients, one by one."""
        yield from answers


class Intermediaries:
    """The nodes of a grid that answer for clients of their own."""

    kinds: ClassVar[Mapping[str, MessageKind]] = {}
    """The types of the messages to them."""

    def admit(self, name: str) -> None:
        """Check that a node may be one.

        Raises:
            AggregatorRefused: it may not.
        """
        raise AggregatorRefused(
            f"{name} is not among the aggregators that the server above trusts",
            remedy=f"start the server above with --trusted-aggregators {name}",
        )

    @property
    def pending(self) -> Sequence[str]:
        """The messages whose answers are awaited."""
        return ()

    def begin_round(self) -> None:
        """Ask for every list of clients again before the round is planned."""

    def follow(self, nodes: Mapping[int, str]) -> None:
        """Take those that are connected now, by node, with their names."""

    def ask(self, request: DescribeRequest) -> None:
        """Ask for the lists that are out of date."""

    def awaited(self) -> Sequence[str]:
        """Return those for whose lists the round's plan has to wait."""
        return ()

    def take(self, reply: Message) -> bool:
        """Take a list of clients; return False for any other reply."""
        return False

    def describe_again(self, requests: Mapping[str, DescribeRequest]) -> None:
        """Let them ask these clients again, with the next request for their lists."""

    def clients(self, taken: Iterable[str] = ()) -> dict[str, DeviceReport]:
        """Return the clients that they list, without those whose names are ``taken``."""
        return {}

    def divide(self, plans: Mapping[str, Plan], direct: Iterable[str]) -> SentPlans:
        """Divide a round's plans; ``direct`` are the names of the nodes themselves."""
        return SentPlans(plans)
