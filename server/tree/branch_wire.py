"""An aggregator's order and its answers as messages, and back; what it answers is checked.

An aggregator may answer for the devices that were sent to it, and for no other: otherwise it could
have a device of another branch counted as its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from headwater.common.errors import (
    BranchRefused,
    CorruptUpdate,
    HeadwaterError,
    LateUpdate,
    OversizeUpdate,
    SettingsError,
)
from headwater.common.flower.records import MAX_HEAD_CHARACTERS, SHORTER_TERMS
from headwater.common.messages import (
    MAX_FAULTS,
    STEP_BYTES,
    EvaluateReport,
    Plan,
    UpdateReport,
)
from headwater.common.model.layout import ModelLayout
from headwater.common.terms import SumOf
from headwater.common.tree.branch_messages import (
    MAX_REFUSAL_CHARACTERS,
    REPORT_BYTES,
    REPORT_KEYS,
    STEP_KEYS,
    BranchAnswer,
    BranchEvaluation,
    BranchHead,
    BranchPlans,
    ExtraSum,
    Members,
    Refusal,
    SumRules,
    answer_bytes,
    answer_keys,
    num_steps,
    packed,
)
from headwater.common.wording import counted
from headwater.server.aggregation.cohort_sum import PartialSum
from headwater.server.aggregation.extra_sums import sums_of
from headwater.server.aggregation.norm_watch import NormWatch
from headwater.server.fleet import BranchOrder, BranchSum, Dropout, UpdateRules

DataT = TypeVar("DataT", bound=BaseModel)
BranchOrders = Callable[[Mapping[str, Plan]], BranchOrder]
"""Returns the order for a part of the open round's plans."""
KEY = re.compile(rb'"\s*:')
AGAIN = " (again)"  # a second update of a device, in a round's refusals


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchReports:
    """What an aggregator answers to an evaluation: its devices' reports, and why others lack."""

    name: str
    answers: Sequence[EvaluateReport | Dropout]


def branch_plans(
    plans: Mapping[str, Plan],
    order: BranchOrder | None,
    *,
    layout: ModelLayout,
    num_needed: int,
    timeout_seconds: float | None,
) -> BranchPlans:
    """Return the message with a branch's plans; ``order`` is None for an evaluation.

    Raises:
        SettingsError: the plans are longer than a message may be.
    """
    rules, sums = None, dict[str, SumOf]()
    if order is not None:
        sums, given = sums_of(plans.values(), layout.num_parameters), order.rules
        watch = given.norm_watch
        rules = SumRules(
            scale_bits=order.scale_bits,
            max_weight_per_example=given.max_weight_per_example,
            norm_multiple=None if watch is None else watch.multiple,
            largest_median=None if watch is None else watch.largest_median,
            beyond_norm=given.beyond_norm,
        )
    text = packed(plans)
    if len(text) > MAX_HEAD_CHARACTERS:
        raise SettingsError(
            f"the {counted(len(plans), 'plan')} of an aggregator's devices have {len(text):,} "
            f"characters with their terms, and a message has room for {MAX_HEAD_CHARACTERS:,}",
            remedy=SHORTER_TERMS,
        )
    return BranchPlans(
        packed_plans=text,
        num_needed=num_needed,
        timeout_seconds=timeout_seconds,
        answer_bytes=answer_bytes(plans, num_tensors=len(layout.spans), sums=sums),
        rules=rules,
    )


def order_in(message: BranchPlans, plans: Mapping[str, Plan]) -> BranchOrder:
    """Return the order in a message, with its plans.

    Raises:
        CorruptUpdate: it has no rules for a sum.
    """
    rules = message.rules
    if rules is None:
        raise CorruptUpdate("the plans of a branch came without the rules of the sum")
    multiple = rules.norm_multiple
    watch = None
    if multiple is not None:
        watch = NormWatch(multiple=multiple, largest_median=rules.largest_median)
    return BranchOrder(
        plans=plans,
        scale_bits=rules.scale_bits,
        rules=UpdateRules(
            max_weight_per_example=rules.max_weight_per_example,
            norm_watch=watch,
            beyond_norm=rules.beyond_norm,
        ),
    )


def sum_payload(branch: BranchSum) -> tuple[BranchHead, bytes]:
    """Return the head and the vector of an answer with a sum; the sum is copied."""
    total = branch.total
    answer = BranchAnswer(
        scale_bits=total.scale_bits,
        peaks=total.peaks,
        bounds=total.bounds,
        num_shifts=total.num_shifts,
        extra={key: _told(part) for key, part in branch.extra.items()},
        reports=tuple(_without_unused(report) for report in branch.reports),
        unused=tuple(branch.unused),
        norms=dict(branch.norms),
        outliers=tuple(branch.outliers),
        clip_bits=tuple(branch.clip_bits),
        refused={name: Refusal.of(error) for name, error in branch.refused.items()},
        refusals=dict(branch.refusals),
    )
    parts = (total, *branch.extra.values())
    integers = [part.integers_P.astype("<i8", copy=False) for part in parts]
    head = BranchHead(name=branch.name, sum_bytes=sum(one.nbytes for one in integers))
    return head, b"".join((*(one.data for one in integers), _json(answer)))


def _told(part: PartialSum) -> ExtraSum:
    return ExtraSum(
        scale_bits=part.scale_bits,
        peaks=part.peaks,
        bounds=part.bounds,
        num_shifts=part.num_shifts,
    )


def _part(told: BranchAnswer | ExtraSum, integers: NDArray[np.int64]) -> PartialSum:
    return PartialSum(
        integers_P=integers,
        scale_bits=told.scale_bits,
        peaks=told.peaks,
        bounds=told.bounds,
        num_shifts=told.num_shifts,
    )


def evaluation_payload(name: str, answer: BranchEvaluation) -> tuple[BranchHead, bytes]:
    """Return the head and the vector of an answer with the reports of an evaluation."""
    return BranchHead(name=name), _json(answer)


def members_payload(name: str, members: Members) -> tuple[BranchHead, bytes]:
    """Return the head and the vector of an answer with an aggregator's devices."""
    return BranchHead(name=name), _json(members)


def read_sum(
    head: BranchHead, vector: memoryview | bytes, plans: Mapping[str, Plan], layout: ModelLayout
) -> BranchSum:
    """Return the sums in an answer; their integers are views of the vector.

    A device that the answer does not mention is among the refused.

    Raises:
        CorruptUpdate: the answer is malformed, or names a device without a plan among ``plans``.
    """
    asked = sums_of(plans.values(), layout.num_parameters)
    expected = 8 * (layout.num_parameters + sum(one.length for one in asked.values()))
    if head.sum_bytes != expected or len(vector) < expected:
        raise CorruptUpdate(
            f"{head.name}: a sum of {head.sum_bytes:,} bytes in {len(vector):,}, expected "
            f"{expected:,}"
        )
    most_keys = answer_keys(plans, num_sums=len(asked))
    answer = parse(head.name, vector[expected:], BranchAnswer, most_keys=most_keys)
    reported = [report.name for report in answer.reports]
    named = {*reported, *answer.norms, *answer.outliers}
    named |= {name.removesuffix(AGAIN) for name in answer.refused}
    _check_named(head.name, named, plans)
    if len(answer.outliers) > len(set(answer.outliers)):
        raise CorruptUpdate(f"{head.name}: a device is twice among those beyond the norm's limit")
    if len(answer.clip_bits) > len(reported):
        raise CorruptUpdate(f"{head.name}: more bits on the clip norm than updates")
    if answer.extra.keys() != asked.keys():
        raise CorruptUpdate(
            f"{head.name}: it sent the sums {', '.join(answer.extra) or 'none'}, its plans ask for "
            f"{', '.join(asked) or 'none'}",
            remedy="start the aggregator with the same --feature as the server above",
        )
    lengths = [layout.num_parameters, *(asked[key].length for key in answer.extra)]
    integers = np.frombuffer(vector[:expected], dtype="<i8")
    total, *extra = np.split(integers, np.cumsum(lengths)[:-1])
    return BranchSum(
        name=head.name,
        total=_part(answer, total),
        extra={
            key: _part(told, own)
            for (key, told), own in zip(answer.extra.items(), extra, strict=True)
        },
        reports=answer.reports,
        unused=answer.unused,
        norms=answer.norms,
        outliers=answer.outliers,
        clip_bits=answer.clip_bits,
        refused=_refused(head.name, answer.refused, reported, plans),
        refusals=answer.refusals,
    )


def read_evaluation(
    head: BranchHead, vector: memoryview | bytes, plans: Mapping[str, Plan]
) -> BranchReports:
    """Return the reports in an answer, with a Dropout for each other device.

    Raises:
        CorruptUpdate: as ``read_sum``.
    """
    most_keys = answer_keys(plans, num_sums=0)
    answer = parse(head.name, vector, BranchEvaluation, most_keys=most_keys)
    reported = [report.name for report in answer.reports]
    _check_named(head.name, {*reported, *answer.refused}, plans)
    if len(set(reported)) < len(reported):
        raise CorruptUpdate(f"{head.name}: a device is twice in its answer")
    refused = _refused(head.name, answer.refused, reported, plans)
    dropouts = (Dropout(name=name, error=error) for name, error in refused.items())
    return BranchReports(name=head.name, answers=[*answer.reports, *dropouts])


def parse(name: str, data: memoryview | bytes, kind: type[DataT], *, most_keys: int) -> DataT:
    """Return the JSON of an aggregator's answer, which has at most so many keys.

    An error is made for each key that is none of ours, of half a kilobyte: so they are counted.

    Raises:
        CorruptUpdate: it is malformed.
    """
    text = bytes(data)
    if next(islice(KEY.finditer(text), most_keys, None), None) is not None:
        raise CorruptUpdate(f"{name}: {kind.__name__}: more keys than {most_keys:,}")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        if (number := error.error_count()) > MAX_FAULTS:
            raise CorruptUpdate(f"{name}: {kind.__name__}: {number:,} faults") from None
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "json"
        raise CorruptUpdate(f"{name}: {kind.__name__}.{where}: {first['msg'].lower()}") from None


def replies_needed(sizes: Iterable[int], num_needed: int) -> int:
    """Return the replies without which fewer than ``num_needed`` devices can have answered.

    ``sizes`` are the devices in each reply: those of a branch, or one. A reply counts for as many
    as it may hold, so with fewer replies the round is aborted in any case.
    """
    total = 0
    for number, size in enumerate(sorted(sizes, reverse=True), start=1):
        total += size
        if total >= num_needed:
            return number if num_needed else 0
    return num_needed


def check_report(report: UpdateReport | EvaluateReport, plan: Plan) -> None:
    """Check that a device's report fits its part of its aggregator's answer.

    Else the answer would be refused, and with it all other devices of the branch.

    Raises:
        OversizeUpdate: it does not.
    """
    if isinstance(report, UpdateReport):
        report = _without_unused(report)
    text, steps = _json(report), num_steps(plan)
    num_keys, most_keys = len(KEY.findall(text)), REPORT_KEYS + STEP_KEYS * steps
    most_bytes = REPORT_BYTES + STEP_BYTES * steps
    if len(text) > most_bytes or num_keys > most_keys:
        raise OversizeUpdate(
            f"{report.name}: a report of {len(text):,} bytes with {counted(num_keys, 'key')}, "
            f"expected up to {most_bytes:,} and {most_keys:,}",
            remedy="fewer metrics, of shorter names",
        )


def _without_unused(report: UpdateReport) -> UpdateReport:
    return report.model_copy(update={"unused": ()}) if report.unused else report


def _json(data: BaseModel) -> bytes:
    return data.model_dump_json(exclude_none=True).encode()


def _check_named(aggregator: str, named: Iterable[str], plans: Mapping[str, Plan]) -> None:
    for name in named:
        if name not in plans:
            raise CorruptUpdate(f"{aggregator}: it answers for {name}, which is none of its plans")


def of_device(aggregator: str, error: HeadwaterError) -> HeadwaterError:
    """Return what an aggregator says of a device: a breach of the protocol is its word alone.

    Devices are left out for one, and a device may be listed by an aggregator that it never met.
    """
    short = error.message[:MAX_REFUSAL_CHARACTERS]
    if isinstance(error, CorruptUpdate | OversizeUpdate):
        return BranchRefused(f"{aggregator}: {error.code}: {short}")
    return error if short == error.message else type(error)(short, remedy=error.remedy)


def _refused(
    aggregator: str,
    refused: Mapping[str, Refusal],
    reported: Iterable[str],
    plans: Mapping[str, Plan],
) -> dict[str, HeadwaterError]:
    found = {
        name: of_device(aggregator, refusal.error)
        for name, refusal in refused.items()
        if not name.endswith(AGAIN)  # counted among the refusals
    }
    silent = plans.keys() - set(reported) - found.keys()
    late = {name: LateUpdate(f"{name}: not in the answer of {aggregator}") for name in silent}
    return {**found, **late}
