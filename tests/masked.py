"""Devices in secure rounds, message by message: real apps and nodes, the real server's phases."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from numpy.typing import NDArray

from headwater.client.app import app
from headwater.client.enrolment.signing_identity import read_enrolment
from headwater.client.flower.node import Node
from headwater.client.flower.request import SIMULATED
from headwater.client.flower.state_file import SAMPLER
from headwater.client.node_features import NodeAnswer
from headwater.client.trainer.run_trainer import run_trainer, trainer_of
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.flower.grid import ensure_message_id, enter_run
from headwater.common.messages import Plan, ReadyReport, UpdateReport
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg.masked_numbers import bounds_of
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.secagg.protocol import PHASES, KeysRequest, Request, SessionNumber
from headwater.common.settings.schema import Settings
from headwater.server.secagg.key_phases import open_session
from headwater.server.secagg.mask_phases import MaskPhase
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.unmask_phase import UnmaskedSum
from tests.faults import FaultPlan
from tests.plans import fields_of, without_masks

RUN = 2**61 + 3  # run ids have 62 bits
TASK = "tests/tasks.py:TwoLayers"
ACTIONS = tuple(phase.action for phase in PHASES)
START = SamplerPosition()
CLIP = 2.0**10  # far beyond what the small task comes to
KEYS = KeysRequest(run=RUN, round=1, attempt=1, mode="semi-honest")


def settings_of(**changes: Any) -> Settings:
    """Return settings; masked rounds take examples in the order of plain ones."""
    secure = {"order_seed": 0, **changes.pop("secure", {})}
    given = {"task": TASK, "check_task": False, "threads": 1, "secure": secure, **changes}
    return Settings.model_validate(given)


def trainer(task: str = TASK) -> Trainer:
    """Return the process's trainer of a task, which all its devices in the process share.

    The same task by another path has a trainer of its own, as it has in another process.
    """
    return run_trainer(settings_of(task=task))


def model() -> bytes:
    return bytes(trainer().image.buffer())


def plan(round_number: int = 1, **changes: Any) -> Plan:
    return Plan.model_validate(
        fields_of(
            {
                "round": round_number,
                "run_seed": 0,
                "model_version": round_number - 1,
                "quota": 8,
                "micro_batch_size": 4,
                "is_masked": True,
                **changes,
            }
        )
    )


@dataclass(kw_only=True)
class DeviceReply:
    """What a device sent on a message."""

    head: str
    vector: memoryview | bytes | None = field(default=None, repr=False)


class AppDevice:
    """A device in this process, as a grid of ours would run it."""

    def __init__(
        self,
        part: int,
        *,
        node_config: Mapping[str, Any] | None = None,
        app: ClientApp = app,
        **settings: Any,
    ) -> None:
        self.name = f"d{part}"
        self.app = app
        enter_run(RUN)
        self.context = Context(
            run_id=RUN,
            node_id=part + 1,
            node_config={
                "name": self.name,
                "partition-id": part,
                "num-partitions": 8,
                SIMULATED: True,
                **(node_config or {}),
            },
            state=RecordDict(),
            run_config=settings_of(**settings).to_run_config(),
        )

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        """Send a message to the device.

        Raises:
            HeadwaterError: what the device answers in its stead.
        """
        array = None if vector is None else records.flat_array(vector, dtype="uint8")
        message = Message(records.content_with_head(head, array), self.context.node_id, kind)
        ensure_message_id(message)
        reply = self.app(message, self.context)
        if reply.has_error():
            raise records.error_of_reply(reply)
        return DeviceReply(
            head=records.head_json(reply.content), vector=records.vector(reply.content)
        )

    def kept(self) -> dict[str, Any]:
        """Return what the device keeps in its context."""
        return {name: records.load_state(self.context, name) for name in sorted(self.context.state)}


class NodeDevice:
    """A device as its uplink would run it, in a process of its own: with a state file."""

    def __init__(
        self,
        part: int,
        folder: Path,
        *,
        task: str = f"./{TASK}",
        name: str | None = None,
        data: Path | None = None,
        **settings: Any,
    ) -> None:
        self.name = name or f"d{part}"
        self.path = folder / f"{self.name}-{RUN}.json"
        self.node = Node(
            app,
            trainer(task),
            Identity(name=self.name, data=data, part=part, num_parts=8),
            settings_of(task=task, **settings),
            folder,
        )
        self.node.enter(RUN)

    def answer(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> NodeAnswer:
        return self.node.answer(message_id="m", message_type=kind, head_json=head, payload=vector)

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        """Send a message to the device.

        Raises:
            HeadwaterError: what the device answers in its stead.
        """
        answer = self.answer(kind, head, vector)
        if answer.error is not None:
            raise answer.error
        return DeviceReply(head=answer.head_json, vector=answer.vector or None)

    def kept(self) -> dict[str, Any]:
        """Return what the device keeps on disk."""
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}


class FlowerDevice:
    """A device on a SuperNode: each message is answered by a process that knows nothing before.

    What goes from one to the next is Flower's context, through the form in which a SuperNode keeps
    it, and what lies in the folders that its node is configured with.
    """

    def __init__(self, part: int, folder: Path, **node_config: str | int) -> None:
        self.name = f"d{part}"
        self.folder = folder
        self.path = folder / f"{self.name}-{RUN}.json"
        enter_run(RUN)
        context = Context(
            run_id=RUN,
            node_id=part + 1,
            node_config={
                "name": self.name,
                "partition-id": part,
                "num-partitions": 8,
                "state": str(folder),
                "runtime": str(folder / "keys"),
                "order-seed": 0,
                **node_config,
            },
            state=RecordDict(),
            run_config=settings_of().to_run_config(),
        )
        self.keep(context)

    def send(self, kind: str, head: str, vector: memoryview | bytes | None = None) -> DeviceReply:
        """Send a message to the device.

        Raises:
            HeadwaterError: what the device answers in its stead.
        """
        trainer_of.cache_clear()
        read_enrolment.cache_clear()
        context = self.context
        array = None if vector is None else records.flat_array(bytes(vector), dtype="uint8")
        message = Message(records.content_with_head(head, array), context.node_id, kind)
        ensure_message_id(message)
        reply = app(message, context)
        self.keep(context)
        if reply.has_error():
            raise records.error_of_reply(reply)
        return DeviceReply(
            head=records.head_json(reply.content), vector=records.vector(reply.content)
        )

    @property
    def context(self) -> Context:
        """What the SuperNode has of it, read back."""
        message = ContextProto()
        message.ParseFromString(self.context_bytes)
        return context_from_proto(message)

    def keep(self, context: Context) -> None:
        """Put another context in its place."""
        self.context_bytes = context_to_proto(context).SerializeToString()

    @property
    def keys(self) -> list[Path]:
        """The files of keys that there are."""
        return sorted((self.folder / "keys").glob("*"))

    def kept(self) -> dict[str, Any]:
        """Return what the device keeps on disk."""
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}


class Device(Protocol):
    """Any of the devices above."""

    name: str

    def send(
        self, kind: str, head: str, vector: memoryview | bytes | None = None
    ) -> DeviceReply: ...

    def kept(self) -> dict[str, Any]: ...


def plain_sum(
    part: int, round_plan: Plan, *, place: SamplerPosition = START
) -> tuple[NDArray[np.float64], UpdateReport]:
    """Return what a device without masks would send: whole numbers, which no sum rounds.

    It ends what the device of this part holds in this process.
    """
    device = AppDevice(part)
    records.save_state(device.context, SAMPLER, SamplerState(place=place))
    sent = train(device, without_masks(round_plan))
    assert sent.vector is not None
    values = np.frombuffer(sent.vector, np.float32).astype(np.float64)
    return values, records.parse(sent.head, UpdateReport)


def train(device: Device, round_plan: Plan, image: bytes | None = None) -> DeviceReply:
    """Send a plan with the model."""
    return device.send("train", round_plan.model_dump_json(), memoryview(image or model()))


def ready(device: Device, round_plan: Plan) -> ReadyReport:
    """Send a masked plan."""
    sent = train(device, round_plan)
    assert sent.vector is None
    return records.parse(sent.head, ReadyReport)


def ask(device: Device, request: Request, beside: bytes | None = None) -> DeviceReply:
    """Send a phase's message."""
    action = next(phase.action for phase in PHASES if phase.request is type(request))
    return device.send(f"query.{action}", request.model_dump_json(exclude_none=True), beside)


@dataclass(kw_only=True)
class Played:
    """How a session went: what was opened, who refused what, and which heads devices sent."""

    opened: UnmaskedSum | None = None
    refused: dict[str, HeadwaterError] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)

    @property
    def sum(self) -> UnmaskedSum:
        assert self.opened is not None, self.refused
        return self.opened


def play(
    devices: Iterable[Device],
    setup: SessionSetup,
    faults: FaultPlan | None = None,
    *,
    bounds: bytes | None = None,
    until: str | None = None,
) -> Played:
    """Run a session to its end, or through the phase ``until``; devices vanish as the plan says.

    Raises:
        RoundAborted: it was aborted.
    """
    here = {device.name: device for device in devices}
    gone = {drop.client: drop.after for drop in (faults or FaultPlan()).drops}
    played, action = Played(), ""
    state: Any = open_session(setup)
    while not isinstance(state, UnmaskedSum):
        for name, request in state.requests().items():
            phase = next(phase for phase in PHASES if phase.request is type(request))
            action = phase.action
            if name in gone and is_after(action, gone[name]):
                continue
            beside = bounds if action == "masked_update" else None
            try:
                sent = ask(here[name], request, beside)
            except HeadwaterError as error:
                played.refused[name] = error
                continue
            played.heads.append(sent.head)
            reply: Any = records.parse(sent.head, phase.reply)
            if isinstance(state, MaskPhase):
                state = state.take(name, reply, sent.vector)
            else:
                state = state.take(name, reply)
        if action == until:
            return played
        state = state.close()
    played.opened = state
    return played


def is_after(action: str, last: str | None) -> bool:
    """Whether a phase comes after the last that a device answers; None: it answers none."""
    return last is None or ACTIONS.index(action) > ACTIONS.index(last)


def opening_of(
    devices: Iterable[Device],
    round_plan: Plan,
    *,
    mode: Any = "semi-honest",
    attempt: int = 1,
    task: str | None = None,
    **more: Any,
) -> SessionSetup:
    """Return what the server chooses for a session of these devices."""
    image: ModelImage = trainer().image
    return SessionSetup(
        **{
            "run": RUN,
            "number": SessionNumber(round_plan.round, attempt),
            "mode": mode,
            "model_digest": hashlib.sha256(model()).digest(),
            "plan_digest": plan_digest(round_plan, task or trainer().task_code),
            "num_values": image.layout.num_parameters,
            "planned_weights": {d.name: round_plan.weigh_as or round_plan.quota for d in devices},
            "clip": CLIP,
            "bounds": bounds_of((), largest_weight=round_plan.quota, max_examples=round_plan.quota),
            **more,
        }
    )


def sum_of(opened: UnmaskedSum) -> NDArray[np.float64]:
    """Return the opened 32-bit sum as the ring has it, without an error of its own."""
    chosen = opened.session.parameters.encoding
    return opened.vector_P.view(np.int32).astype(np.float64) * 2.0**-chosen.scale_bits
