"""The messages between a server and its aggregators: the devices of a branch, its plans, its sum.

An aggregator's reply has a small head. Its vector holds the branch's sum, if the reply has one, and
then the other data as JSON: so the reports of a thousand devices need not fit in one frame. Plans
are packed instead, as an instruction is one frame; they differ in few characters.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from headwater.common.errors import CorruptUpdate, HeadwaterError, error_of, travelling
from headwater.common.flower.records import json_text
from headwater.common.messages import (
    MAX_FAULTS,
    STEP_BYTES,
    DescribeRequest,
    DeviceReport,
    EvaluateReport,
    Name,
    NamedTerms,
    Natural,
    NotNegative,
    Plan,
    Unused,
    UpdateReport,
    WireMessage,
)
from headwater.common.settings.fields import Seconds
from headwater.common.terms import SumOf, named
from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES

MEMBERS, TRAIN_BRANCH, EVALUATE_BRANCH = "members", "train.branch", "evaluate.branch"
MAX_MEMBERS = 10_000
"""The devices of one aggregator: their packed plans fit in a frame of the stream."""
MAX_MEMBERS_BYTES = MAX_MEMBERS * 4096
MAX_REFUSAL_CHARACTERS = 300
MAX_PACKED_BYTES = 16 << 20
MAX_TENSORS = 2**20
# Bytes of JSON: of a tensor's scale, of a sum beside the model's, and of all but the reports.
TENSOR_BYTES, SUM_BYTES, ANSWER_BYTES = 128, 512, 64 << 10
# Of a device's report and norm without its steps; and its keys in JSON, and those of a step.
REPORT_BYTES, REPORT_KEYS, STEP_KEYS = 8 << 10, 128, 8
ANSWER_KEYS = 4096  # of all but the reports

PerTensor = Annotated[tuple[NotNegative, ...], Field(max_length=MAX_TENSORS)]
ScaleBits = Annotated[
    tuple[Annotated[int, Field(ge=-(2**15), le=2**15)], ...], Field(max_length=MAX_TENSORS)
]
Code = Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9_]+$")]
"""The name of an error's class."""
Plans = Annotated[dict[Name, Plan], Field(max_length=MAX_MEMBERS)]


class MembersRequest(WireMessage):
    """The server's request for the devices that an aggregator has now."""

    describe: DescribeRequest
    left_out: dict[Name, Annotated[str, Field(max_length=200)]] = Field(
        default_factory=dict, description="devices to be described again, and why"
    )


class Members(WireMessage):
    """The devices that are connected to an aggregator and have described themselves."""

    devices: Annotated[tuple[DeviceReport, ...], Field(max_length=MAX_MEMBERS)]


class SumRules(WireMessage):
    """How an aggregator adds its devices' updates (``server.fleet.BranchOrder``)."""

    scale_bits: ScaleBits
    max_weight_per_example: Annotated[int, Field(ge=1, le=2**53)]
    norm_multiple: NotNegative | None = None
    largest_median: NotNegative | None = None
    beyond_norm: Literal["refuse", "clip", "keep"]


class SharedPlans(WireMessage):
    """The plans of a branch, with terms that several of them have written once."""

    plans: Plans = Field(description="without their terms")
    terms: tuple[NamedTerms, ...] = Field(description="one in each")
    asked: dict[Name, tuple[Natural, ...]] = Field(description="the places of a plan's terms")

    @classmethod
    def of(cls, plans: Mapping[str, Plan]) -> SharedPlans:
        """Return plans with each object among their terms once."""
        shared = {id(one): one for plan in plans.values() for one in plan.terms.values()}
        places = {number: at for at, number in enumerate(shared)}
        return cls(
            plans={
                name: plan.model_copy(update={"terms": {}}) if plan.terms else plan
                for name, plan in plans.items()
            },
            terms=tuple(named(one) for one in shared.values()),
            asked={
                name: tuple(places[id(one)] for one in plan.terms.values())
                for name, plan in plans.items()
                if plan.terms
            },
        )

    def each(self) -> dict[str, Plan]:
        """Return the plans with their terms.

        Raises:
            CorruptUpdate: a plan has terms that are not here.
        """
        found = dict(self.plans)
        for name, places in self.asked.items():
            if name not in found or max(places, default=0) >= len(self.terms):
                raise CorruptUpdate(f"packed plans: {name} has no plan, or terms that are not here")
            terms = chain.from_iterable(self.terms[at].values() for at in places)
            found[name] = found[name].asking(*terms)
        return found


class BranchPlans(WireMessage):
    """An aggregator's part of a round: its devices' plans."""

    packed_plans: str
    num_needed: Natural = Field(
        0, description="with fewer answers the round is aborted, so lost devices are awaited longer"
    )
    timeout_seconds: Seconds | None = None
    answer_bytes: Natural = Field(description="the most bytes of the answer beside the model's sum")
    rules: SumRules | None = Field(None, description="None: the plans are for an evaluation")

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans by the devices' names.

        Raises:
            CorruptUpdate: they cannot be unpacked, or one of them is no plan.
        """
        try:
            return SharedPlans.model_validate_json(unpacked(self.packed_plans)).each()
        except ValidationError as error:
            if (number := error.error_count()) > MAX_FAULTS:  # each in Python takes a kilobyte
                raise CorruptUpdate(f"BranchPlans: {number:,} faults") from None
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(step) for step in first["loc"])
            raise CorruptUpdate(f"BranchPlans.{where}: {first['msg'].lower()}") from None


class BranchHead(WireMessage):
    """The head of an aggregator's reply; ``sum_bytes`` of its vector are the sum."""

    name: Name
    sum_bytes: Natural = 0


class Refusal(WireMessage):
    """Why a device is not in a branch's answer."""

    code: Code
    text: Annotated[str, Field(max_length=2000)]

    @classmethod
    def of(cls, error: HeadwaterError) -> Refusal:
        """Return what may travel of an error."""
        code, text = travelling(error)
        # What stands before a colon in quotes would count as a key of the answer.
        return cls(code=code[:100], text=text[:MAX_REFUSAL_CHARACTERS].replace('"', "'"))

    @property
    def error(self) -> HeadwaterError:
        """The error that it says."""
        return error_of(self.code, self.text)


Refusals = Annotated[dict[str, Refusal], Field(max_length=2 * MAX_MEMBERS)]


class ExtraSum(WireMessage):
    """What comes with a branch's sum beside the model's: one tensor, added up as the model's."""

    scale_bits: ScaleBits
    peaks: PerTensor
    bounds: PerTensor
    num_shifts: Natural


class BranchAnswer(WireMessage):
    """What comes with a branch's sum (``server.fleet.BranchSum``)."""

    scale_bits: ScaleBits
    peaks: PerTensor
    bounds: PerTensor
    num_shifts: Natural
    extra: dict[str, ExtraSum] = Field(
        default_factory=dict, description="in the order in which they follow the model's sum"
    )
    reports: Annotated[tuple[UpdateReport, ...], Field(max_length=MAX_MEMBERS)]
    unused: Unused = Field(description="what no update's losses used; no report says it again")
    norms: dict[Name, NotNegative]
    outliers: tuple[Name, ...]
    clip_bits: tuple[Literal[0, 1], ...]
    refused: Refusals
    refusals: Annotated[dict[Code, Natural], Field(max_length=1000)]


class BranchEvaluation(WireMessage):
    """A branch's sums over held-out examples, one report a device."""

    reports: Annotated[tuple[EvaluateReport, ...], Field(max_length=MAX_MEMBERS)]
    refused: Refusals


def packed(plans: Mapping[str, Plan]) -> str:
    """Return plans as compressed text.

    Raises:
        SettingsError: a tensor of their terms is longer than a message may be.
    """
    data = json_text(SharedPlans.of(plans)).encode()
    return base64.b64encode(zlib.compress(data)).decode("ascii")


def unpacked(text: str, *, max_bytes: int = MAX_PACKED_BYTES) -> bytes:
    """Return the JSON of compressed text, which may not expand beyond ``max_bytes``.

    Raises:
        CorruptUpdate: it is no compressed text, or too long.
    """
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), max_bytes)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise CorruptUpdate(f"packed plans that cannot be unpacked: {error}") from error
    if not stream.eof:
        raise CorruptUpdate(f"packed plans of more than {max_bytes:,} bytes, or only part of them")
    return data


def answer_bytes(plans: Mapping[str, Plan], *, num_tensors: int, sums: Mapping[str, SumOf]) -> int:
    """Return the most bytes, beside the model's sum, in which a branch may answer these plans."""
    room = sum(REPORT_BYTES + STEP_BYTES * num_steps(plan) for plan in plans.values())
    extra = sum(8 * one.length + SUM_BYTES for one in sums.values())
    return ANSWER_BYTES + num_tensors * TENSOR_BYTES + room + extra


def answer_keys(plans: Mapping[str, Plan], *, num_sums: int) -> int:
    """Return the most keys of JSON in a branch's answer: each that is none of ours costs memory."""
    room = sum(REPORT_KEYS + STEP_KEYS * num_steps(plan) for plan in plans.values())
    return ANSWER_KEYS + REPORT_KEYS * num_sums + room


def num_steps(plan: Plan) -> int:
    """Return the most steps of a plan's report, as many as a message has room for."""
    return min(plan.max_windows * (plan.max_examples + 1), MAX_REPLY_HEAD_BYTES // STEP_BYTES)
