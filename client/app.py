"""The client as a Flower ClientApp: describe, train, evaluate, and the phases of a secure session.

The same app runs in the simulator, over our own gRPC stream, in Flower's Ray simulation and on
SuperNodes. Only this file and ``client.flower`` use Flower's types.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.device.hardware import this_machine
from headwater.client.features import (
    algorithm_for,
    check_algorithm,
    check_test,
    own_rounds,
    takes_model,
)
from headwater.client.flower.request import SIMULATED, DeviceRequest, read_request, spool_of
from headwater.client.flower.state_file import OFFLINE, SAMPLER, SPEED
from headwater.client.plan_features import (
    PHASE_ACTIONS,
    answer_phase,
    describe_masked,
    go_on_offline,
    lacks_frozen,
    load_model,
    owner_features,
    plan_features,
    requires_masks,
    take_frozen,
)
from headwater.client.training.context import HardwareOf
from headwater.common.errors import EmptyUpdate, HeadwaterError, TaskMismatch
from headwater.common.estimates import training_speed
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, UpdateReport
from headwater.common.user_code.task_spec import short_code

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
                request = read_request(message, context, hardware_of)
                with _alone(request):
                    content = handle(request)
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
    app.query("frozen")(handled_by(take_frozen))
    app.train()(handled_by(_train))
    app.evaluate()(handled_by(_evaluate))
    app.query(OFFLINE)(handled_by(go_on_offline))
    for action in PHASE_ACTIONS:
        app.query(action)(handled_by(partial(answer_phase, action)))
    return app


def _alone(request: DeviceRequest) -> AbstractContextManager[None]:
    """Keep other processes of the device from answering meanwhile; else there is one."""
    if not request.is_on_supernode:
        return nullcontext()
    from headwater.client.flower.one_message import one_message

    return one_message(request)


def _describe(request: DeviceRequest) -> RecordDict:
    describe = records.read(request.message.content, DescribeRequest)
    check_algorithm(describe.algorithm, request.settings.algorithm, name=request.identity.name)
    _check_task(request, describe.task)
    if describe.left_out is not None:
        log.info("this round excludes %s: %s", request.identity.name, describe.left_out)
    if requires_masks(request):
        return describe_masked(request, describe)
    has_budget = request.settings.privacy.budget is not None
    if has_budget:  # what groups it holds out, and its examples' digest, have no noise
        describe = describe.model_copy(update={"held_out_fraction": 0.0})
    report = request.trainer.describe(request.identity, request.hardware, describe)
    if has_budget:
        report = report.model_copy(update={"data": None})
    measured = training_speed.reported_line(report)
    # As on the server: a speed seen in training replaces a measured one, unless it was too slow.
    if measured is not None and (request.speed is None or describe.left_out is not None):
        records.save_state(request.context, SPEED, measured)
    report = report.model_copy(update={"lacks_frozen": lacks_frozen(request, describe)})
    return records.content_of(_with_link(report, request.context))


def _check_task(request: DeviceRequest, wanted: str | None) -> None:
    """Check that the device has the task that all members of a masked run must have.

    Raises:
        TaskMismatch: it has another one, or another file of it.
    """
    own = request.trainer.task_code
    if wanted not in (None, own):
        raise TaskMismatch(
            f"{request.identity.name}: the run's task is {short_code(wanted)}, this device has "
            f"{short_code(own)}"
        )


def _train(request: DeviceRequest) -> RecordDict:
    context, trainer, identity = request.context, request.trainer, request.identity
    content = request.message.content
    plan = records.read(content, Plan)
    features = plan_features(request, plan)
    for feature in features:
        if (early := feature.check(request, plan)) is not None:
            return early
    for feature in features:
        feature.prepare(request, plan)
    for feature in features:
        feature.allow(request, plan)
    for feature in features:
        if (answer := feature.train(request, plan)) is not None:
            return answer
    load_model(request, plan)
    own = own_rounds(plan, request.settings, request.feature_store)
    try:
        update, sampler = trainer.train(
            identity,
            request.hardware,
            plan,
            request.sampler,
            spool=spool_of(context, identity.name),
            algorithm=algorithm_for(plan, request.settings.algorithm, name=identity.name),
            store=request.local_store,
            more=own,
        )
    except EmptyUpdate:
        # What follows on a window that is still out is passed over only once that one has counted.
        if plan.after_round is None:
            unusable = trainer.skip(identity, plan, request.sampler)
            records.save_state(context, SAMPLER, unusable.passed())
        raise
    update = dataclasses.replace(update, report=_with_link(update.report, context))
    encoded = None
    for feature in features:
        update = feature.finish(request, plan, update)
    for feature in features:
        update, found = feature.encode(request, plan, update)
        encoded = encoded if found is None else found
    if encoded is None and (coding := plan.coding) is not None:  # of a feature of the user's
        encoded = coding.encode(update.values_P, identity.name)
    sums = update.joined_sums(plan, num_values=trainer.image.layout.num_parameters)
    records.save_state(context, SAMPLER, sampler)
    for one in own:
        one.keep()
    for feature in features:
        feature.sent(request, plan, sampler)
    # The next plan may use the accumulator's memory while this update is sent.
    as_view = records.is_view(content) and not plan.overlaps
    return records.update_content(update, encoded, sums=sums, as_view=as_view)


def _evaluate(request: DeviceRequest) -> RecordDict:
    plan = records.read(request.message.content, Plan)
    if not takes_model(plan):
        for feature in owner_features(request):
            feature.check_test(request)
        check_test(request.settings)
    load_model(request, plan)
    report = request.trainer.evaluate(request.identity, plan, request.local_store)
    return records.content_of(report)


def _with_link(report: Report, context: Context) -> Report:
    """Add the link's rates that the node measured; Flower's own engines measure none."""
    link = read_bandwidth(context.node_config)
    rates = {name: rate for name, rate in dataclasses.asdict(link).items() if rate is not None}
    return report.model_copy(update={"vitals": report.vitals.model_copy(update=rates)})


app = client_app(this_machine)
