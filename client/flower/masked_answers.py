"""A client's answers under masks: none depends on its examples.

A server chooses the model and reads the answers. If a plan of few examples were refused when their
loss overflows, each refusal would be a bit of an example (tests/attacks/test_masked_oracle.py). A
masked plan is therefore answered with the same message whatever comes of it: a window that raises,
overflows or has no usable example gives an update of weight 0. The device's own log says why.

The answer leaves at the time that the plan says (``answer_seconds``), which the server computes
from public figures; what is not done by then is left out. What time still shows: a single
micro-batch that takes longer than the whole plan should, as a power of two, and the machine's load.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

import torch
from flwr.app import RecordDict

from headwater.client.algorithms.lookup import algorithm_for
from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.device.interfaces import Hardware, Speed
from headwater.client.flower.frozen_parts import holds_frozen
from headwater.client.flower.request import DeviceRequest, spool_of
from headwater.client.flower.state_file import (
    REPEATS,
    SAMPLER,
    SECURE,
    read_record,
)
from headwater.client.privacy.private_update import private_update
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.plan_policy import (
    PlanRepeats,
    answer_after,
    check_repeats,
    most_planned,
)
from headwater.client.secagg.prepare import (
    checked_metrics,
    floor_of,
    padded_head,
    participant_of,
    public_vitals,
    unmasked_update,
)
from headwater.client.secagg.types import UnmaskedUpdate
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState, seed_of
from headwater.common.errors import HeadwaterError, StateError
from headwater.common.flower import records
from headwater.common.messages import (
    DescribeRequest,
    DeviceReport,
    Plan,
    ReadyReport,
    Update,
    Vitals,
)
from headwater.common.secagg.masked_numbers import numbers_of_nothing
from headwater.common.settings.training import ChosenPrecision
from headwater.common.task import Examples, loss_sum, max_weight_per_example

log = logging.getLogger(__name__)

# Examples that are tried for the names of the task's metrics.
MAX_TRIED = 16


# The description.


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicFigures:
    """What a device tells of its capacity, measured once, before it has any of the server's models.

    A measurement under a model of the server's choice would be an answer that depends on examples.
    """

    speed: Speed | None = None
    base_bytes: int | None = None
    bytes_per_example: float | None = None
    precision: ChosenPrecision = "float32"


_measured: WeakKeyDictionary[Trainer, dict[str, PublicFigures]] = WeakKeyDictionary()
_metrics: WeakKeyDictionary[Trainer, tuple[str, ...]] = WeakKeyDictionary()


def learn_metrics(trainer: Trainer, identity: Identity) -> tuple[str, ...]:
    """Return the names of the task's metrics, learned once per process from the first examples.

    ``headwater-client`` calls this before it connects, so that it has no model of the server's yet.

    Raises:
        TaskError: there are more metrics, or longer names, than a session has room for.
    """
    if trainer not in _metrics:
        _metrics[trainer] = _metrics_of(trainer, trainer.examples(identity))
    return _metrics[trainer]


def describe_masked(request: DeviceRequest, wanted: DescribeRequest) -> RecordDict:
    """Describe a device that requires masks: its capacity, and nothing of its examples.

    Raises:
        ModelMismatch: the server's model has another layout.
        TaskError: the task's metrics do not fit into a session.
    """
    trainer, identity, hardware = request.trainer, request.identity, request.hardware
    trainer.loaded_model.check_layout(identity.name, wanted)
    figures, metrics = _figures(request, hardware, wanted)
    speed = figures.speed
    lacks_frozen = not holds_frozen(request, wanted.frozen)  # measured under the device's own model
    report = DeviceReport(
        name=identity.name,
        num_examples=request.secure.declared_examples,
        layout_digest=trainer.image.layout.digest,
        cores=hardware.cores(),
        vitals=_public_vitals(request, hardware).model_copy(
            update={
                "base_bytes": figures.base_bytes,
                "bytes_per_example": figures.bytes_per_example,
            }
        ),
        seconds_per_micro_batch=speed.seconds_per_micro_batch if speed else None,
        seconds_per_example=speed.seconds_per_example if speed else None,
        fastest_micro_batch_size=speed.fastest_micro_batch_size if speed else None,
        metrics=metrics,
        precision=figures.precision,
        lacks_frozen=lacks_frozen,
    )
    return _padded(report)


def _figures(
    request: DeviceRequest, hardware: Hardware, wanted: DescribeRequest
) -> tuple[PublicFigures, tuple[str, ...]]:
    """Return the device's capacity and the names of its metrics, as they were measured first."""
    trainer, identity = request.trainer, request.identity
    if request.is_simulated:  # one party plays all devices, on hardware that changes by the round
        metrics = learn_metrics(trainer, identity)
        return _measure(trainer, identity, hardware, wanted), metrics
    known = _measured.setdefault(trainer, {})
    must_measure = wanted.wants_speed and identity.name not in known
    if (must_measure or trainer not in _metrics) and not trainer.loaded_model.is_own():
        text = "%s: it has a model of the server's already, and measures nothing under that"
        log.warning(text, identity.name)
        return known.get(identity.name, PublicFigures()), _metrics.get(trainer, ())
    if must_measure:
        known[identity.name] = _measure(trainer, identity, hardware, wanted)
    return known.get(identity.name, PublicFigures()), learn_metrics(trainer, identity)


def _measure(
    trainer: Trainer, identity: Identity, hardware: Hardware, wanted: DescribeRequest
) -> PublicFigures:
    speed, chosen = None, trainer.precision.chosen
    if wanted.wants_speed:
        try:
            chosen = trainer.precision.choose(wanted.precision, identity)
            speed = trainer.measure(identity, hardware)
        except HeadwaterError as error:
            log.warning("%s: its speed was not measured: %s", identity.name, error)
    vitals = hardware.vitals()
    return PublicFigures(
        speed=speed,
        base_bytes=vitals.base_bytes,
        bytes_per_example=vitals.bytes_per_example,
        precision=chosen,
    )


def _metrics_of(trainer: Trainer, examples: Examples) -> tuple[str, ...]:
    """Return the names of the task's metrics, from the first example that it can be run on."""
    batches = Batches(trainer.task, examples)
    for position in range(min(len(examples), MAX_TRIED)):
        try:
            with torch.no_grad():
                _, _, metrics = loss_sum(trainer.task, trainer.image.model, batches.of((position,)))
        except Exception as error:
            log.debug("no metrics from example %d: %s", position, error)
            continue
        return checked_metrics(metrics)
    return ()


def told_examples(request: DeviceRequest, plan: Plan) -> int | None:
    """Return the number of examples that the device tells the server; None if it tells none.

    A device that does not require masks tells its own number in every description.
    """
    if request.secure.aggregation != "off":
        return request.secure.declared_examples
    training, _ = request.trainer.split(
        request.identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction
    )
    return len(training)


# The masked plan.


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
    vitals = _public_vitals(request, hardware)
    model = trainer.image.digest
    sampler = _follow_repeats(request, plan, model=model)
    order_seed = order_seed_of(request, plan)
    examples, left_out = _unmasked_examples(request, plan, sampler, order_seed, model=model)
    update: Update | None = None
    try:
        update, after = trainer.train(
            identity,
            hardware,
            plan,
            sampler,
            spool=spool_of(context, identity.name),
            algorithm=algorithm,
            order_seed=order_seed,
            left_out=left_out,
            store=request.local_store,
        )
    except StateError:
        raise
    except Exception as error:
        text = "%s, round %d: its update is masked as one of weight 0: %s: %s"
        is_own = isinstance(error, HeadwaterError)
        log.warning(
            text, identity.name, plan.round, type(error).__name__, error, exc_info=not is_own
        )
        after = trainer.skip(identity, plan, sampler, order_seed)
    records.save_state(context, SAMPLER, after)
    _add_pending(request, plan, update, model=model, examples=examples)
    seconds = None
    if request.is_simulated:
        passed_seconds = 0.0 if update is None else update.report.seconds
        seconds = max(passed_seconds, answer_after(plan, passed_seconds))
    else:
        passed_seconds = time.monotonic() - start_seconds
        left_seconds = answer_after(plan, passed_seconds) - passed_seconds
        trainer.stop_requested.wait(max(left_seconds, 0.0))
    return _padded(
        ReadyReport(name=identity.name, round=plan.round, seconds=seconds, vitals=vitals)
    )


def _follow_repeats(request: DeviceRequest, plan: Plan, *, model: bytes) -> SamplerState:
    """Return the sampler from which the plan's window is taken, and count the plan."""
    context = request.context
    before = PlanRepeats.of(records.load_state(context, REPEATS))
    repeats, sampler = before.follow(
        plan, request.sampler, model=model.hex(), most=request.secure.max_plans
    )
    records.save_state(context, REPEATS, repeats)
    return sampler


def order_seed_of(request: DeviceRequest, plan: Plan) -> int:
    """Return the seed of the order in which a masked plan takes its examples."""
    chosen = request.secure.order_seed
    if chosen is None:
        return request.history.order_seed(plan.run_seed, request.context.run_id)
    return plan.run_seed if chosen == 0 else seed_of("masked order", plan.run_seed, chosen)


def _unmasked_examples(
    request: DeviceRequest, plan: Plan, sampler: SamplerState, order_seed: int, *, model: bytes
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return the examples of a plan that were never masked at its model, and the others' places.

    Raises:
        UpdateAlreadyMasked: see ``check_repeats``.
    """
    sampler = sampler.settle(plan.counted_round)
    numbers = request.trainer.numbers(request.identity, plan, sampler, order_seed)
    masked = request.history.masked_at(model)
    check_repeats(
        plan,
        name=request.identity.name,
        num_planned_before=request.history.num_planned_at(model),
        most=most_planned(request.secure, len(request.trainer.examples(request.identity))),
    )
    if not masked:
        return numbers, frozenset()
    left_out = frozenset(place for place, number in enumerate(numbers) if number in masked)
    return tuple(number for number in numbers if number not in masked), left_out


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
    if update is None and plan.privacy is not None:
        trainer.accumulator.reclaim()
        trainer.accumulator.zero()
        update = private_update(
            plan,
            plan.privacy,
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
        )
    else:
        owned, _ = trainer.split(identity, run_seed=plan.run_seed, fraction=plan.held_out_fraction)
        norm = trainer.accumulator.gradient_norm()
        unmasked = unmasked_update(update, plan, num_owned=len(owned), norm=norm)
    device = participant_of(
        plan,
        examples,
        trainer,
        name=identity.name,
        run_id=context.run_id,
        model_digest=model,
        floor=floor_of(request.secure),
        enrolment=request.enrolment,
    )
    session = SecureSession(
        device,
        read_record(records.load_state(context, SECURE)),
        update=unmasked,
        num_threads=torch.get_num_threads(),
        is_view=records.is_view(request.message.content),
    )
    if session.is_view:  # a grid of ours: this process answers the session's requests too
        pending_in(trainer.accumulator).add(session, trainer.accumulator)
    else:
        request.suspended.add(session)


def _public_vitals(request: DeviceRequest, hardware: Hardware) -> Vitals:
    """Return the readings that do not follow from what the device trained on, and the link's."""
    link = {
        name: rate
        for name, rate in asdict(read_bandwidth(request.context.node_config)).items()
        if rate is not None
    }
    return public_vitals(hardware.vitals()).model_copy(update=link)


def _padded(report: DeviceReport | ReadyReport) -> RecordDict:
    head = padded_head(report.model_dump_json(exclude_none=True))
    return records.content_with_head(head, None)
