"""The client as a Flower ClientApp: describe, train, evaluate, and the phases of a secure session.

The same app runs in the simulator, over our own gRPC stream, in Flower's Ray simulation and on
SuperNodes. Only this file and ``client.flower`` use Flower's types.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.algorithms.lookup import algorithm_for, check_algorithm
from headwater.client.compression.error_feedback import encoded_update
from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.device.hardware import this_machine
from headwater.client.flower.frozen_parts import holds_frozen, require_frozen, take_frozen
from headwater.client.flower.masked_answers import train_masked
from headwater.client.flower.masked_description import describe_masked, told_examples
from headwater.client.flower.offline_windows import (
    OFFLINE,
    deliverable,
    go_on_offline,
)
from headwater.client.flower.request import SIMULATED, DeviceRequest, read_request, spool_of
from headwater.client.flower.state_file import EXAMPLES, SAMPLER, SECURE, SPEED
from headwater.client.growing_data.position_change import DataChange
from headwater.client.growing_data.refresh import watch_of
from headwater.client.privacy.budget import check_budget, check_test
from headwater.client.privacy.example_unit import check_example_unit
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.plan_policy import check_plan
from headwater.client.secagg.prepare import check_masking, floor_of
from headwater.client.secagg.types import SessionRecord
from headwater.client.training.context import HardwareOf
from headwater.common.errors import CorruptUpdate, EmptyUpdate, HeadwaterError
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, UpdateReport
from headwater.common.secagg.protocol import PHASES, MaskReply, Phase, UnmaskRequest
from headwater.common.stats import training_speed

log = logging.getLogger(__name__)

Report = TypeVar("Report", DeviceReport, UpdateReport)


def client_app(hardware_of: HardwareOf) -> ClientApp:
    """Return a ClientApp whose clients run on the given hardware, real or simulated."""
    app = ClientApp()

    def handled_by(
        handle: Callable[[DeviceRequest], RecordDict],
    ) -> Callable[[Message, Context], Message]:
        def reply(message: Message, context: Context) -> Message:
            try:
                content = handle(read_request(message, context, hardware_of))
            except Exception as error:
                is_simulated = SIMULATED in context.node_config
                if not isinstance(error, HeadwaterError):
                    log.exception("the task or the device failed")
                elif error.is_private and not is_simulated:  # else the server shows it
                    log.warning("%s: %s", error.code, error)
                return Message(
                    records.to_flower_error(error, is_same_process=is_simulated),
                    reply_to=message,
                )
            return Message(content, reply_to=message)

        return reply

    app.query("describe")(handled_by(_describe))
    app.query("frozen")(handled_by(lambda request: records.content_of(take_frozen(request))))
    app.train()(handled_by(_train))
    app.evaluate()(handled_by(_evaluate))
    app.query(OFFLINE)(handled_by(go_on_offline))
    for phase in PHASES:
        app.query(phase.action)(handled_by(partial(_answer_phase, phase)))
    return app


def _describe(request: DeviceRequest) -> RecordDict:
    describe = records.read(request.message.content, DescribeRequest)
    check_algorithm(describe.algorithm, request.settings.algorithm, name=request.identity.name)
    if describe.left_out is not None:
        log.info("this round excludes %s: %s", request.identity.name, describe.left_out)
    if request.secure.aggregation != "off":
        return describe_masked(request, describe)
    report = request.trainer.describe(request.identity, request.hardware, describe)
    measured = training_speed.reported_line(report)
    # As on the server: a speed seen in training replaces a measured one, unless it was too slow.
    if measured is not None and (request.speed is None or describe.left_out is not None):
        records.save_state(request.context, SPEED, measured)
    lacks_frozen = not holds_frozen(request, describe.frozen)
    report = report.model_copy(update={"lacks_frozen": lacks_frozen})
    return records.content_of(_with_link(report, request.context))


def _train(request: DeviceRequest) -> RecordDict:
    context, trainer, identity = request.context, request.trainer, request.identity
    content = request.message.content
    plan, secure = records.read(content, Plan), request.secure
    check_masking(secure, is_masked=plan.is_masked, name=identity.name, what="an update")
    if records.is_view(content) and (late := deliverable(request, plan)) is not None:
        return records.update_content(late, as_view=True)
    pending = pending_in(trainer.accumulator)
    if request.settings.asynchronous.is_on:  # simulated devices wait with updates of other rounds
        pending.discard(identity.name)
    else:
        pending.start_plan(run_id=context.run_id, round_number=plan.round, name=identity.name)
    if not records.is_view(content):  # an engine where no process stays
        request.suspended.discard()
        if plan.is_masked:
            request.suspended.prepare()
    change = _look_at_data(request, plan)
    if plan.is_masked:
        check_plan(plan, secure, name=identity.name, told_examples=told_examples(request, plan))
    window = None
    if plan.is_private_by_example:
        from headwater.client.flower.private_rounds import planned_window  # as below

        has_local = request.local_store is not None
        check_example_unit(plan, request.sampler, name=identity.name, has_local=has_local)
        window = planned_window(request, plan)
    chosen, spent = request.settings.privacy, request.spent
    check_budget(plan, chosen, name=identity.name, spent=spent, window=window)
    if plan.is_masked:
        trainer.examples(identity)  # checks the task, not under a model of the server's choice
        _load_model(request, plan)
        return train_masked(request, plan)
    _load_model(request, plan)
    try:
        update, sampler = trainer.train(
            identity,
            request.hardware,
            plan,
            request.sampler,
            spool=spool_of(context, identity.name),
            algorithm=algorithm_for(plan, request.settings.algorithm, name=identity.name),
            store=request.local_store,
        )
    except EmptyUpdate:
        unusable = trainer.skip(identity, plan, request.sampler)
        records.save_state(context, SAMPLER, unusable.passed())
        raise
    update = dataclasses.replace(update, report=_with_link(update.report, context))
    if change is not None and plan.privacy is None:
        counts = dataclasses.asdict(change)
        update = dataclasses.replace(update, report=update.report.model_copy(update=counts))
    encoded = None
    if plan.compression is not None:
        update, encoded = encoded_update(update, plan, request.error_feedback)
    records.save_state(context, SAMPLER, sampler)
    if plan.privacy is not None:
        from headwater.client.flower.private_rounds import spend  # as below: most never need it

        spend(request, plan.privacy, sampler)
    return records.update_content(update, encoded, as_view=records.is_view(content))


def _look_at_data(request: DeviceRequest, plan: Plan) -> DataChange | None:
    """Follow what changed in the device's data at an epoch's end; None if nothing did."""
    if request.is_simulated:
        return None
    found = watch_of(request.trainer).refreshed(
        request.trainer, request.identity, plan, request.sampler, request.examples
    )
    if found is None:
        return None
    records.save_state(request.context, SAMPLER, found.sampler)
    records.save_state(request.context, EXAMPLES, found.known.to_json())
    return found.change


def _answer_phase(phase: Phase, request: DeviceRequest) -> RecordDict:
    from headwater.client.flower.private_rounds import correct_spent, spend

    content, context, suspended = request.message.content, request.context, request.suspended
    is_suspended = suspended.exists
    session = (
        suspended.resume(floor=floor_of(request.secure), enrolment=request.enrolment)
        if is_suspended
        else pending_in(request.trainer.accumulator).get(context.run_id, request.identity.name)
    )

    terms, update = session.device.privacy, session.device.update_id

    def store(record: SessionRecord) -> None:
        if terms is not None and record.masked == update:
            spend(request, terms, request.sampler, update_id=update)
        records.save_state(context, SECURE, record)
        if record.masked == update:  # its examples count as used in any case
            records.save_state(context, SAMPLER, request.sampler.passed())
            if session.record.masked != record.masked:
                device = session.device
                request.history.add(
                    device.model_digest, device.examples, num_planned=device.num_planned
                )
        if is_suspended:
            suspended.write_state_file()

    session.store = store
    asked = records.read(content, phase.request)
    reply = session.answer(asked, records.vector(content))
    if terms is not None and isinstance(asked, UnmaskRequest):
        correct_spent(request, session, asked)
    vector = session.vector if isinstance(reply, MaskReply) else None
    if is_suspended:
        suspended.suspend(session)
    if vector is None:
        return records.content_of(reply)
    memory = vector.data.cast("B")
    array = records.flat_array(
        memory if session.is_view else bytes(memory), dtype=str(vector.dtype)
    )
    return records.content_of(reply, array)


def _evaluate(request: DeviceRequest) -> RecordDict:
    plan = records.read(request.message.content, Plan)
    check_masking(
        request.secure, is_masked=False, name=request.identity.name, what="the held-out loss"
    )
    check_test(request.settings.privacy, name=request.identity.name)
    _load_model(request, plan)
    report = request.trainer.evaluate(request.identity, plan, request.local_store)
    return records.content_of(report)


def _load_model(request: DeviceRequest, plan: Plan) -> None:
    """Load the model that came with a plan."""
    image = records.vector(request.message.content)
    if image is None:
        raise CorruptUpdate(f"round {plan.round}: the plan came without a model")
    require_frozen(request, plan.frozen)
    request.trainer.loaded_model.load(request.context.run_id, plan.model_version, image)


def _with_link(report: Report, context: Context) -> Report:
    """Add the link's rates that the node measured; Flower's own engines measure none."""
    link = read_bandwidth(context.node_config)
    rates = {name: rate for name, rate in dataclasses.asdict(link).items() if rate is not None}
    return report.model_copy(update={"vitals": report.vitals.model_copy(update=rates)})


app = client_app(this_machine)
