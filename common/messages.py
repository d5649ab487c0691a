"""The messages of a round: plans, device reports, and the report that goes with an update.

Messages are frozen pydantic models with bounded fields: they are checked once, on arrival, and
trusted after that. An update's vector is not part of its report; it travels separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    SerializeAsAny,
)
from pydantic_core import CoreSchema
from torch import Tensor

from headwater.common.settings.fields import MAX_LABELS, Seconds, checked_labels
from headwater.common.settings.training import (
    MAX_ALGORITHM_CHARACTERS,
    ChosenPrecision,
    Precision,
)
from headwater.common.sums.encoded_vector import EncodedVector, Vector, VectorCoding, coding_in
from headwater.common.task import MAX_METRIC_CHARACTERS, MAX_METRICS
from headwater.common.terms import Terms, TermsT, read_terms, written_terms
from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES

if TYPE_CHECKING:
    from headwater.common.sums.named_sums import NamedSums

Natural = Annotated[int, Field(ge=0, le=2**53)]
# Far above what float32 can lead to (2^53 losses of 2^128 are below 10^55), and small enough for
# the server to square, and to sum over any cohort, without overflow.
MAX_VALUE = 1e100
Finite = Annotated[float, Field(ge=-MAX_VALUE, le=MAX_VALUE, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=MAX_VALUE, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Proportion = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[float, Field(ge=1e-12, le=2**53)]
Rate = Annotated[float, Field(gt=0, le=1e15)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

GROUP = "group:"
HeldOut = Annotated[str, Field(pattern=r"^(random|last|group:[^\x00-\x1f\x7f]{1,64})$")]
"""Which examples a device holds out: at random, its last ones, or whole groups by a column."""

StopReason = Literal[
    "quota",
    "finish",
    "deadline",
    "asked to stop",
    "on battery",
    "hot",
    "throttled",
    "busy",
    "inactive hours",
    "short of memory",
]

# A report lists each accumulation step, and must fit in one frame of the wire format.
MAX_STEPS = 4096
# With ``finish_seconds`` a device may do quota / 5 more examples, or as many fewer: its speed
# changes by up to a fifth from one round to the next. If the time was predicted badly, the round
# still sums its target to a fifth; the server waits for a device that is slower than that.
FINISH_DIVISOR = 5
# A report names the tensors that no loss used; a model has seldom a hundred of them.
MAX_UNUSED = 1 << 14
# Of a report's JSON: without its steps, and of a step.
HEAD_BYTES, STEP_BYTES = 128 << 10, 256
MAX_FEATURES = 64
MAX_FAULTS = 1000
"""Of a message with more faults than these none is named: each takes a kilobyte to say."""
AlgorithmLabel = Annotated[str, Field(max_length=MAX_ALGORITHM_CHARACTERS)]
"""The client algorithm that a device must have, as FedProx(mu=0.1)."""

TaskCode = Annotated[str, Field(pattern=r"^.{1,100} [0-9a-f]{64}$")]
"""The name of a task's class and the digest of its code (``user_code.task_spec.code_of``)."""
# A pydantic pattern that repeats Unicode's letters compiles to 15 MB, in 50 ms.
Labels = Annotated[str, Field(max_length=MAX_LABELS), AfterValidator(checked_labels)]
FrozenDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The digest of the model's frozen part (``common.model.frozen_part``)."""

FeatureName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,79}$")]

NamedTerms = Annotated[
    dict[FeatureName, SerializeAsAny[Terms]],
    Field(max_length=MAX_FEATURES),
    BeforeValidator(read_terms),
    PlainSerializer(written_terms, when_used="json"),
]

Unused = Annotated[tuple[Natural, ...], Field(max_length=MAX_UNUSED)]
MetricName = Annotated[str, Field(max_length=MAX_METRIC_CHARACTERS)]
MetricSums = Annotated[dict[MetricName, Finite], Field(max_length=MAX_METRICS)]
MetricNames = Annotated[tuple[MetricName, ...], Field(max_length=MAX_METRICS)]


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        found = {key: _failing_fast(part) for key, part in schema.items()}
        is_sequence = schema.get("type") in ("list", "tuple", "set", "frozenset")
        return {**found, "fail_fast": True} if is_sequence else found
    return [_failing_fast(part) for part in schema] if isinstance(schema, list) else schema


class WireMessage(BaseModel):
    """The base of every message between client and server: frozen, with no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let each sequence end at its first fault: an error takes a kilobyte, an item 3 bytes."""
        found: CoreSchema = _failing_fast(handler(source))
        return found


class Vitals(WireMessage):
    """A device's sensor readings and limits; None where the device has no sensor."""

    memory_limit_bytes: Natural | None = Field(None, description="memory that the process may use")
    base_bytes: Natural | None = Field(None, description="peak of base + bytes per example x size")
    bytes_per_example: NotNegative | None = None
    memory_pressure: Proportion | None = Field(
        None, description="fraction of time stalled (PSI some, 10 s)"
    )
    cpu_pressure: Proportion | None = Field(
        None, description="fraction of time stalled (PSI some, 10 s)"
    )
    busy: Proportion | None = Field(
        None, description="fraction of the cores that other processes use"
    )
    temperature_celsius: Annotated[float, Field(ge=-100, le=1000)] | None = None
    is_throttled: bool | None = None
    battery: Proportion | None = Field(None, description="charge, as a fraction")
    is_on_battery: bool | None = None
    upload_bytes_per_second: Rate | None = Field(None, description="measured at the last upload")
    download_bytes_per_second: Rate | None = None
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="fraction of its time that the device gives, by its own settings"
    )


class Plan(WireMessage):
    """One client's instructions for one round."""

    round: Natural
    run_seed: Natural
    model_version: Natural
    quota: Annotated[int, Field(ge=1, le=2**40)]
    micro_batch_size: Annotated[int, Field(ge=1, le=2**31)]
    max_tokens: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="of a micro-batch with its padding; a longer example is alone"
    )
    precision: Precision = "float32"
    deadline_seconds: Seconds | None = None
    finish_seconds: Seconds | None = Field(
        None,
        description="predicted time for the quota; a slower or faster device stops then, with "
        "fewer or more examples",
    )
    counted_round: Natural | None = Field(
        None, description="the last round whose sum contains an update of this client"
    )
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    held_out: HeldOut = "random"
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="fraction of the device's time that the quota assumes; not set where K is "
        "fixed, and then the device does not reduce its quota",
    )
    weigh_as: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="scale the sum to this weight; not set: the sum keeps its own"
    )
    frozen: FrozenDigest | None = Field(
        None, description="the model's frozen part, which the device has; None if it has none"
    )
    reason: Annotated[str, Field(max_length=320)] = "as set"
    terms: NamedTerms = Field(default_factory=dict, description="what features ask, by their names")

    def of(self, kind: type[TermsT]) -> TermsT | None:
        """Return a feature's terms; None if it asks nothing."""
        found = self.terms.get(kind.NAME)
        return found if isinstance(found, kind) else None

    def asking(self, *terms: Terms) -> Plan:
        """Return the plan with these terms too, in the place of others of their names."""
        return self.model_copy(update={"terms": {**self.terms, **{t.NAME: t for t in terms}}})

    @property
    def asks_model(self) -> bool:
        """See ``Terms``, as of the properties below."""
        return all(one.asks_model for one in self.terms.values())

    def digest_at(self, model_digest: bytes) -> bytes:
        """Return the digest of what the update is of: of the model, unless no term asks for it.

        A device masks each example once at it.
        """
        subjects = () if self.asks_model else (one.subject for one in self.terms.values())
        return next((one for one in subjects if one is not None), model_digest)

    @property
    def other_subjects(self) -> tuple[bytes, ...]:
        return tuple(chain.from_iterable(one.other_subjects for one in self.terms.values()))

    @property
    def vector_bound(self) -> float | None:
        found = (one.vector_bound for one in self.terms.values())
        return min((bound for bound in found if bound is not None), default=None)

    @property
    def repeats_examples(self) -> bool:
        return any(one.repeats_examples for one in self.terms.values())

    @property
    def moves_model(self) -> bool:
        return any(one.moves_model for one in self.terms.values())

    @property
    def uses_whole_window(self) -> bool:
        return any(one.uses_whole_window for one in self.terms.values())

    @property
    def has_planned_weight(self) -> bool:
        return any(one.has_planned_weight for one in self.terms.values())

    @property
    def carries_state(self) -> bool:
        return any(one.carries_state for one in self.terms.values())

    @property
    def is_private(self) -> bool:
        return any(one.is_private for one in self.terms.values())

    @property
    def hides_pace(self) -> bool:
        return any(one.hides_pace for one in self.terms.values())

    @property
    def hides_data(self) -> bool:
        return any(one.hides_data for one in self.terms.values())

    @property
    def keeps_update(self) -> bool:
        return any(one.keeps_update for one in self.terms.values())

    @property
    def max_windows(self) -> int:
        return max((one.max_windows for one in self.terms.values()), default=1)

    @property
    def overlaps(self) -> bool:
        return any(one.overlaps for one in self.terms.values())

    @property
    def after_round(self) -> int | None:
        found = (one.after_round for one in self.terms.values())
        return next((number for number in found if number is not None), None)

    def num_sent(self, num_values: int) -> int:
        """Return how many coordinates of a vector are sent."""
        return min((one.num_sent(num_values) for one in self.terms.values()), default=num_values)

    def extra_sums(self, num_values: int) -> NamedSums:
        """Return the sums beside the model's that the update brings."""
        from headwater.common.sums.named_sums import named_sums  # most plans ask for none

        return named_sums(self.terms.values(), num_values)

    def model_bytes(self, num_values: int) -> int:
        """Return the bytes of the model's own sum in the update; 0 if it is sent later or never."""
        if not self.asks_model:
            return 0
        found = (one.update_bytes(num_values) for one in self.terms.values())
        return min((number for number in found if number is not None), default=4 * num_values)

    def update_bytes(self, num_values: int) -> int:
        """Return the bytes of the update's vector, with the sums beside the model's."""
        num_bytes = self.model_bytes(num_values)
        if not self.terms or self.keeps_update:
            return num_bytes
        return num_bytes + self.extra_sums(num_values).num_bytes

    @property
    def accumulation_steps(self) -> int:
        """K = ceil(quota / micro_batch_size)."""
        return -(-self.quota // self.micro_batch_size)

    @property
    def head_bytes(self) -> int:
        """The most bytes of the answer's head: of its report, with a step for each example."""
        if self.keeps_update:
            return HEAD_BYTES
        most = HEAD_BYTES + STEP_BYTES * self.max_windows * (self.max_examples + 1)
        return min(most, MAX_REPLY_HEAD_BYTES)

    @property
    def coding(self) -> VectorCoding | None:
        """How the update is encoded; None: as float32."""
        return coding_in(self.terms.values(), run_seed=self.run_seed, round_number=self.round)

    def quota_of(self, num_owned: int) -> int:
        """Return the quota of a device that owns so many examples.

        An exact sum uses no example twice, so that the cohort's step is that of one large batch;
        only local steps pass over a device's examples again.
        """
        return self.quota if self.repeats_examples else min(self.quota, num_owned)

    @property
    def answer_by(self) -> float | None:
        """The seconds after which the plan is answered, at most the deadline; None: any."""
        found = (one.answers_after for one in self.terms.values())
        times = [seconds for seconds in found if seconds is not None]
        if times and self.deadline_seconds is not None:
            times.append(self.deadline_seconds)
        return min(times, default=None)

    @property
    def min_examples(self) -> int:
        """Return the fewest examples after which ``finish_seconds`` may end the update."""
        is_flexible = self.finish_seconds is not None
        return self.quota - self.quota // FINISH_DIVISOR if is_flexible else self.quota

    @property
    def max_examples(self) -> int:
        """Return the quota; with ``finish_seconds`` a fifth more, within MAX_STEPS steps."""
        if self.finish_seconds is None:
            return self.quota
        room = max(MAX_STEPS - self.accumulation_steps, 0) * self.micro_batch_size
        return self.quota + min(self.quota // FINISH_DIVISOR, room)


class DescribeRequest(WireMessage):
    """The server's request for a device's description, at its first connection."""

    run_seed: Natural
    wants_speed: bool
    precision: Precision = Field("float32", description="what the plans will ask to compute in")
    layout_digest: str
    num_parameters: Natural
    layout: str = Field("", description="the model's tensors, for common.model.mismatch")
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    held_out: HeldOut = "random"
    algorithm: AlgorithmLabel | None = None
    left_out: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="why the device, when described again, is excluded from the round"
    )
    frozen: FrozenDigest | None = Field(
        None, description="the model's frozen part; None if it has none"
    )
    task: TaskCode | None = Field(
        None, description="in a masked run: the task, which all members must have"
    )


class DataShare(WireMessage):
    """Which data a device has."""

    part: Natural
    num_parts: Annotated[int, Field(ge=1, le=2**53)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = Field(
        None, description="of a few examples, keyed with the run's seed; None: they have none"
    )


class DeviceReport(WireMessage):
    """A device's description of itself."""

    name: Name
    num_examples: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="None: a device that requires masks does not tell it"
    )
    data: DataShare | None = Field(
        None, description="None: a device that requires masks does not tell it"
    )
    layout_digest: str
    cores: Annotated[float, Field(gt=0, le=4096)] = 1.0
    vitals: Vitals = Vitals()
    seconds_per_micro_batch: Duration | None = Field(None, description="a in a + b x size")
    seconds_per_example: Duration | None = Field(None, description="b in a + b x size")
    fastest_micro_batch_size: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="larger micro-batches take no less time per example"
    )
    metrics: MetricNames = Field(
        (), description="for masked rounds: sorted names of the metrics that the task returns"
    )
    precision: ChosenPrecision = Field(
        "float32", description="what the device computes its passes in"
    )
    lacks_frozen: bool = Field(
        False, description="the device has not the frozen part that the request names"
    )
    task: TaskCode | None = Field(None, description="which task the device trains")
    labels: Labels | None = Field(
        None, description="what its owner says of it, as site=lab,kind=pi; None: nothing"
    )
    is_aggregator: bool = Field(
        False, description="it trains nothing itself, and lists its own devices when asked"
    )


class FrozenPart(WireMessage):
    """The model's frozen part, whose bytes come beside, for a device that lacks it."""

    digest: FrozenDigest


class FrozenReport(WireMessage):
    """A device's message that it has the frozen part, and keeps it."""

    name: Name
    digest: FrozenDigest


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One accumulation step of an update, measured.

    Checked on arrival like every message. The device constructs it without checks: it does so after
    each micro-batch, and a small model's own work takes only a tenth of a millisecond.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_examples: Natural
    weight: Natural
    loss: Finite
    gradient_norm: NotNegative | None = None
    """Norm of the vector summed so far; None if it was not measured.

    It is measured after the first step with weight and after the last.
    """
    seconds: NotNegative
    peak_bytes: Natural
    size: Size | None = None
    """Where examples differ in length: the examples of the usual length that it equals, padded."""

    @property
    def work(self) -> float:
        """The size that the seconds follow."""
        return self.num_examples if self.size is None else self.size


class UpdateReport(WireMessage):
    """What a client reports about its update, in addition to the vector."""

    name: Name
    round: Natural
    num_examples: Natural
    weight: Natural
    loss_sum: Finite
    metric_sums: MetricSums = Field(default_factory=dict)
    micro_batch_size: Natural
    num_refused: Natural = Field(0, description="examples excluded for a NaN or an exception")
    num_joined: Natural = Field(0, description="examples that are new in the device's data")
    num_left: Natural = Field(0, description="examples that are no longer in the device's data")
    num_owned: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="examples that the device has since some joined or left"
    )
    seconds: NotNegative
    steps: Annotated[tuple[Step, ...], Field(max_length=2 * MAX_STEPS)]
    reason: StopReason
    local_steps: Natural = Field(1, description="local steps of all windows in this sum")
    unused: Unused = Field(
        (), description="places of the trained tensors that no loss used: their gradient is None"
    )
    vitals: Vitals = Vitals()
    is_checkpointed: bool = Field(False, description="activations were recomputed to save memory")
    num_windows: Annotated[int, Field(ge=1, le=2**20)] = Field(
        1, description="windows of the plan in this sum; more than one if the device had no link"
    )
    clip_bit: Literal[0, 1] | None = Field(
        None, description="of a private plan that asks for it; 1: the vector was not clipped"
    )

    @property
    def num_steps(self) -> int:
        """The number of accumulation steps done, K."""
        return len(self.steps)

    @property
    def measured(self) -> list[tuple[float, float]]:
        """The work and the seconds of each step that has examples."""
        return [(step.work, step.seconds) for step in self.steps if step.num_examples]

    @property
    def peak_bytes(self) -> int:
        """The largest memory of a step; 0 if none is known."""
        return max((step.peak_bytes for step in self.steps), default=0)

    @property
    def summed_weight(self) -> int:
        """The weight that the losses were summed over, from the steps."""
        return sum(step.weight for step in self.steps)

    @property
    def has_norms(self) -> bool:
        """Whether the first step with weight and the last have gradient norms.

        The gradient noise follows from these two.
        """
        first = next((step for step in self.steps if step.weight), None)
        return first is not None and None not in (first.gradient_norm, self.steps[-1].gradient_norm)


class ReadyReport(WireMessage):
    """A client's message that it has done its masked plan; nothing in it depends on its data.

    A client whose window has no usable example sends the same message: its update has weight 0.
    """

    name: Name
    round: Natural
    seconds: NotNegative | None = Field(
        None, description="of a simulated clock; a real device tells none, the server measures"
    )
    vitals: Vitals = Field(
        Vitals(), description="read before training; no memory or load of the training itself"
    )


class EvaluateReport(WireMessage):
    """Sums over a device's held-out examples."""

    name: Name
    weight: Natural
    loss_sum: Finite
    metric_sums: MetricSums = Field(default_factory=dict)
    num_refused: Natural = Field(0, description="examples excluded for a NaN or an exception")
    labels: Labels | None = Field(None, description="of the device, for metrics of each label")


class HoldOut(Protocol):
    """The fields of a plan or a request that say which examples the device holds out."""

    @property
    def run_seed(self) -> int: ...
    @property
    def held_out_fraction(self) -> float: ...
    @property
    def held_out(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One client's update: a float32 vector of sums, and its report."""

    values_P: Tensor = field(repr=False)
    report: UpdateReport
    sums: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The sums beside the model's, by name."""
    encoded: EncodedVector | None = field(default=None, repr=False)
    """The vector as it arrived, if the plan compresses it; ``values_P`` is then empty."""

    @property
    def name(self) -> str:
        """The client's name."""
        return self.report.name

    def joined_sums(self, plan: Plan, *, num_values: int) -> bytes:
        """Return the sums beside the model's, of ``num_values``, as they are sent.

        Raises:
            CorruptUpdate: they are not those that the plan asks for.
            NonFiniteUpdate, OutlierUpdate: one is not finite, or beyond its limit.
        """
        if not plan.terms:
            return b""
        return plan.extra_sums(num_values).joined(self.sums, name=self.name)

    def as_sent(self, plan: Plan, *, num_values: int) -> Update:
        """Return an update of this process with its sums as the other side would read them.

        Raises:
            CorruptUpdate, NonFiniteUpdate, OutlierUpdate: see ``joined_sums``.
        """
        if not plan.terms:
            return self
        data = memoryview(self.joined_sums(plan, num_values=num_values))
        return replace(self, sums=plan.extra_sums(num_values).read(data, name=self.name))

    @property
    def vector(self) -> Vector:
        """The vector, in either form."""
        return self.values_P if self.encoded is None else self.encoded
