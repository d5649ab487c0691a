"""A Flower Grid without sockets: messages are delivered one after another in this process.

A reply is computed when it is read, so a thousand clients need the memory of one. Each node keeps a
Context of its own, as under Flower. Any ClientApp can run on it, under any Flower strategy.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.flower.request import SIMULATED
from headwater.client.flower.state_file import STATE
from headwater.client.trainer.loaded_model import FirstModel
from headwater.client.trainer.run_trainer import run_trainer
from headwater.common.errors import SettingsError
from headwater.common.flower import records
from headwater.common.flower.grid import HeadwaterGrid, ensure_message_id
from headwater.common.flower.sent_model import FindDifference
from headwater.common.messages import ReadyReport
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.common.transport.limits import wire_bytes
from headwater.server.flower.registration import DESCRIBE
from headwater.server.transport.device_records import Stages
from headwater.simulation.engines.device_app import TrainAttempt, falsified_reply, vanished_reply
from headwater.simulation.engines.held_models import HeldModels
from headwater.simulation.fleet.devices import (
    DESCRIBED,
    FIRST_DESCRIBED,
    FIRST_NODE_ID,
    FLEET_STATE,
    LOCAL_FOLDER,
    MAX_LOOKS,
    by_round,
    described_in,
)
from headwater.simulation.fleet.faults import STAGES, TRAIN, absent_seconds
from headwater.simulation.fleet.fleet_spec import FleetSpec, fleet_spec, with_fleet
from headwater.simulation.fleet.identities import identities_of
from headwater.simulation.fleet.random_events import at_round, is_connected
from headwater.simulation.reports.data_survey import report_left_out


class ConnectedDevices:
    """Draws which devices are connected when a round's cohort is selected."""

    def __init__(self, fleet: FleetSpec, *, min_clients: int) -> None:
        self.last_round = 0
        """The last round whose plans were sent."""
        self._described: dict[int, int] = {}
        """The round in which each connected device described itself last."""
        self._restored: set[int] = set()
        """Those of them that have not described themselves since ``restore``."""
        self._fleet = fleet
        self._min_clients = min_clients
        self._num_looks = 0

    def begin_round(self, number: int) -> None:
        """Record that the plans of a round were sent: the next look belongs to another round."""
        self.last_round, self._num_looks = number, 0

    def describing(self, part: int) -> int:
        """Return the round in which a device describes itself; the first time as it did before."""
        if part in self._restored:
            self._restored.discard(part)
        else:
            self._described[part] = self.last_round + 1
        return self._described[part]

    def state(self, described: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Return the last round, and when the devices described themselves, for a checkpoint."""
        found = self._described if described is None else described
        return {"last_round": self.last_round, DESCRIBED: by_round(found)}

    def restore(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Restore what ``state`` returned; return when the devices described themselves."""
        self.begin_round(state["last_round"])
        first = state.get(FIRST_DESCRIBED, 0)
        all_at_once = dict.fromkeys(range(self._fleet.num_devices if first else 0), first)
        self._described = all_at_once | described_in(state)
        self._restored = set(self._described)
        return self._described

    def look(self) -> Sequence[int]:
        """Return the devices that are connected for the round after the last one, a new draw.

        Raises:
            SettingsError: MAX_LOOKS looks for the same round did not find enough devices.
        """
        parts = range(self._fleet.num_devices)
        if self._fleet.fleet_file is None:
            return parts
        number = self.last_round + 1
        look, self._num_looks = self._num_looks, self._num_looks + 1
        if look == MAX_LOOKS:
            raise SettingsError(
                f"round {number}: {look:,} looks at the fleet found too few clients "
                f"at once, at least {self._min_clients} are needed",
                remedy="lower --min-clients, or raise availability in the fleet's file",
            )
        found = [
            part
            for part in parts
            if is_connected(self._fleet, part, round_number=number, look=look)
        ]
        # A device that is away describes itself anew when it is back.
        for part in self._described.keys() - set(found):
            del self._described[part]
            self._restored.discard(part)
        return found


class InProcessGrid(HeadwaterGrid):
    """N nodes that run one ClientApp in this process."""

    has_virtual_clock = True

    def __init__(self, app: ClientApp, settings: Settings, *, stages: Stages | None = None) -> None:
        """Create the nodes of a run; the grid keeps in ``stages`` where devices are with plans.

        Raises:
            SettingsError: see ``with_fleet``.
        """
        super().__init__()
        settings = with_fleet(settings)
        self._app = app
        self._settings = settings
        self._fleet = fleet_spec(settings)
        self._identities = identities_of(settings)
        self._run_config = settings.to_run_config()
        self._contexts: dict[int, Context] = {}
        self._waiting: dict[str, Message] = {}
        self._bytes_up = 0
        self._bytes_down = 0
        self._difference_from: FindDifference | None = None
        self._image_id = ""
        """The digest of the model that goes out."""
        self._stages: Stages = {} if stages is None else stages
        self._devices = ConnectedDevices(self._fleet, min_clients=settings.num_clients_needed)
        self._connected: Collection[int] = range(self._fleet.num_devices)
        self._attempts: defaultdict[int, TrainAttempt] = defaultdict(TrainAttempt)
        self._now_seconds = 0.0
        """The virtual time of asynchronous rounds: that of the last reply to a dispatched plan."""
        self._under_way: list[tuple[float, int, Message]] = []
        """Replies to dispatched plans, a heap by their virtual time and the order of the plans."""
        self._num_dispatched = 0

    @cached_property
    def _held(self) -> HeldModels:
        return HeldModels(run_trainer(self._settings).loaded_model.built_id)

    @cached_property
    def _first(self) -> FirstModel:
        return FirstModel(run_trainer(self._settings).loaded_model.built_id)

    def name_of(self, node_id: int) -> str | None:
        return self._identities.name(node_id - FIRST_NODE_ID)

    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes that the messages would have taken on the wire, up and down."""
        return self._bytes_up, self._bytes_down

    def report_left_out(self) -> None:
        """Log which devices have examples that cannot be trained on, if the task is checked."""
        if self._settings.check_task:
            report_left_out(run_trainer(self._settings), self._identities)

    def share_frozen(self, image: ModelImage) -> None:
        if image.layout.num_frozen_bytes:
            run_trainer(self._settings).loaded_model.share_frozen(image)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected for the round after the last one.

        Raises:
            SettingsError: see ``ConnectedDevices.look``.
        """
        connected = self._devices.look()
        self._connected = frozenset(connected)
        return [FIRST_NODE_ID + part for part in connected]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        pushed = {ensure_message_id(message): message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def replies_to(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to messages that were pushed.

        A device that is not connected describes itself once it is connected again.
        """
        for message_id in list(message_ids):
            if self._is_reachable(self._waiting[message_id]):
                yield self._deliver(self._waiting.pop(message_id))

    def _is_reachable(self, message: Message) -> bool:
        part = message.metadata.dst_node_id - FIRST_NODE_ID
        return message.metadata.message_type != DESCRIBE or part in self._connected

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Deliver the messages in order; ``timeout`` is in seconds of the virtual clock."""
        for message in messages:
            ensure_message_id(message)
            name = self.name_of(message.metadata.dst_node_id) or ""
            if message.metadata.message_type == TRAIN:
                self._stages[name] = "computing"
            reply = self._deliver(message)
            if _has_vector(reply):
                self._stages[name] = "uploading"
            yield reply
            self._stages.pop(name, None)

    def dispatch(self, messages: Iterable[Message]) -> list[str]:
        """See ``HeadwaterGrid``; a device trains at once, and its reply arrives when it is due.

        So its update is of the model that the message has. Only masked plans are dispatched here:
        the update itself stays with the device.
        """
        ids = []
        for message in messages:
            ids.append(ensure_message_id(message))
            reply = self._deliver(message)
            due = self._now_seconds + self._seconds_of(message, reply)
            heapq.heappush(self._under_way, (due, self._num_dispatched, reply))
            self._num_dispatched += 1
        return ids

    def next_reply(self, *, timeout: float) -> Message | None:
        if not self._under_way:
            return None
        self._now_seconds, _, reply = heapq.heappop(self._under_way)
        return reply

    def virtual_now(self) -> float:
        return self._now_seconds

    def _seconds_of(self, message: Message, reply: Message) -> float:
        """Return the virtual seconds from a plan to its answer; a dropout is known at once."""
        if not reply.has_content():
            return 0.0
        part = message.metadata.dst_node_id - FIRST_NODE_ID
        moment = self._fleet.moment(part, round_number=self._devices.last_round)
        seconds = records.read(reply.content, ReadyReport).seconds or 0.0
        return seconds + absent_seconds(self._fleet.faults, moment)

    def _deliver(self, message: Message) -> Message:
        node_id, kind = message.metadata.dst_node_id, message.metadata.message_type
        part, context = node_id - FIRST_NODE_ID, self._context(node_id)
        is_training = kind.startswith("train")
        if is_training:
            self._devices.begin_round(_round_of(message))
            self._attempts[node_id] = self._attempts[node_id].invited(self._devices.last_round)
        self._bytes_down += self._bytes_to(self.name_of(node_id) or "", message)
        if kind in STAGES and self._attempts[node_id].has_vanished(self._fleet, part, kind):
            return vanished_reply(self._identities.name(part), message)
        number = self._devices.last_round if is_training else self._devices.last_round + 1
        if kind == DESCRIBE:
            number = self._devices.describing(part)
        with at_round(number):
            reply = self._app(message, context)
        if is_training:
            reply = falsified_reply(
                message, reply, self._settings, part, run_id=self.run.run_id, number=number
            )
        if reply.has_content():
            self._bytes_up += _num_bytes(reply.content)
        return reply

    def offer_differences(self, difference_from: FindDifference | None) -> None:
        if self._settings.compression.down != "off":
            self._difference_from, self._image_id = difference_from, ""

    def _bytes_to(self, name: str, message: Message) -> int:
        """Return a message's bytes on the wire, where a model may go as a difference."""
        num_bytes, model = _num_bytes(message.content), records.vector(message.content)
        difference_from, kind = self._difference_from, message.metadata.message_type
        if model is None or kind != TRAIN:
            return num_bytes
        if difference_from is None:
            return num_bytes - len(model) + self._first.num_bytes(model)
        self._image_id = self._image_id or hashlib.sha256(model).hexdigest()
        sent = self._held.sent_to(name, self._image_id, len(model), difference_from)
        return num_bytes - len(model) + sent

    def _context(self, node_id: int) -> Context:
        if node_id not in self._contexts:
            part, out = node_id - FIRST_NODE_ID, self._settings.out
            own_files = {} if out is None else {STATE: str(out / LOCAL_FOLDER)}
            self._contexts[node_id] = Context(
                run_id=self.run.run_id,
                node_id=node_id,
                node_config={
                    **self._identities.node_config(part),
                    **own_files,
                    SIMULATED: True,
                },
                state=RecordDict(),
                run_config=self._run_config,
            )
        return self._contexts[node_id]

    def simulated_state(self) -> dict[str, Any]:
        """Return the state in each node's context, and the last round, for the checkpoint."""
        state: dict[str, Any] = {
            str(node_id): {name: records.load_state(context, name) for name in context.state}
            for node_id, context in self._contexts.items()
        }
        return state | {FLEET_STATE: self._devices.state()}

    def restore_simulated(self, state: Mapping[str, Any]) -> None:
        """Restore what ``simulated_state`` returned."""
        for key, node_state in state.items():
            if key == FLEET_STATE:
                self._devices.restore(node_state)
                continue
            context = self._context(int(key))
            for name, value in node_state.items():
                records.save_state(context, name, value)


def _round_of(message: Message) -> int:
    """Return a plan's round: Headwater sends it as the group id, Flower's strategies inside."""
    if message.metadata.group_id.isdecimal():
        return int(message.metadata.group_id)
    numbers = [record.get("server-round") for record in message.content.config_records.values()]
    return next((number for number in numbers if isinstance(number, int)), 1)


def _has_vector(reply: Message) -> bool:
    has_head = reply.has_content() and records.HEAD in reply.content
    return has_head and records.vector(reply.content) is not None


def _num_bytes(content: RecordDict) -> int:
    """Return a message's bytes on the wire; only those of its arrays, if it is not Headwater's."""
    if records.HEAD in content:
        return wire_bytes(len(records.head_json(content)), len(records.vector(content) or b""))
    return sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
