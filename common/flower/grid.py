"""The Flower Grid that our transports share, and the only file that uses Flower's private parts.

Our grids pass arrays as views and yield replies one by one, so that the server holds one update at
a time. Flower builds a ``Message`` only inside a run: the process-wide ``TaskIdentity`` must be
set, and every message needs an id. ``tests/common/flower/test_grid.py`` names each private part.
"""

# ruff: noqa: E402
# Flower is imported after its variables are set, and after the check that it has these parts.

from __future__ import annotations

import importlib
import inspect
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

# Set before flwr is imported, so that flwr sends no telemetry and checks for no update.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

from headwater.common.errors import HeadwaterError, UnsupportedFlower
from headwater.common.messages import DescribeRequest
from headwater.common.model.parameters import ModelImage

if TYPE_CHECKING:
    from headwater.common.flower.sent_model import FindDifference

PRIVATE_PARTS = (
    ("flwr.common.constant", "ErrorCode.UNKNOWN"),
    ("flwr.supercore.run", "Run.create_empty"),
    ("flwr.supercore.task_identity", "TaskIdentity.run_id"),
)
"""What no document of Flower's promises, by module and name; each is looked for at the import."""
OF_RAY = (
    ("flwr.simulation.run_simulation", "_run_simulation"),
    ("flwr.supercore.telemetry", "EventType.PYTHON_API_RUN_SIMULATION_LEAVE"),
)
"""The same for ``simulate_on_ray``: to import these takes a second."""


def check_flower(parts: Iterable[tuple[str, str]] = PRIVATE_PARTS) -> None:
    """Check that the installed Flower has the private parts that this project uses.

    Raises:
        UnsupportedFlower: it has not; names the first one that is missing.
    """
    for module, path in parts:
        try:
            found: Any = importlib.import_module(module)
            for name in path.split("."):
                found = inspect.getattr_static(found, name)  # a property may need a run
        except (ImportError, AttributeError) as error:
            raise UnsupportedFlower(
                f"flwr {version('flwr')} has no {module}.{path}, which headwater uses: {error}"
            ) from error


check_flower()

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run as Run
from flwr.supercore.task_identity import TaskIdentity

SERVER_NODE_ID = 1
CLIENT_APP_FAILED = ErrorCode.UNKNOWN
"""The code of a reply that Flower makes when a ClientApp raises an exception."""


OTHER_HEAD_BYTES = 256 << 10
"""The most bytes of the heads of most replies: a member's shares of 255 others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageKind:
    """What a grid must know of the messages of a type."""

    has_model: bool = False
    """Whether they carry the model, which is sent to each node once per round."""
    reply_bytes: Callable[[Message, int], tuple[int, int]] | None = None
    """The bytes of a reply's vector, of a model with so many parameters, and the most of its head;
    None: as was expected, and as of most messages."""
    is_length_exact: bool = True
    """Whether a reply's vector has those bytes, rather than at most so many."""


class HeadwaterGrid(Grid):
    """The base of the in-process grid and the gRPC grid."""

    awaits_more = False
    """Whether further nodes may connect on their own."""
    has_virtual_clock = False
    """Whether the devices' seconds are those of a simulator's clock."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while ``send_and_receive`` waits for replies, on its thread."""
        self.check_term: Callable[[], None] = lambda: None
        """Called like ``while_waiting``: raises an error if this server may no longer serve."""

    def set_run(self, run: Run) -> None:
        """Enter a run, which makes it possible to build messages."""
        self._run = run
        enter_run(run.run_id)

    def enter_run(self, run_id: int) -> None:
        """Enter the run with this id."""
        self.set_run(Run.create_empty(run_id))

    @property
    def run(self) -> Run:
        """The run that was entered."""
        if self._run is None:
            raise RuntimeError("the grid has no run: call enter_run first")
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message. Flower's own code constructs ``Message`` directly."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def pull_messages(  # type: ignore[override] # the first parameter has two names
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> Iterable[Message]:
        """Yield the replies to these messages that have arrived, without waiting.

        ``message_ids`` is the parameter's name up to Flower 1.42.
        """
        wanted = message_ids if reply_to_message_ids is None else reply_to_message_ids
        if wanted is None:
            raise TypeError("name the messages whose replies are pulled")
        return self.replies_to(wanted)

    @abstractmethod
    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to these messages that have arrived."""

    @abstractmethod
    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes uploaded and downloaded so far."""

    def link_seconds(self) -> Mapping[str, tuple[float, float]]:
        """Return each node's seconds of transfers so far, down and up, by name, if measured."""
        return {}

    def may_begin(self) -> bool:
        """Return whether the server's operator allows the next round to begin.

        An exception from it ends the run after its last round.
        """
        return True

    def turn_seconds(self) -> float:
        """Return the server's seconds per update in a round; 0 if they are not measured."""
        return 0.0

    def learn(self, kinds: Mapping[str, MessageKind]) -> None:
        """Learn of further types of messages."""

    def expect(self, request: DescribeRequest) -> None:
        """Set the description that devices must match, before any is admitted."""

    def share_frozen(self, image: ModelImage) -> None:
        """Take the model with the frozen part, for devices in this process."""

    def offer_differences(self, difference_from: FindDifference | None) -> None:
        """Take what finds the difference that a device needs of the next model; None: all of it."""

    def expect_vector(self, message_type: str, num_bytes: int) -> None:
        """Set the vector's bytes in each reply to messages of a type."""

    def expect_replies(self, num_needed: int, *, is_brief: bool = False) -> None:
        """Set the number of replies to ``send_and_receive`` below which a round would be aborted.

        Until then, a grid over a network waits longer for nodes that lost their connection. A
        ``is_brief`` exchange waits, from then on, a few times as long as most nodes took.
        """

    def name_of(self, node_id: int) -> str | None:
        """Return the name that a node proved or claimed when it connected; None if unknown."""
        return None

    def refuse(self, node_id: int, error: HeadwaterError) -> None:
        """Refuse a node for the rest of the run."""

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        """Send messages whose replies ``next_reply`` returns; return the messages' ids."""
        raise NotImplementedError("this grid has no asynchronous rounds")

    def hold_back(self, nodes: Collection[int]) -> None:
        """Let the replies of these nodes to dispatched messages wait, from the next call on."""
        raise NotImplementedError("this grid has one plan of a node at a time")

    def next_reply(self, *, timeout: float) -> Message | None:
        """Return the next reply to a dispatched message, or to one that was pushed.

        None if none arrives within the timeout. Its arrays are valid until the next call.
        """
        raise NotImplementedError("this grid has no asynchronous rounds")

    def virtual_now(self) -> float | None:
        """Return the simulator's clock of asynchronous rounds in seconds; None if it is real."""
        return None

    def end_exchange(self, message_ids: Iterable[str]) -> None:
        """Await no replies to these messages any more: one that arrives later is dropped."""

    @abstractmethod
    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages and yield the replies one by one, as they arrive.

        The arrays of a reply are valid until the next reply is requested.
        """


def enter_run(run_id: int) -> None:
    """Set the run of this process, which makes it possible to build messages."""
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID


def ensure_message_id(message: Message) -> str:
    """Return the message's id; set a new one if it has none, as Flower's SuperLink does."""
    message_id = message.metadata.message_id or str(uuid4())
    message.metadata.__dict__["_message_id"] = message_id
    assert message.metadata.message_id == message_id, "flwr keeps a message's id elsewhere"
    return message_id


def simulate_on_ray(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    num_clients: int,
    app_folder: Path,
    client_resources: dict[str, Any],
) -> None:
    """Run the apps on Flower's Ray engine until the ServerApp has returned or failed.

    The clients' run_config is that of the pyproject.toml in ``app_folder``; Flower's public
    ``run_simulation`` has no parameter for it.
    """
    check_flower(OF_RAY)
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.telemetry import EventType

    _run_simulation(
        num_supernodes=num_clients,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        server_app=server_app,
        client_app=client_app,
        app_dir=str(app_folder),
        is_app=True,
        backend_config={"client_resources": client_resources},
    )
