"""The device as a Flower ClientApp: describe, train, evaluate, and a secure session's phases.

The same app runs in the simulator, behind our own gRPC stream, in Flower's Ray simulation and on
SuperNodes. Flower's types stop here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.device import Hardware
from client.enrolment import Enrolment, host_name, read_enrolment, simulated_enrolment
from client.held_updates import HeldUpdate
from client.kept import PACE, SECURE, WALK, pace_of, record_of, walk_of
from client.link import link_in
from client.micro_batches import Walk
from client.resident import HardwareOf, Identity, Resident, resident_of, this_machine
from client.secure_device import Record
from client.secure_work import check_masked, device_of, discreet, ready_of, trained_of
from client.spool import Spool
from common import pace, records
from common.errors import CorruptUpdate, EmptyUpdate, HeadwaterError, SettingsError
from common.line import Line
from common.secagg import PHASES, Phase
from common.settings import Settings, from_run_config
from common.update import DescribeRequest, DeviceReport, Plan, Update, UpdateReport

log = logging.getLogger(__name__)

# The mark in a node's configuration that its messages never leave this process.
IN_PROCESS = "in-process"

# In a node's configuration: the folder in which a half-summed update outlives a power cut.
SPOOL = "spool"

# Likewise: the files of its identity, and of the identities that it trusts.
IDENTITY, ALLOW_LIST = "identity", "allow-list"

Report = TypeVar("Report", DeviceReport, UpdateReport)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A message, and the device that it is for."""

    message: Message
    context: Context
    settings: Settings
    resident: Resident
    identity: Identity
    hardware_of: HardwareOf

    @property
    def hardware(self) -> Hardware:
        """The machine under the device, real or simulated."""
        return self.hardware_of(self.identity, self.settings, self.resident.image.layout)

    @property
    def walk(self) -> Walk:
        """The device's walk through its examples."""
        return walk_of(records.kept(self.context, WALK))

    @property
    def pace(self) -> Line | None:
        """The seconds of a micro-batch, as told and followed; None if they were not asked."""
        return pace_of(records.kept(self.context, PACE))


def client_app(hardware_of: HardwareOf) -> ClientApp:
    """Return a ClientApp whose devices run on the given hardware, real or simulated."""
    app = ClientApp()

    def answering(answer: Callable[[Asked], RecordDict]) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            try:
                content = answer(_asked(message, context, hardware_of))
            except Exception as error:
                if not isinstance(error, HeadwaterError):
                    log.exception("the task or the device failed")
                elif error.is_private:
                    log.warning("%s: %s", error.code, error)
                stays_here = IN_PROCESS in context.node_config
                return Message(records.refusal(error, stays_here=stays_here), reply_to=message)
            return Message(content, reply_to=message)

        return reply

    app.query("describe")(answering(_describe))
    app.train()(answering(_train))
    app.evaluate()(answering(_evaluate))
    for phase in PHASES:
        app.query(phase.action)(answering(partial(_in_phase, phase)))
    return app


def _asked(message: Message, context: Context, hardware_of: HardwareOf) -> Asked:
    settings = from_run_config(context.run_config)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    resident = resident_of(
        settings.task,
        replace_batch_norm=settings.model.replace_batch_norm,
        check_task=settings.check_task,
    )
    return Asked(
        message=message,
        context=context,
        settings=settings,
        resident=resident,
        identity=_identity(context),
        hardware_of=hardware_of,
    )


def _identity(context: Context) -> Identity:
    node = records.node_identity(context.node_config)
    name = node["name"] or (str(node["part"]) if node["is_partition"] else host_name())
    return Identity(name=name, data=node["data"], part=node["part"], num_parts=node["num_parts"])


# What is answered.


def _describe(asked: Asked) -> RecordDict:
    request = records.read(asked.message.content, DescribeRequest)
    if request.left_out is not None:
        log.info("%s has no part in this round: %s", asked.identity.name, request.left_out)
    report = asked.resident.describe(asked.identity, asked.hardware, request)
    told = pace.told(report)
    # As the server does: the pace at which it was seen to work counts, unless it was too slow.
    if told is not None and (asked.pace is None or request.left_out is not None):
        records.keep(asked.context, PACE, told)
    return records.content_of(_with_link(report, asked.context))


def _train(asked: Asked) -> RecordDict:
    context, resident, identity = asked.context, asked.resident, asked.identity
    plan = records.read(asked.message.content, Plan)
    resident.held.begin(run_id=context.run_id, round_number=plan.round, name=identity.name)
    check_masked(
        asked.settings.secure, is_masked=plan.is_masked, name=identity.name, what="an update"
    )
    _load(asked, plan)
    spool = spool_of(context, identity.name)
    with discreet(plan, identity.name):
        try:
            update, walk = resident.train(identity, asked.hardware, plan, asked.walk, spool=spool)
        except EmptyUpdate:
            records.keep(context, WALK, resident.skip(identity, plan, asked.walk))
            raise
        records.keep(context, WALK, walk)
        update = dataclasses.replace(update, report=_with_link(update.report, context))
        if plan.is_masked:
            _hold(asked, plan, update)
            return records.content_of(ready_of(update.report, asked.pace))
    return records.update_content(update, as_view=records.is_view(asked.message.content))


def _hold(asked: Asked, plan: Plan, update: Update) -> None:
    """Keep an update in this process for a secure session, and follow the device's own pace."""
    context, resident, identity = asked.context, asked.resident, asked.identity
    if asked.pace is not None:
        records.keep(context, PACE, pace.followed(asked.pace, update.report.steps))
    examples, _ = resident.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
    device = device_of(
        plan,
        asked.walk,
        name=identity.name,
        run_id=context.run_id,
        task=resident.task,
        image=resident.image,
        chosen=asked.settings.secure,
        enrolment=enrolment_of(context, identity.name),
    )
    trained = trained_of(
        update, plan, device, num_owned=len(examples), norm=resident.accumulator.gradient_norm()
    )
    resident.held.hold(
        HeldUpdate(
            device,
            record_of(records.kept(context, SECURE)),
            trained,
            num_threads=torch.get_num_threads(),
            is_view=records.is_view(asked.message.content),
        )
    )


def _in_phase(phase: Phase, asked: Asked) -> RecordDict:
    content, context = asked.message.content, asked.context
    held = asked.resident.held.of(context.run_id, asked.identity.name)

    def remember(record: Record) -> None:
        records.keep(context, SECURE, record)
        if record.masked == held.device.update_id:  # its examples are spent, whatever comes
            records.keep(context, WALK, asked.walk.passed())

    reply, vector = held.answer(
        records.read(content, phase.request), bounds=records.vector(content), remember=remember
    )
    if vector is None:
        return records.content_of(reply)
    memory = vector.data.cast("B")
    array = records.flat_array(memory if held.is_view else bytes(memory), dtype=str(vector.dtype))
    return records.content_of(reply, array)


def _evaluate(asked: Asked) -> RecordDict:
    plan = records.read(asked.message.content, Plan)
    check_masked(
        asked.settings.secure,
        is_masked=False,
        name=asked.identity.name,
        what="the loss on what it holds out",
    )
    _load(asked, plan)
    return records.content_of(asked.resident.evaluate(asked.identity, plan))


def _load(asked: Asked, plan: Plan) -> None:
    """Take over the model that came with a plan."""
    image = records.vector(asked.message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: a plan without a model")
    asked.resident.load_model(asked.context.run_id, plan.model_version, image)


# What the node knows.


def _with_link(report: Report, context: Context) -> Report:
    """Add what the node saw of its link; Flower's own engines tell nothing of theirs."""
    link = link_in(context.node_config)
    seen = {name: rate for name, rate in dataclasses.asdict(link).items() if rate is not None}
    return report.model_copy(update={"vitals": report.vitals.model_copy(update=seen)})


def spool_of(context: Context, name: str) -> Spool | None:
    """Return the device's spool, if its node is configured with a folder for one.

    The folder is the machine's own and no setting of the run, so that no simulated device has it.
    """
    folder = context.node_config.get(SPOOL)
    return None if folder is None else Spool(Path(str(folder)), name=name, run_id=context.run_id)


def enrolment_of(context: Context, name: str) -> Enrolment:
    """Return the device's identity and allow-list, with whose files its node is configured.

    They are the machine's own, as the spool is.

    Raises:
        IdentityProblem: a file is not what it should be.
    """
    if IN_PROCESS in context.node_config:
        return simulated_enrolment(name)
    identity, allow_list = (context.node_config.get(key) for key in (IDENTITY, ALLOW_LIST))
    return read_enrolment(
        name,
        identity=None if identity is None else Path(str(identity)),
        allow_list=None if allow_list is None else Path(str(allow_list)),
    )


app = client_app(this_machine)
