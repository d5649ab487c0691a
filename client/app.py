"""The device as a Flower ClientApp: describe, train, evaluate, and a secure session's phases.

The same app runs in the simulator, behind our own gRPC stream, in Flower's Ray simulation and on
SuperNodes. Flower's types stop here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.flower.request import SIMULATED, DeviceRequest, read_request, spool_of
from headwater.client.flower.state_file import PACE, SECURE, WALK, record_of
from headwater.client.secagg.pending import PendingUpdate
from headwater.client.secagg.prepare import (
    check_masking,
    floor_of,
    hide_details,
    participant_of,
    ready_message,
    unmasked_update,
)
from headwater.client.secagg.types import SessionRecord
from headwater.client.training.trainer import HardwareOf, this_machine
from headwater.common.errors import CorruptUpdate, EmptyUpdate, HeadwaterError
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, Update, UpdateReport
from headwater.common.secagg.protocol import PHASES, Phase
from headwater.common.stats import training_speed as pace

log = logging.getLogger(__name__)

Report = TypeVar("Report", DeviceReport, UpdateReport)


def client_app(hardware_of: HardwareOf) -> ClientApp:
    """Return a ClientApp whose devices run on the given hardware, real or simulated."""
    app = ClientApp()

    def answering(
        answer: Callable[[DeviceRequest], RecordDict],
    ) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            try:
                content = answer(read_request(message, context, hardware_of))
            except Exception as error:
                if not isinstance(error, HeadwaterError):
                    log.exception("the task or the device failed")
                elif error.is_private:
                    log.warning("%s: %s", error.code, error)
                stays_here = SIMULATED in context.node_config
                return Message(records.refusal(error, stays_here=stays_here), reply_to=message)
            return Message(content, reply_to=message)

        return reply

    app.query("describe")(answering(_describe))
    app.train()(answering(_train))
    app.evaluate()(answering(_evaluate))
    for phase in PHASES:
        app.query(phase.action)(answering(partial(_in_phase, phase)))
    return app


# What is answered.


def _describe(asked: DeviceRequest) -> RecordDict:
    request = records.read(asked.message.content, DescribeRequest)
    if request.left_out is not None:
        log.info("%s has no part in this round: %s", asked.identity.name, request.left_out)
    report = asked.trainer.describe(asked.identity, asked.hardware, request)
    told = pace.told(report)
    # As the server does: the pace at which it was seen to work counts, unless it was too slow.
    if told is not None and (asked.pace is None or request.left_out is not None):
        records.keep(asked.context, PACE, told)
    return records.content_of(_with_link(report, asked.context))


def _train(asked: DeviceRequest) -> RecordDict:
    context, trainer, identity = asked.context, asked.trainer, asked.identity
    plan = records.read(asked.message.content, Plan)
    trainer.held.begin(run_id=context.run_id, round_number=plan.round, name=identity.name)
    _leave_session(asked, plan)
    check_masking(asked.secure, is_masked=plan.is_masked, name=identity.name, what="an update")
    _load(asked, plan)
    spool = spool_of(context, identity.name)
    with hide_details(plan, identity.name):
        try:
            update, walk = trainer.train(identity, asked.hardware, plan, asked.walk, spool=spool)
        except EmptyUpdate:
            records.keep(context, WALK, trainer.skip(identity, plan, asked.walk))
            raise
        records.keep(context, WALK, walk)
        update = dataclasses.replace(update, report=_with_link(update.report, context))
        if plan.is_masked:
            _hold(asked, plan, update)
            return records.content_of(ready_message(update.report, asked.pace))
    return records.update_content(update, as_view=records.is_view(asked.message.content))


def _leave_session(asked: DeviceRequest, plan: Plan) -> None:
    """Where no process stays: let go what waits for a session, take up what was forced to disk."""
    if records.is_view(asked.message.content):
        return
    asked.between.drop()
    if plan.is_masked:
        asked.between.prepare()


def _hold(asked: DeviceRequest, plan: Plan, update: Update) -> None:
    """Keep an update in this process for a secure session, and follow the device's own pace."""
    context, trainer, identity = asked.context, asked.trainer, asked.identity
    if asked.pace is not None:
        records.keep(context, PACE, pace.followed(asked.pace, update.report.steps))
    examples, _ = trainer.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
    device = participant_of(
        plan,
        asked.walk,
        name=identity.name,
        run_id=context.run_id,
        task=trainer.task,
        image=trainer.image,
        chosen=asked.secure,
        enrolment=asked.enrolment,
    )
    trained = unmasked_update(
        update, plan, device, num_owned=len(examples), norm=trainer.accumulator.gradient_norm()
    )
    held = PendingUpdate(
        device,
        record_of(records.kept(context, SECURE)),
        trained,
        num_threads=torch.get_num_threads(),
        is_view=records.is_view(asked.message.content),
    )
    if held.is_view:  # a grid of ours: this process answers the session's messages too
        trainer.held.hold(held)
    else:
        asked.between.hold(held)


def _in_phase(phase: Phase, asked: DeviceRequest) -> RecordDict:
    content, context, between = asked.message.content, asked.context, asked.between
    is_between = between.is_waiting
    held = (
        between.held(floor=floor_of(asked.secure), enrolment=asked.enrolment)
        if is_between
        else asked.trainer.held.of(context.run_id, asked.identity.name)
    )

    def remember(record: SessionRecord) -> None:
        records.keep(context, SECURE, record)
        if record.masked == held.device.update_id:  # its examples are spent, whatever comes
            records.keep(context, WALK, asked.walk.passed())
        if is_between:
            between.note()

    reply, vector = held.answer(
        records.read(content, phase.request), bounds=records.vector(content), remember=remember
    )
    if is_between:
        between.wait(held)
    if vector is None:
        return records.content_of(reply)
    memory = vector.data.cast("B")
    array = records.flat_array(memory if held.is_view else bytes(memory), dtype=str(vector.dtype))
    return records.content_of(reply, array)


def _evaluate(asked: DeviceRequest) -> RecordDict:
    plan = records.read(asked.message.content, Plan)
    check_masking(
        asked.secure,
        is_masked=False,
        name=asked.identity.name,
        what="the loss on what it holds out",
    )
    _load(asked, plan)
    return records.content_of(asked.trainer.evaluate(asked.identity, plan))


def _load(asked: DeviceRequest, plan: Plan) -> None:
    """Take over the model that came with a plan."""
    image = records.vector(asked.message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: a plan without a model")
    asked.trainer.load_model(asked.context.run_id, plan.model_version, image)


# What the node knows.


def _with_link(report: Report, context: Context) -> Report:
    """Add what the node saw of its link; Flower's own engines tell nothing of theirs."""
    link = read_bandwidth(context.node_config)
    seen = {name: rate for name, rate in dataclasses.asdict(link).items() if rate is not None}
    return report.model_copy(update={"vitals": report.vitals.model_copy(update=seen)})


app = client_app(this_machine)
