"""The device as a Flower ClientApp: three messages in, three answers out.

The same app runs in the simulator, behind our own gRPC stream, in Flower's Ray simulation and on
SuperNodes. Flower's types stop here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.link import link_in
from client.micro_batches import Place, Walk
from client.resident import HardwareOf, Identity, Resident, host_name, resident_of, this_machine
from client.spool import Spool
from common import records
from common.errors import CorruptUpdate, EmptyUpdate, HeadwaterError, SettingsError
from common.settings import Settings, from_run_config
from common.update import DescribeRequest, DeviceReport, Plan, UpdateReport

log = logging.getLogger(__name__)

WALK = "walk"

# The mark in a node's configuration that its messages never leave this process.
IN_PROCESS = "in-process"

# In a node's configuration: the folder in which a half-summed update outlives a power cut.
SPOOL = "spool"

Report = TypeVar("Report", DeviceReport, UpdateReport)


def client_app(hardware_of: HardwareOf) -> ClientApp:
    """Return a ClientApp whose devices run on the given hardware, real or simulated."""
    app = ClientApp()

    def answering(
        answer: Callable[[Message, Context, Resident, Identity, Settings], RecordDict],
    ) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            try:
                settings = from_run_config(context.run_config)
                if settings.threads is not None:
                    torch.set_num_threads(settings.threads)
                content = answer(
                    message, context, _resident(settings), _identity(context), settings
                )
            except Exception as error:
                if not isinstance(error, HeadwaterError):
                    log.exception("the task or the device failed")
                elif error.is_private:
                    log.warning("%s: %s", error.code, error)
                stays_here = IN_PROCESS in context.node_config
                return Message(records.refusal(error, stays_here=stays_here), reply_to=message)
            return Message(content, reply_to=message)

        return reply

    def describe(
        message: Message,
        context: Context,
        resident: Resident,
        identity: Identity,
        settings: Settings,
    ) -> RecordDict:
        request = records.read(message.content, DescribeRequest)
        if request.left_out is not None:
            log.info("%s has no part in this round: %s", identity.name, request.left_out)
        hardware = hardware_of(identity, settings, resident.image.layout)
        report = resident.describe(identity, hardware, request)
        return records.content_of(_with_link(report, context))

    def train(
        message: Message,
        context: Context,
        resident: Resident,
        identity: Identity,
        settings: Settings,
    ) -> RecordDict:
        plan = _load(message, context, resident)
        hardware = hardware_of(identity, settings, resident.image.layout)
        try:
            update, walk = resident.train(
                identity, hardware, plan, _walk(context), spool=spool_of(context, identity.name)
            )
        except EmptyUpdate:
            records.keep(context, WALK, resident.skip(identity, plan, _walk(context)))
            raise
        records.keep(context, WALK, walk)
        update = dataclasses.replace(update, report=_with_link(update.report, context))
        return records.update_content(update, as_view=records.is_view(message.content))

    def evaluate(
        message: Message,
        context: Context,
        resident: Resident,
        identity: Identity,
        _: Settings,
    ) -> RecordDict:
        return records.content_of(resident.evaluate(identity, _load(message, context, resident)))

    app.query("describe")(answering(describe))
    app.train()(answering(train))
    app.evaluate()(answering(evaluate))
    return app


def _resident(settings: Settings) -> Resident:
    if settings.task is None:
        raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
    return resident_of(
        settings.task,
        replace_batch_norm=settings.model.replace_batch_norm,
        check_task=settings.check_task,
    )


def _identity(context: Context) -> Identity:
    node = records.node_identity(context.node_config)
    name = node["name"] or (str(node["part"]) if node["is_partition"] else host_name())
    return Identity(name=name, data=node["data"], part=node["part"], num_parts=node["num_parts"])


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


def _load(message: Message, context: Context, resident: Resident) -> Plan:
    """Read the plan and take over the model that came with it."""
    plan = records.read(message.content, Plan)
    image = records.vector(message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: a plan without a model")
    resident.load_model(context.run_id, plan.model_version, image)
    return plan


def _walk(context: Context) -> Walk:
    kept = records.kept(context, WALK)
    if kept is None:
        return Walk()
    return Walk(
        place=Place(**kept["place"]),
        pending_round=kept["pending_round"],
        pending_place=Place(**kept["pending_place"]),
    )


app = client_app(this_machine)
