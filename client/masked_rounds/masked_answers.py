"""A client's answers to masked plans: none depends on its examples.

A server chooses the model and reads the answers. If a plan of few examples were refused when their
loss overflows, each refusal would be a bit of an example (tests/attacks/test_masked_oracle.py). A
masked plan is therefore answered with the same message whatever comes of it. A window without a
usable example gives an update of weight 0, and the device's own log says why.

The answer leaves at the time that the plan says (``answer_seconds``), which the server computes
from public figures; what is not done by then is left out. What time still shows: a single
micro-batch that takes longer than the whole plan should, as a power of two, and the machine's load;
and once in a device's life that a window had to be taken apart (``client.training.faults``), as the
device asks for the time of that from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from flwr.app import RecordDict

from headwater.client.algorithms.lookup import algorithm_for
from headwater.client.compression.error_feedback import (
    LARGEST_MASKED,
    MaskedLabel,
    error_feedback_of,
)
from headwater.client.features import own_rounds
from headwater.client.flower.request import DeviceRequest, spool_of
from headwater.client.flower.state_file import (
    REPEATS,
    SAMPLER,
    SECURE,
    SPEED,
)
from headwater.client.masked_rounds.masked_description import padded, vitals_without_training
from headwater.client.masked_rounds.of_request import enrolment_of, history_of
from headwater.client.masked_rounds.suspended_updates import suspended_of
from headwater.client.privacy.private_update import private_update
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.plan_policy import (
    PlanRepeats,
    answer_after,
    check_passed,
    check_repeats,
    most_planned,
    taken_apart,
)
from headwater.client.secagg.prepare import (
    floor_of,
    participant_of,
    unmasked_update,
)
from headwater.client.secagg.types import Participant, SessionRecord, UnmaskedUpdate, read_record
from headwater.client.training.sampler import SamplerState, seed_of
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import HeadwaterError, StateError
from headwater.common.flower import records
from headwater.common.messages import (
    Plan,
    ReadyReport,
    Update,
)
from headwater.common.model.vectors import squared_norm
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.masked_numbers import SQUARED_NORM, numbers_of_nothing
from headwater.common.task import max_weight_per_example

log = logging.getLogger(__name__)


def train_masked(request: DeviceRequest, plan: Plan) -> RecordDict:
    """Carry out a masked plan, keep its update for a session, and say that it is ready.

    Raises:
        HeadwaterError: the plan itself cannot be carried out, or a file cannot be written; whether
            it is raised does not depend on an example.
    """
    start_seconds = time.monotonic()
    context, trainer, identity = request.context, request.trainer, request.identity
    algorithm = algorithm_for(plan, request.settings.algorithm, name=identity.name)
    hardware = request.hardware
    vitals = vitals_without_training(request, hardware)
    model = plan.digest_at(trainer.image.digest)
    sampler = _follow_repeats(request, plan, model=model)
    order_seed = order_seed_of(request, plan)
    window = _unmasked_window(request, plan, sampler, order_seed, model=model)
    update: Update | None = None
    own = own_rounds(plan, request.settings, request.feature_store)
    is_active = request.settings.secure.aggregation == "active"
    for one in own if is_active else ():
        one.check_stateless(identity.name)
    try:
        update, after = trainer.train(
            identity,
            hardware,
            window.plan,
            sampler,
            spool=spool_of(context, identity.name),
            algorithm=algorithm,
            order_seed=order_seed,
            left_out=window.left_out,
            store=request.local_store,
            more=own,
            least_tested=request.settings.secure.min_quota,
        )
        for one in own if is_active else ():  # a refusal now could tell of the examples
            one.check_stateless(identity.name)
    except StateError:
        raise
    except Exception as error:
        text = "%s, round %d: its update is masked as one of weight 0: %s: %s"
        is_own = isinstance(error, HeadwaterError)
        log.warning(
            text, identity.name, plan.round, type(error).__name__, error, exc_info=not is_own
        )
        update, after = None, trainer.skip(identity, window.plan, sampler, order_seed)
    records.save_state(context, SAMPLER, after)
    for one in () if is_active else own:
        one.keep()
    seconds = None
    if request.is_simulated:
        passed_seconds = 0.0 if update is None else update.report.seconds
        seconds = max(passed_seconds, answer_after(plan, passed_seconds))
    else:
        passed_seconds = time.monotonic() - start_seconds
        left_seconds = answer_after(plan, passed_seconds) - passed_seconds
        is_stopped = trainer.stop_requested.wait(max(left_seconds, 0.0))
        if is_active and is_stopped:
            passed_seconds = time.monotonic() - start_seconds
            check_passed(plan, request.speed, passed_seconds, name=identity.name)
        if trainer.progress.are_apart and passed_seconds > (plan.answer_by or 0.0):
            _ask_for_more_time(request)
    _add_pending(request, plan, update, model=model, examples=window.examples)
    return padded(ReadyReport(name=identity.name, round=plan.round, seconds=seconds, vitals=vitals))


def _ask_for_more_time(request: DeviceRequest) -> None:
    """Take no more plans without the time of a window that has to be taken apart.

    The server saw that this one was. Answers that are late now and then would tell it more.
    """
    history = history_of(request)
    if request.speed is not None and not history.was_taken_apart:
        history.note_taken_apart()
        records.save_state(request.context, SPEED, taken_apart(request.speed))
        log.warning(
            "%s: its masked window was late: micro-batches failed, as where training diverges, and "
            "were summed example by example; from now on it asks for the time that this takes",
            request.identity.name,
        )


def _follow_repeats(request: DeviceRequest, plan: Plan, *, model: bytes) -> SamplerState:
    """Return the sampler from which the plan's window is taken, and count the plan."""
    context = request.context
    before = PlanRepeats.of(records.load_state(context, REPEATS))
    repeats, sampler = before.follow(
        plan, request.sampler, model=model.hex(), most=request.settings.secure.max_plans
    )
    records.save_state(context, REPEATS, repeats)
    return sampler


def order_seed_of(request: DeviceRequest, plan: Plan) -> int:
    """Return the seed of the order in which a masked plan takes its examples."""
    chosen = request.settings.secure.order_seed
    if chosen is None:
        return history_of(request).order_seed(plan.run_seed, request.context.run_id)
    return plan.run_seed if chosen == 0 else seed_of("masked order", plan.run_seed, chosen)


class UnmaskedWindow(NamedTuple):
    """The examples of a masked plan that were never masked at its model."""

    plan: Plan
    """The plan of a window that has as many of these as the plan asks for, with the others."""
    examples: tuple[int, ...]
    left_out: frozenset[int]
    """The places of the others in the window."""


def _unmasked_window(
    request: DeviceRequest, plan: Plan, sampler: SamplerState, order_seed: int, *, model: bytes
) -> UnmaskedWindow:
    """Return the window of a plan; of active masks wider by the examples masked at its model.

    A server that lies may send another run's seed at one model. That is another order, in which
    those may lie anywhere: with half a window each, members would hide less than is planned.

    Raises:
        UpdateAlreadyMasked: see ``check_repeats``.
    """
    sampler, trainer = sampler.settle(plan.counted_round), request.trainer
    history, identity = history_of(request), request.identity
    subjects = (model, *plan.other_subjects)
    for subject in subjects:
        history.check_data(trainer.examples(identity), subject)
        check_repeats(
            plan,
            name=identity.name,
            num_planned_before=history.num_planned_at(subject),
            most=most_planned(request.settings.secure, len(trainer.examples(identity))),
        )
    numbers = trainer.numbers(identity, plan, sampler, order_seed)
    masked = frozenset().union(*map(history.masked_at, subjects))
    wider, num_wanted = plan, len(numbers)
    left_out = _places_in(masked, numbers)
    is_filled = request.settings.secure.aggregation == "active" and not plan.is_private
    while is_filled and len(numbers) - len(left_out) < num_wanted:
        wider = plan.model_copy(update={"quota": plan.quota + len(left_out)})
        before, numbers = numbers, trainer.numbers(identity, wider, sampler, order_seed)
        left_out = _places_in(masked, numbers)
        if len(numbers) == len(before):  # all that it owns
            break
    unmasked = tuple(number for number in numbers if number not in masked)
    return UnmaskedWindow(wider, unmasked, left_out)


def _places_in(masked: frozenset[int], numbers: Sequence[int]) -> frozenset[int]:
    if not masked:
        return frozenset()
    return frozenset(place for place, number in enumerate(numbers) if number in masked)


def _add_pending(
    request: DeviceRequest,
    plan: Plan,
    update: Update | None,
    *,
    model: bytes,
    examples: tuple[int, ...],
) -> None:
    """Keep an update for its secure session; None: one of weight 0."""
    # Imported here, as most clients never mask: it costs 0.5 MB of an idle client's memory.
    from headwater.client.secagg.session import SecureSession

    context, trainer, identity = request.context, request.trainer, request.identity
    privacy = plan.of(PrivacyTerms)
    extra = plan.extra_sums(trainer.image.layout.num_parameters)
    if update is None and privacy is not None:
        trainer.accumulator.reclaim()
        trainer.accumulator.zero()
        update = private_update(
            plan,
            privacy,
            trainer.accumulator.values_P,
            name=identity.name,
            weight=max_weight_per_example(trainer.task) * plan.quota,
        )
    if update is None:
        trainer.accumulator.reclaim()
        trainer.accumulator.zero()
        unmasked = UnmaskedUpdate(
            values_P=trainer.accumulator.values_P,
            numbers=numbers_of_nothing(num_refused=plan.quota),
            sums_S=torch.zeros(extra.num_bytes // 4),
        )
    else:
        if not plan.asks_model:  # zeros hide the sums' members as a gradient does
            trainer.accumulator.reclaim()
            trainer.accumulator.zero()
            update = replace(update, values_P=trainer.accumulator.values_P)
        owned, _ = trainer.split(identity, plan)
        norm = trainer.accumulator.gradient_norm()
        spans = trainer.image.layout.spans
        unmasked = unmasked_update(update, plan, spans=spans, num_owned=len(owned), norm=norm)
    device = participant_of(
        plan,
        examples,
        trainer,
        name=identity.name,
        run_id=context.run_id,
        model_digest=model,
        floor=floor_of(request.settings.secure),
        enrolment=enrolment_of(request),
    )
    record = read_record(records.load_state(context, SECURE))
    if plan.of(CompressionTerms) is not None:
        unmasked, carried = _projected(request, plan, unmasked, device, record)
        device = replace(device, carried_weight=carried)
    session = SecureSession(
        device,
        record,
        update=unmasked,
        num_threads=torch.get_num_threads(),
        is_view=records.is_view(request.message.content),
    )
    if session.is_view:  # a grid of ours: this process answers the session's requests too
        pending_in(trainer.accumulator).add(session, trainer.accumulator)
    else:
        suspended_of(request).add(session)


def _projected(
    request: DeviceRequest,
    plan: Plan,
    update: UnmaskedUpdate,
    device: Participant,
    record: SessionRecord,
) -> tuple[UnmaskedUpdate, int]:
    """Return what all members send of an update, coordinates or factors [k], with what was left.

    The second value is the weight of what was left.

    Raises:
        StateError: see ``ErrorFeedback.gather``.
    """
    from headwater.client.secagg.mask_phases import with_usable_values  # as above
    from headwater.common.compression.encoding import coding_of

    coding = coding_of(plan)
    update = with_usable_values(update, device)
    values_P, history = update.values_P, history_of(request)

    def was_masked(label: MaskedLabel) -> bool:
        return label.update_id == record.masked or history.was_masked(
            label.update_id,
            bytes.fromhex(label.model),
            num_planned_before=label.num_planned_before,
        )

    if coding.terms.feedback:
        label = MaskedLabel(
            update_id=device.update_id,
            model=device.model_digest.hex(),
            num_planned_before=history.num_planned_at(device.model_digest),
        )
        sent_K, carried = error_feedback_of(request).gather(
            values_P,
            plan,
            weight=device.planned_weight,
            label=label,
            was_masked=was_masked,
        )
    else:
        values_P.clamp_(-LARGEST_MASKED, LARGEST_MASKED)
        sent_K, carried = coding.projection(len(values_P)).gather(values_P), 0
    numbers = {**update.numbers, SQUARED_NORM: squared_norm(sent_K)}
    return replace(update, values_P=sent_K, numbers=numbers), carried
