"""Carries out further windows of a plan while a device has no link, and delivers their sum.

``client.offline.offline_node`` calls for one window after another while the link is away; the
answer to the next plan is then the sum, if the server still takes it.
"""

from __future__ import annotations

import logging

from headwater.client.algorithms.lookup import algorithm_for
from headwater.client.flower.request import OWN_SETTINGS, DeviceRequest
from headwater.client.flower.state_file import NOT_ASKED, SAMPLER, offline_name
from headwater.client.offline.offline_sum import OfflineSum, OfflineSumFile
from headwater.common.errors import HeadwaterError, StateError, UnexpectedUpdate
from headwater.common.flower import records
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.offline.terms import OfflineTerms
from headwater.common.parsed_text import json_of

log = logging.getLogger(__name__)


def offline_file(request: DeviceRequest) -> OfflineSumFile:
    """Return the file of the device's sum in this run."""
    name, run_id = request.identity.name, request.context.run_id
    return OfflineSumFile(request.state_folder / offline_name(name, run_id))


def num_windows_allowed(request: DeviceRequest, plan: Plan) -> int:
    """Return the most windows that a sum may have, by the plan and by the device's owner."""
    settings = request.settings
    if settings.secure.aggregation != "off" or settings.privacy.budget is not None:
        return 1  # its owner allows no plain sum
    if request.local_store is not None:
        return 1  # its own parameters follow each window
    if "privacy" in plan.terms:
        return 1  # each window is clipped by itself, and their sum would exceed the bound
    if settings.feature.name is not None or plan.carries_state:
        return 1  # its sums and its state are of one window
    return min(plan.max_windows, settings.asynchronous.offline_windows)


def go_on_offline(request: DeviceRequest) -> Update | None:
    """Keep an update that waits for a link, or add one more window to the one that is kept.

    None says that no window can be added: the update is as it was.

    Raises:
        UnexpectedUpdate: a server asks for it, on a SuperNode; ``Node`` asks its own app alone.
        StateError: it cannot be written; or see ``add_window``.
    """
    if OWN_SETTINGS not in request.context.node_config:
        raise UnexpectedUpdate(NOT_ASKED)
    content = request.message.content
    parts = json_of(records.head_json(content))
    if not parts:
        return add_window(request)
    kept = OfflineSum(
        plan=Plan.model_validate_json(parts["plan"]),
        report=UpdateReport.model_validate_json(parts["report"]),
        sampler=request.sampler,
    )
    values_P = records.as_tensor(records.vector(content) or b"")
    if num_windows_allowed(request, kept.plan) > 1:
        offline_file(request).write(kept, values_P)
    return Update(values_P=values_P, report=kept.report)


def add_window(request: DeviceRequest) -> Update | None:
    """Carry out one more window, and return the sum; None if it takes no further window.

    If None, the vector in memory is as before; if the window fails, it is read back from the file.

    Raises:
        StateError: a window failed, and the file cannot be read any more.
    """
    file, trainer = offline_file(request), request.trainer
    kept = file.read()
    if kept is None:
        return None
    version, plan = (request.context.run_id, kept.plan.model_version), kept.plan
    most = num_windows_allowed(request, plan)
    has_model = trainer.loaded_model.version == version
    if not (has_model and kept.has_room and kept.report.num_windows < most):
        return None
    try:
        kept = _added(request, file, kept)
    except HeadwaterError as error:
        log.warning("no further window is summed without a link: %s: %s", error.code, error)
    values_P = trainer.accumulator.values_P
    if file.load_into(values_P) is None:
        raise StateError("the sum of the windows without a link cannot be read")
    return Update(values_P=values_P, report=kept.report)


def _added(request: DeviceRequest, file: OfflineSumFile, kept: OfflineSum) -> OfflineSum:
    """Sum one more window, and write the file with it.

    Raises:
        HeadwaterError: see ``Trainer.train``; or the sum overflows, or cannot be written.
    """
    identity = request.identity
    window, sampler = request.trainer.train(
        identity,
        request.hardware,
        kept.plan,
        kept.next_sampler,
        algorithm=algorithm_for(kept.plan, request.settings.algorithm, name=identity.name),
    )
    if not file.add_to(window.values_P):
        raise StateError(f"{identity.name}: the sum of so many windows cannot be kept")
    after = kept.after(window.report, sampler)
    file.write(after, window.values_P)
    records.save_state(request.context, SAMPLER, after.sampler)
    log.info("%s: %d windows are summed without a link", identity.name, after.report.num_windows)
    return after


def deliverable(request: DeviceRequest, plan: Plan) -> Update | None:
    """Return the sum that answers a new plan; None if there is none that the server would take.

    A sum that the server has counted, has refused, or does not take any more, is removed: unless it
    was counted, its examples are used again.
    """
    file = offline_file(request)
    kept = file.read()
    if kept is None:
        return None
    terms = plan.of(OfflineTerms)
    refused = None if terms is None else terms.refused_round
    is_over = kept.plan.round in (plan.counted_round, refused)
    has_budget = request.settings.privacy.budget is not None  # set since: the sum has no noise
    if is_over or plan.max_windows == 1 or plan.hides_data or has_budget:
        file.remove()
        return None
    trainer = request.trainer
    values_P = trainer.accumulator.values_P
    trainer.accumulator.reclaim()
    if file.load_into(values_P) is None:
        return None
    records.save_state(request.context, SAMPLER, kept.sampler)
    log.warning(
        "%s: delivers %d windows of the model of round %d, summed without a link",
        request.identity.name,
        kept.report.num_windows,
        kept.plan.round,
    )
    return Update(values_P=values_P, report=kept.report)
