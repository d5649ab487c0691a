"""What the two sides say to each other in a round: plan, report of a device, and update.

The plain data of both are pydantic models, frozen and bounded: they are checked once, where they
arrive, and trusted after that. The vector itself is never part of them; it travels beside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from headwater.common.settings.schema import Seconds

Natural = Annotated[int, Field(ge=0, le=2**53)]
# Far beyond what float32 can lead to (2^53 losses of 2^128 are below 10^55), and small enough for
# the server to square, and to sum over any cohort, without an overflow.
LARGEST = 1e100
Finite = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e15)]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

StopReason = Literal[
    "quota",
    "epoch end",
    "finish",
    "deadline",
    "asked to stop",
    "on battery",
    "hot",
    "throttled",
    "busy",
    "working hours",
    "short of memory",
]

# A report names each accumulation step, and must fit in one frame of the wire.
MOST_STEPS = 4096
# How far a device may be from its quota where the round is bound by time. A pace changes by up to a
# fifth from one round to the next: a quarter more is what a fifth faster does in the time. Half
# bounds what is lost where T was foreseen badly; a device yet slower is waited for.
MORE_PART = 4
FEWEST_PART = 2
MOST_METRIC_CHARACTERS = 64  # of a name that a masked round tells of


class WireMessage(BaseModel):
    """Data that crosses from one side to the other."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Vitals(WireMessage):
    """What a device knows of itself at the moment; what it has no sensor for is not set."""

    memory_limit_bytes: Natural | None = Field(None, description="what the process may hold")
    base_bytes: Natural | None = Field(None, description="peak of base + bytes per example x size")
    bytes_per_example: NotNegative | None = None
    memory_pressure: Share | None = Field(None, description="of time stalled, PSI some, 10 s")
    cpu_pressure: Share | None = Field(None, description="of time stalled, PSI some, 10 s")
    busy: Share | None = Field(None, description="of the machine's cores, taken by others")
    temperature_celsius: Annotated[float, Field(ge=-100, le=1000)] | None = None
    is_throttled: bool | None = None
    battery: Share | None = Field(None, description="its charge")
    is_on_battery: bool | None = None
    upload_bytes_per_second: Rate | None = Field(None, description="as seen at the last upload")
    download_bytes_per_second: Rate | None = None
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="of its time that the device gives, by its own settings"
    )


class Plan(WireMessage):
    """What one client is asked to do in one round."""

    round: Natural
    run_seed: Natural
    model_version: Natural
    quota: Annotated[int, Field(ge=1, le=2**40)]
    micro_batch_size: Annotated[int, Field(ge=1, le=2**31)]
    local_steps: Annotated[int, Field(ge=1, le=2**20)] = 1
    local_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    precision: Literal["float32", "bfloat16"] = "float32"
    deadline_seconds: Seconds | None = None
    finish_seconds: Seconds | None = Field(
        None,
        description="when the quota is foreseen to be done; a device whose pace is another stops "
        "then, with fewer examples or more",
    )
    counted_round: Natural | None = Field(
        None, description="the last round whose sum this client's update is part of"
    )
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="of the device's time that the quota counts on; not set: K is, and nothing "
        "is taken off",
    )
    weigh_as: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="scale the sum to this weight; not set: it weighs what it was summed over"
    )
    is_masked: bool = Field(
        False, description="answer Ready, keep the update, and await a secure session"
    )
    reason: Annotated[str, Field(max_length=320)] = "as set"

    @property
    def accumulation_steps(self) -> int:
        """K = ceil(quota / micro_batch_size)."""
        return -(-self.quota // self.micro_batch_size)

    @property
    def fewest_examples(self) -> int:
        """What is done before ``finish_seconds`` ends a window."""
        return self.quota if self.finish_seconds is None else -(-self.quota // FEWEST_PART)

    @property
    def most_examples(self) -> int:
        """The quota, and with ``finish_seconds`` a part more, within MOST_STEPS micro-batches."""
        if self.finish_seconds is None:
            return self.quota
        room = max(MOST_STEPS - self.accumulation_steps, 0) * self.micro_batch_size
        return self.quota + min(self.quota // MORE_PART, room)


class DescribeRequest(WireMessage):
    """What the server asks a device when it first sees it."""

    run_seed: Natural
    wants_speed: bool
    layout_digest: str
    num_parameters: Natural
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    left_out: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="why the device that is asked again has no part in the round"
    )


class DeviceReport(WireMessage):
    """What a device says of itself."""

    name: Name
    num_examples: Annotated[int, Field(ge=1, le=2**40)]
    layout_digest: str
    cores: Annotated[float, Field(gt=0, le=4096)] = 1.0
    vitals: Vitals = Vitals()
    seconds_per_micro_batch: Duration | None = Field(None, description="a in a + b x size")
    seconds_per_example: Duration | None = Field(None, description="b in a + b x size")
    fastest_micro_batch_size: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="beyond it an example takes no less time"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One accumulation step of an update, measured.

    Checked where its report arrives, as all that is told. The device makes it without checks: it is
    made behind each micro-batch, where a small model's own work takes a tenth of a millisecond.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    num_examples: Natural
    weight: Natural
    loss: Finite
    gradient_norm: NotNegative | None = None
    """Of the vector summed so far; None: not measured."""
    seconds: NotNegative
    peak_bytes: Natural


class UpdateReport(WireMessage):
    """What a client says of its update beside the vector."""

    name: Name
    round: Natural
    num_examples: Natural
    weight: Natural
    loss_sum: Finite
    metric_sums: dict[str, Finite] = Field(default_factory=dict)
    micro_batch_size: Natural
    num_refused: Natural = Field(0, description="examples left out for a NaN or an exception")
    seconds: NotNegative
    steps: tuple[Step, ...]
    reason: StopReason
    vitals: Vitals = Vitals()
    num_left: Natural | None = Field(
        None, description="examples that its epoch has left behind this window"
    )
    is_checkpointed: bool = Field(
        False, description="activations were computed twice, to save memory"
    )

    @property
    def num_steps(self) -> int:
        """K, as it was."""
        return len(self.steps)

    @property
    def summed_weight(self) -> int:
        """What the losses were summed over, as the steps tell it."""
        return sum(step.weight for step in self.steps)

    @property
    def has_norms(self) -> bool:
        """Whether the steps tell norms, of which the gradient noise follows."""
        return all(step.gradient_norm is not None for step in self.steps)


class ReadyReport(WireMessage):
    """What a client says when it has an update that is to be masked: nothing of what it summed.

    How long its micro-batches take and what they take of its memory stay visible, as what a device
    can do, and not how many there were.
    """

    name: Name
    round: Natural
    seconds: NotNegative
    peak_bytes: Natural
    vitals: Vitals = Vitals()
    seconds_per_micro_batch: Duration | None = Field(None, description="a in a + b x size")
    seconds_per_example: Duration | None = Field(None, description="b in a + b x size")
    metrics: Annotated[
        tuple[Annotated[str, Field(max_length=MOST_METRIC_CHARACTERS)], ...], Field(max_length=48)
    ] = Field((), description="the names of the metrics that it has sums of, sorted")


class EvaluateReport(WireMessage):
    """Sums over the examples that a device holds out."""

    name: Name
    weight: Natural
    loss_sum: Finite
    metric_sums: dict[str, Finite] = Field(default_factory=dict)


class ReportFields(Protocol):
    """What the server reads of an ``UpdateReport``; a simulator keeps a cohort's in columns."""

    @property
    def name(self) -> str: ...
    @property
    def round(self) -> int: ...
    @property
    def num_examples(self) -> int: ...
    @property
    def weight(self) -> int: ...
    @property
    def loss_sum(self) -> float: ...
    @property
    def metric_sums(self) -> Mapping[str, float]: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def num_refused(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def steps(self) -> Sequence[Step]: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def summed_weight(self) -> int: ...
    @property
    def has_norms(self) -> bool: ...
    @property
    def reason(self) -> StopReason: ...
    @property
    def vitals(self) -> Vitals: ...
    @property
    def num_left(self) -> int | None: ...
    @property
    def is_checkpointed(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One client's update: a float32 vector of sums and what is known of it."""

    values_P: Tensor = field(repr=False)
    report: UpdateReport

    @property
    def name(self) -> str:
        """The client's name."""
        return self.report.name
