"""How a client that requires masks describes itself: its capacity, and nothing of its examples.

What it measures of its examples it measures once, under its own model, before it has any of the
server's. One measurement may fall into a busy second: when the server asks again, the speed is
measured again, on zeros of an example's shape, which say nothing of the data under any model. Not
with active masks: zeros may cost less than examples, and plans are checked by the speed.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from headwater.client.device.bandwidth import read_bandwidth
from headwater.client.device.interfaces import Hardware, Speed
from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import SHARE, SPEED
from headwater.client.frozen.frozen_parts import holds_frozen
from headwater.client.masked_rounds.of_request import history_of
from headwater.client.secagg.plan_policy import taken_apart
from headwater.client.secagg.prepare import checked_metrics, padded_head, public_vitals
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.batch_fetch import Batches
from headwater.client.training.context import Identity
from headwater.common.errors import HeadwaterError
from headwater.common.estimates.linear_fit import Line
from headwater.common.estimates.training_speed import reported_line
from headwater.common.flower import records
from headwater.common.messages import DescribeRequest, DeviceReport, Plan, ReadyReport, Vitals
from headwater.common.settings.training import ChosenPrecision
from headwater.common.task import Examples, loss_sum_alone

log = logging.getLogger(__name__)

# Examples that are tried for the names of the task's metrics.
MAX_TRIED = 16
# Zeros that a speed is measured on again, the micro-batch in which two speeds are compared, and the
# examples whose shapes are.
NUM_ZEROS, SPEED_EXAMPLES, NUM_COMPARED = 256, 16, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicFigures:
    """What a device tells of its capacity, measured before it has any of the server's models.

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
    pace: Line | None = None
    if speed is not None:
        pace = Line(base=speed.seconds_per_micro_batch, each=speed.seconds_per_example)
        pace = taken_apart(pace) if history_of(request).was_taken_apart else pace
    lacks_frozen = not holds_frozen(request, wanted.frozen)  # measured under the device's own model
    report = DeviceReport(
        name=identity.name,
        num_examples=request.settings.secure.declared_examples,
        layout_digest=trainer.image.layout.digest,
        cores=hardware.cores(),
        vitals=vitals_without_training(request, hardware).model_copy(
            update={
                "base_bytes": figures.base_bytes,
                "bytes_per_example": figures.bytes_per_example,
            }
        ),
        seconds_per_micro_batch=pace.base if pace else None,
        seconds_per_example=pace.each if pace else None,
        fastest_micro_batch_size=speed.fastest_micro_batch_size if speed else None,
        metrics=metrics,
        precision=figures.precision,
        lacks_frozen=lacks_frozen,
        task=trainer.task_code,
        labels=identity.labels,
    )
    if (told := reported_line(report)) is not None and not request.is_simulated:
        records.save_state(request.context, SPEED, told)  # by which plans are checked
    return padded(report)


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
    elif wanted.wants_speed and request.settings.secure.aggregation != "active":
        known[identity.name] = _measured_again(known[identity.name], trainer, identity, hardware)
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


def _measured_again(
    before: PublicFigures, trainer: Trainer, identity: Identity, hardware: Hardware
) -> PublicFigures:
    """Return the figures with the faster of two speeds: another program can only slow one down.

    The first measurement stands if the examples are no tensors, or zeros cannot be trained on; and
    if they differ in shape, as zeros in the shape of a short one would tell too high a speed.
    """
    examples = trainer.examples(identity)
    zeros = zeros_like(examples[0])
    if zeros is None or before.speed is None or not _have_one_shape(examples):
        return before
    try:
        speed = trainer.measure(identity, hardware, [zeros] * NUM_ZEROS)
    except HeadwaterError as error:
        log.debug("%s: not measured again: %s", identity.name, error)
        return before
    was, now = (
        one.seconds_per_micro_batch + SPEED_EXAMPLES * one.seconds_per_example
        for one in (before.speed, speed)
    )
    return replace(before, speed=speed) if now < was else before


def _have_one_shape(examples: Examples) -> bool:
    """Whether some examples, evenly spread over all, have the shapes of the first."""
    places = np.linspace(0, len(examples) - 1, min(NUM_COMPARED, len(examples)), dtype=np.int64)
    return len({_shapes(examples[at]) for at in places.tolist()}) == 1


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if type(value) is dict:
        return tuple((key, _shapes(item)) for key, item in value.items())
    return tuple(map(_shapes, value)) if type(value) in (list, tuple) else ()


def zeros_like(value: Any) -> Any:
    """Return an example of zeros in the shapes of this one; None if a part of it is no number."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if value.layout is torch.strided else None
    if isinstance(value, np.ndarray):
        return np.zeros_like(value) if value.dtype.kind in "biufc" else None
    if isinstance(value, bool | int | float):
        return type(value)(0)
    if type(value) is dict:
        parts = {key: zeros_like(item) for key, item in value.items()}
        return None if any(item is None for item in parts.values()) else parts
    if type(value) in (list, tuple):
        items = [zeros_like(item) for item in value]
        return None if any(item is None for item in items) else type(value)(items)
    return None


def _metrics_of(trainer: Trainer, examples: Examples) -> tuple[str, ...]:
    """Return the names of the task's metrics, from the first example that it can be run on."""
    batches = Batches(trainer.task, examples)
    for position in range(min(len(examples), MAX_TRIED)):
        try:
            batch = batches.of((position,))
            _, _, metrics = loss_sum_alone(trainer.task, trainer.image.model, batch)
        except Exception as error:
            log.debug("no metrics from example %d: %s", position, error)
            continue
        return checked_metrics(metrics)
    return ()


def told_examples(request: DeviceRequest, plan: Plan) -> int | None:
    """Return the number of examples that the device tells the server; None if it tells none.

    A device that does not require masks tells its own number in every description.
    """
    if request.settings.secure.aggregation != "off":
        return request.settings.secure.declared_examples
    training, _ = request.trainer.split(request.identity, plan)
    return len(training)


def vitals_without_training(request: DeviceRequest, hardware: Hardware) -> Vitals:
    """Return the readings that do not follow from what the device trained on, and the link's."""
    link = {
        name: rate
        for name, rate in asdict(read_bandwidth(request.context.node_config)).items()
        if rate is not None
    }
    vitals = public_vitals(hardware.vitals()).model_copy(update=link)
    if not request.is_simulated:  # plans are held against it
        records.save_state(request.context, SHARE, {"told": vitals.share})
    return vitals


def padded(report: DeviceReport | ReadyReport) -> RecordDict:
    """Return a report as a message whose length does not show how long its numbers are."""
    head = padded_head(records.json_text(report))
    return records.content_with_head(head, None)
