"""What a device tells of an update that is to be masked, what rides masked, what it insists on.

Training is over before a secure session opens. ``ReadyReport`` says that the update is there, and nothing
of what it came to; weight, loss, metrics and norms leave the device as masked numbers alone. Where
the update waits, and is masked: ``client.secagg.pending``.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.client.device.sensors import has_aes
from headwater.client.enrolment.signing_identity import Enrolment
from headwater.client.secagg.types import Floor, Participant, UnmaskedUpdate
from headwater.client.training.micro_batches import SamplerState
from headwater.common.errors import (
    CountOutOfRange,
    MaskingRequired,
    SettingsError,
    TaskError,
    UpdateRefused,
)
from headwater.common.messages import (
    MOST_METRIC_CHARACTERS,
    Plan,
    ReadyReport,
    Update,
    UpdateReport,
)
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg.masked_numbers import MOST_METRICS, numbers_of
from headwater.common.settings import schema as settings
from headwater.common.stats.gradient_noise import NoiseSums, sums_of
from headwater.common.stats.linear_fit import Line
from headwater.common.task import Task, max_weight_per_example

log = logging.getLogger(__name__)

MODES = ("off", "semi-honest", "active")  # each insists on more than the one before it

# What the device insists on.


def check_masking(
    chosen: settings.SecureSettings, *, is_masked: bool, name: str, what: str
) -> None:
    """Check that the server asks for nothing in clear that the device's own settings want masked.

    Raises:
        MaskingRequired: it does.
    """
    if chosen.aggregation != "off" and not is_masked:
        raise MaskingRequired(
            f"{name}: {what} is asked for in clear, and this device insists on "
            f"{chosen.aggregation} secure aggregation"
        )


def strictest_settings(
    of_run: settings.SecureSettings, *, mode: object = None, min_members: object = None
) -> settings.SecureSettings:
    """Return a run's settings, raised to what the device itself insists on; never lowered.

    Raises:
        SettingsError: ``mode`` or ``min_members`` is none.
    """
    if mode is None and min_members is None:
        return of_run
    if mode is not None and mode not in MODES:
        raise SettingsError(f"secure-aggregation={mode!r} of the node is none of {MODES}")
    if min_members is not None and not isinstance(min_members, int):
        raise SettingsError(f"min-members={min_members!r} of the node is no number")
    strictest = max(of_run.aggregation, mode or "off", key=MODES.index)
    least = max(of_run.min_members, min_members or 0)
    return of_run.model_copy(update={"aggregation": strictest, "min_members": least})


def floor_of(chosen: settings.SecureSettings) -> Floor:
    """Return what the device insists on in a session, by its own settings."""
    return Floor(
        mode="active" if chosen.aggregation == "active" else "semi-honest",
        min_members=chosen.min_members,
        min_survivors=chosen.min_survivors,
        corrupted=chosen.corrupted,
        dropout=chosen.dropout,
    )


# What is told of an update, and what rides masked beside it.


@contextmanager
def hide_details(plan: Plan, name: str) -> Iterator[None]:
    """Let no refusal of a masked plan's update quote what was summed, but in the device's log."""
    try:
        yield
    except UpdateRefused as error:
        if not plan.is_masked:
            raise
        log.warning("%s: %s", error.code, error)
        raise type(error)(
            f"{name}, round {plan.round}: the device keeps the details in its own log"
        ) from error


def ready_message(report: UpdateReport, pace: Line | None) -> ReadyReport:
    """Return what may be told of an update that is to be masked.

    Raises:
        TaskError: see ``trained_of``.
    """
    return ReadyReport(
        name=report.name,
        round=report.round,
        seconds=report.seconds,
        peak_bytes=max((step.peak_bytes for step in report.steps), default=0),
        vitals=report.vitals,
        seconds_per_micro_batch=None if pace is None else pace.base,
        seconds_per_example=None if pace is None else pace.each,
        metrics=_metrics_of(report),
    )


def unmasked_update(
    update: Update, plan: Plan, device: Participant, *, num_owned: int, norm: float
) -> UnmaskedUpdate:
    """Return the vector with the numbers that ride along.

    ``num_owned`` are the examples that the device draws from, ``norm`` is the vector's.

    Raises:
        CountOutOfRange: the weight is beyond the plan's; better said before a session opens.
        TaskError: more metrics than a session has room for, or longer names.
    """
    report = update.report
    if not 0 < report.weight <= device.planned_weight:
        raise CountOutOfRange(
            f"{device.name}: weight {report.weight:,}, its plan allows {device.planned_weight:,}"
        )
    # Local steps move the model between the two batch sizes that tell the noise.
    is_noise_told = plan.local_steps == 1
    noise = (
        sums_of(report, num_owned=num_owned) if is_noise_told else NoiseSums(weight=report.weight)
    )
    return UnmaskedUpdate(
        values_P=update.values_P,
        numbers=numbers_of(
            report, metrics=_metrics_of(report), noise=noise, squared_norm=norm * norm
        ),
    )


def _metrics_of(report: UpdateReport) -> tuple[str, ...]:
    names = tuple(sorted(report.metric_sums))
    if len(names) > MOST_METRICS or any(len(name) > MOST_METRIC_CHARACTERS for name in names):
        raise TaskError(
            f"{len(names)} metrics: masked rounds have room for {MOST_METRICS}, with names of up "
            f"to {MOST_METRIC_CHARACTERS} characters",
            remedy="return fewer metric sums from loss_sum, or give them shorter names",
        )
    return names


def participant_of(
    plan: Plan,
    walk: SamplerState,
    *,
    name: str,
    run_id: int,
    task: Task,
    image: ModelImage,
    chosen: settings.SecureSettings,
    enrolment: Enrolment,
) -> Participant:
    """Return who the device is in the sessions of an update, and which update that is.

    ``walk`` is the one behind the training: the window went from its place to the pending one. The
    image must be the one that was trained.
    """
    return Participant(
        name=name,
        run=run_id,
        round=plan.round,
        model_digest=hashlib.sha256(image.buffer()).digest(),
        num_values=image.layout.num_parameters,
        planned_weight=plan.weigh_as or max_weight_per_example(task) * plan.most_examples,
        update_id=update_id(run_id, plan, walk),
        floor=floor_of(chosen),
        identity=enrolment.identity,
        allow_list=enrolment.allow_list,
        has_aes=has_aes(),
    )


def update_id(run_id: int, plan: Plan, walk: SamplerState) -> str:
    """Name an update by run, model and examples: the same for the same sum, restarted or not."""
    place, pending = walk.place, walk.pending_place
    return (
        f"run {run_id}, model {plan.model_version}, examples {place.epoch}:{place.offset} to "
        f"{pending.epoch}:{pending.offset}"
    )
