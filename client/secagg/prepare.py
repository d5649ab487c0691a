"""Prepares an update for masking: the client's own requirements, and what may be sent in clear.

Training ends before a secure session opens. ``ReadyReport`` says only that the plan was carried
out; weight, loss, metrics and norms leave the client as masked numbers alone.
``client.secagg.pending`` keeps the update until its session.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from headwater.client.device.sensors import has_aes
from headwater.client.enrolment.signing_identity import Enrolment
from headwater.client.secagg.types import Floor, Participant, UnmaskedUpdate
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import MaskingRequired, TaskError
from headwater.common.estimates.gradient_noise import NoiseSums, noise_sums
from headwater.common.messages import Plan, Update, Vitals
from headwater.common.model.vectors import zero_tensors
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.masked_numbers import SUMMED_WEIGHT, numbers_of
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.settings import schema as settings
from headwater.common.task import MAX_METRIC_CHARACTERS, MAX_METRICS, max_weight_per_example

# The client's own settings.


def check_masking(
    secure: settings.SecureSettings, *, is_masked: bool, name: str, what: str
) -> None:
    """Check that the server requests nothing in clear that the client's settings require masked.

    Raises:
        MaskingRequired: it does.
    """
    if secure.aggregation != "off" and not is_masked:
        raise MaskingRequired(
            f"{name}: the server requests {what} in clear, and this device requires "
            f"{secure.aggregation} secure aggregation"
        )


def floor_of(secure: settings.SecureSettings) -> Floor:
    """Return the security floor that the client's settings define."""
    return Floor(
        mode="active" if secure.aggregation == "active" else "semi-honest",
        min_members=secure.min_members,
        min_survivors=secure.min_survivors,
        max_share=secure.max_share,
        member_bits=secure.member_bits,
        corrupted=secure.corrupted,
        dropout=secure.dropout,
    )


# What leaves the client in clear, and what is masked.

PADDED_BYTES = 1024


def padded_head(head: str) -> str:
    """Return a message's JSON with spaces at its end, to a multiple of ``PADDED_BYTES``.

    So the length of a number in it is not seen on an encrypted line, nor counted by the server.
    """
    num_bytes = len(head.encode())
    return head + " " * (-num_bytes % PADDED_BYTES)


def public_vitals(vitals: Vitals) -> Vitals:
    """Return the readings that do not follow from what the device trained on."""
    return vitals.model_copy(update=dict.fromkeys(OF_TRAINING))


OF_TRAINING = (
    "base_bytes",
    "bytes_per_example",
    "memory_pressure",
    "cpu_pressure",
    "busy",
    "temperature_celsius",
    "is_throttled",
)
"""Vitals that training changes: they could differ with the examples that it trained on."""


def unmasked_update(
    update: Update,
    plan: Plan,
    *,
    spans: Sequence[tuple[int, int]],
    num_owned: int,
    norm: float,
) -> UnmaskedUpdate:
    """Return the vector and the numbers that are to be masked; the vector is not yet encoded.

    ``num_owned`` is the number of the client's examples, ``norm`` the vector's Euclidean norm,
    ``spans`` where each trained tensor is in the vector.
    """
    report = update.report
    # The noise scale compares two batch sizes at one model; local steps move the model in between,
    # and a client algorithm may send another vector than the sum.
    noise = NoiseSums(weight=report.weight)
    privacy = plan.of(PrivacyTerms)
    if privacy is not None:
        norm = 0.0
    elif plan.asks_model and not plan.moves_model:
        noise = noise_sums(report, num_owned=num_owned)
    num_zero = 0
    if privacy is None and plan.coding is None:
        used = set(range(len(spans))).difference(report.unused)
        num_zero = len(zero_tensors(update.values_P, spans, used))
    numbers = numbers_of(report, noise=noise, squared_norm=norm * norm, num_zero=num_zero)
    if not plan.asks_model:  # there are no steps
        numbers[SUMMED_WEIGHT] = report.weight
    # What is beyond its limit is refused nowhere: see with_usable_values.
    sums_S = plan.extra_sums(len(update.values_P)).flat(update.sums, name=report.name)
    return UnmaskedUpdate(values_P=update.values_P, numbers=numbers, sums_S=sums_S)


def checked_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Return the sorted names of a task's metrics.

    Raises:
        TaskError: there are more metrics, or longer names, than a session has room for.
    """
    found = tuple(sorted(names))
    if len(found) > MAX_METRICS or any(len(name) > MAX_METRIC_CHARACTERS for name in found):
        raise TaskError(
            f"the task returns {len(found)} metrics: masked rounds have room for {MAX_METRICS}, "
            f"with names of up to {MAX_METRIC_CHARACTERS} characters",
            remedy="return fewer metric sums from loss_sum, or give them shorter names",
        )
    return found


def participant_of(
    plan: Plan,
    examples: tuple[int, ...],
    trainer: Trainer,
    *,
    name: str,
    run_id: int,
    model_digest: bytes,
    floor: Floor,
    enrolment: Enrolment,
) -> Participant:
    """Return the client's identity, floor and update id for the sessions of one update.

    ``examples`` are the numbers of the plan's examples in the client's data.
    """
    return Participant(
        name=name,
        run=run_id,
        round=plan.round,
        model_digest=model_digest,
        other_subjects=plan.other_subjects,
        plan_digest=plan_digest(plan, trainer.task_code),
        num_values=plan.num_sent(trainer.image.layout.num_parameters),
        planned_weight=plan.weigh_as or max_weight_per_example(trainer.task) * plan.max_examples,
        update_id=update_id(model_digest, examples, plan.other_subjects),
        examples=examples,
        num_planned=plan.max_examples,
        floor=floor,
        identity=enrolment.identity,
        allow_list=enrolment.allow_list,
        has_aes=has_aes(),
        privacy=plan.of(PrivacyTerms),
        sums=plan.extra_sums(trainer.image.layout.num_parameters).of,
    )


def update_id(
    model_digest: bytes, examples: Iterable[int], other_subjects: Iterable[bytes] = ()
) -> str:
    """Name an update by what it is of and its examples: the same sum has the same id in every run.

    A test of a model on most examples is of the model's digest too, and of a subject of its own.
    """
    numbers = np.array(sorted(examples), dtype="<i8").tobytes()
    found = hashlib.sha256(b"".join([numbers, *other_subjects])).hexdigest()
    return f"model {model_digest.hex()[:32]}, examples {found[:32]}"
