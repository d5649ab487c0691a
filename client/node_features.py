"""The features of a device beside its rounds: the moments at which they act, and the list of them.

A feature is imported when the owner's settings, or what this process has done, ask for it.
This file imports no room of the client, so that each may import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.user_code.named_objects import part_of

if TYPE_CHECKING:
    from headwater.common.compression.model_difference import DifferenceReader


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswer:
    """The answer to one instruction: a head and a vector, or the error that replaces them."""

    message_id: str
    head_json: str = ""
    vector: memoryview | bytes = field(default=b"", repr=False)
    error: HeadwaterError | None = None


class DeviceNode(Protocol):
    """What a feature may know of a device's ``Node``, and ask of it."""

    name: str
    settings: Settings
    state_folder: Path
    trainer: Any

    @property
    def run_id(self) -> int:
        """The run that the node has joined."""

    @property
    def answer(self) -> Callable[..., NodeAnswer]:
        """Run the device's app on a message, which is the node's own if ``is_own``."""


class NodeFeature:
    """The moments of a node; a feature overrides those that it needs."""

    def __init__(self, node: DeviceNode) -> None:
        self.node = node

    @property
    def is_waiting(self) -> bool:
        """Whether the server may still ask for something of the last update."""
        return False

    def no_link(self, plan_json: str, answer: NodeAnswer) -> Iterator[NodeAnswer] | None:
        """Return the answers that may replace one, while no link can carry it; None: it waits."""
        return None

    def delivered(self) -> None:
        """Note that the server has completely received the update."""

    def left(self) -> None:
        """Erase what a run that the node leaves has in memory."""


# In the order in which they act: what turns each on, and its class.
FEATURES: Mapping[str, tuple[Callable[[Settings], bool], str]] = {
    "secagg": (
        lambda settings: "headwater.client.secagg.session" in sys.modules,
        "headwater.client.secagg.pending:WaitingUpdate",
    ),
    "statistics": (
        lambda settings: "headwater.common.statistics.columns" in sys.modules,
        "headwater.client.statistics.given_statistics:GivenStatistics",
    ),
    "evaluation": (
        lambda settings: "headwater.client.evaluation.other_model" in sys.modules,
        "headwater.client.evaluation.other_model:KeptModel",
    ),
    "offline": (
        lambda settings: settings.asynchronous.offline_windows > 1,
        "headwater.client.offline.offline_node:OfflineNode",
    ),
}
TIME_SHARE = "headwater.client.energy.time_share:time_share"


def node_features(node: DeviceNode) -> Iterator[NodeFeature]:
    """Yield the features of a node that are on."""
    for is_on, name in FEATURES.values():
        if is_on(node.settings):
            yield part_of(name)(node)


def difference_reader(method: str, num_bytes: int, memory: memoryview) -> DifferenceReader:
    """Return the reader that adds a difference of so many bytes to the model in memory.

    Raises:
        ProtocolMismatch: there is no such method, or the length is not that of a difference.
    """
    from headwater.common.compression.model_difference import DifferenceReader, checked_method

    return DifferenceReader(memory, checked_method(method, num_bytes, len(memory) // 4))


def time_share_rule() -> Any:
    """Return the function that gives the share of its time that a device trains."""
    return part_of(TIME_SHARE)
