"""Declares every setting of the project, once, as one frozen pydantic tree.

A field holds all that is known of a setting: key, type, range, unit, default, meaning and flag.
``flags.py`` generates the command line from this tree, ``sources.py`` reads the TOML file and the
flags into it, and ``introspection.py`` writes docs/settings.md. To add a setting, add a field.

The tree also travels as Flower's flat ``run_config`` (dotted keys), so that the same apps find the
same settings on every engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ValidationInfo, field_validator

from headwater.common.data.partition_spec import PartitionRule, parse_rule
from headwater.common.settings.fields import (
    Address,
    Branch,
    Bytes,
    Count,
    Criterion,
    Delta,
    Epsilon,
    File,
    Folder,
    Fraction,
    Hours,
    Kind,
    Name,
    NoiseMultiplier,
    Part,
    Patterns,
    Probability,
    Rate,
    Scalar,
    Seconds,
    Steps,
    Unit,
    branch,
    setting,
)
from headwater.common.task_spec import split_place

SETTINGS_FILE = "settings.toml"

# The commands that have a flag; a branch names them for its fields. `check` and `doctor` take every
# flag of the client, so that its command line can be examined as it is.
RUNS = "server simulate"
DEVICE = "client check doctor"
ALL = f"{RUNS} {DEVICE}"

# The headings of --help-all, in this order.
TASK = "Task"
DEVICE_PANEL = "This device"
SERVER = "The server"
SIMULATION = "Simulation"
TRAINING = "Training"
PLAN = "What each client computes"
RUN = "The run"
SECURE = "Secure aggregation (docs/security.md)"
TLS = "TLS (all three files on both sides, or none on loopback)"
PRIVACY = "Differential privacy (docs/privacy.md)"
PANELS = (TASK, DEVICE_PANEL, SERVER, SIMULATION, TRAINING, PLAN, RUN, SECURE, PRIVACY, TLS)


class OptimizerSettings(Branch):
    """The server optimizer: any class of ``torch.optim`` that needs no closure."""

    name: Name = setting(
        "adam",
        "class of torch.optim: adam, adamw, sgd; or FILE.py:NAME, package.module:NAME of your own",
        "--optimizer",
        short=True,
    )
    learning_rate: Rate | None = setting(
        None,
        "learning rate of the server optimizer; not set: 0.1 for sgd, 0.01 for others",
        alias="--lr",
        short=True,
    )
    arguments: dict[str, Scalar | list[float]] = setting(
        {}, "another argument of the optimizer, e.g. momentum=0.9", "--optimizer-argument"
    )

    @property
    def rate(self) -> float:
        """The learning rate: as set, or one that suits the optimizer on small models."""
        default = 0.1 if self.name.lower() == "sgd" else 0.01
        return default if self.learning_rate is None else self.learning_rate


class ScheduleSettings(Branch):
    """How the learning rate changes from round to round."""

    name: Name | None = setting(
        None, "class of torch.optim.lr_scheduler, e.g. CosineAnnealingLR", "--schedule"
    )
    arguments: dict[str, Scalar | list[int]] = setting(
        {}, "an argument of the schedule, e.g. T_max=100", "--schedule-argument"
    )
    batch_scaling: Literal["none", "linear", "sqrt"] = setting(
        "none", "scale the learning rate by the gathered / the planned effective batch size"
    )
    warmup_rounds: int = setting(
        0, "rounds of linear growth of the learning rate, from 1/(rounds + 1) of it", ge=0
    )


class PlanSettings(Branch):
    """What each client computes in a round."""

    accumulation_steps: Steps | None = setting(
        None, "K, the micro-batches per update; not set: by each device's speed", short=True
    )
    micro_batch_size: Count | None = setting(
        None, "examples per micro-batch; not set: by each device's memory, 16 with K", short=True
    )
    set_micro_batch_size: Count = setting(
        16, "examples per micro-batch if only K (accumulation_steps) is set", on=""
    )
    effective_batch_size: Count = setting(
        512, "examples per round over the whole cohort; the planner divides them"
    )
    tokens_per_update: Count | None = setting(
        None, "replaces effective_batch_size: tokens, or whatever the task's weight counts"
    )
    follow_noise_scale: bool = setting(
        False, "adapt the examples per round to the gradient noise scale (docs/batch.md)"
    )
    max_effective_batch_size: Count = setting(
        65_536, "most examples per round when following the gradient noise scale"
    )
    max_micro_batch_size: Count = setting(
        256, "most examples per micro-batch; larger ones are no faster on a CPU", on=""
    )
    memory_fraction: Part = setting(
        0.8, "share of a device's memory limit that the planner fills", on=""
    )
    local_steps: Steps = setting(
        1, "local SGD steps per round; above 1, use a server learning rate of 1"
    )
    local_learning_rate: Rate = setting(
        0.1, "learning rate of the local steps, and of the parameters that stay on the devices"
    )
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "precision of the forward pass; sums are always float32"
    )


class AlgorithmSettings(Branch):
    """How a client makes its vector from its examples (docs/extend.md)."""

    name: Annotated[str, Unit("FILE.py:CLASS")] | None = setting(
        None,
        "client algorithm of your own, such as FedProx; the same on both sides; not set: the exact "
        "sum, or local_steps",
        "--client-algorithm",
    )
    arguments: dict[str, Scalar | list[float]] = setting(
        {},
        "an argument of the client algorithm, e.g. mu=0.1; the same on both sides",
        "--algorithm-argument",
    )

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if given and info.data.get("name", "") is None:
            raise ValueError("they are for a client algorithm: name it with --client-algorithm")
        return given

    @property
    def label(self) -> str | None:
        """The algorithm's own name, without its file or module, and its arguments: FedProx(mu=0.1).

        Server and device compare it. The order of the arguments, and 1 or 1.0, make no difference.
        """
        if self.name is None:
            return None
        given = [f"{key}={_plain(value)!r}" for key, value in sorted(self.arguments.items())]
        place, name = split_place(self.name)
        return (name or place) + (f"({', '.join(given)})" if given else "")


def _plain(value: Any) -> Any:
    """Return an argument with its whole numbers as int, also within a list."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class CohortSettings(Branch):
    """Which clients are invited, and how long a round waits."""

    min_clients: Count = setting(1, "fewest clients for a round to start and count", short=True)
    size: Count | None = setting(None, "clients invited per round; not set: all", "--cohort-size")
    deadline_seconds: Seconds | None = setting(
        None, "a round ends then with the updates it has; not set: wait for all", "--deadline"
    )
    max_aborted_rounds: Count = setting(
        5, "aborted rounds in a row after which the run gives up", on=""
    )
    weighting: Literal["samples", "dataset"] = setting(
        "samples", "weight of an update; samples: its own; dataset: its client's examples"
    )
    invite_within_rounds: Count = setting(
        10,
        "a client too slow for the deadline, or late three times in a row, is still invited once "
        "in so many rounds",
        "--invite-within",
    )
    return_seconds: Seconds = setting(
        5.0,
        "how long, from the loss of its connection, a client may return to a round whose other "
        "clients are done; while any of them works it may return in any case",
        on="",
    )
    reconnect_seconds: Seconds = setting(
        60.0, "the same while the round has too few updates; and how long a stream may stall", on=""
    )


class AggregationSettings(Branch):
    """How plain updates are combined, and what a single one may do (docs/security.md)."""

    rule: Literal["sum", "clipped", "trimmed-mean", "median", "krum"] = setting(
        "sum",
        "how updates become a gradient; all but sum withstand false updates, cost accuracy where "
        "devices' data differ, and need every single vector: they are refused with masks",
        "--aggregation",
    )
    attackers: float = setting(
        0.2, "share of a round's updates that trimmed-mean and krum withstand", ge=0, lt=0.5
    )
    norm_multiple: Rate = setting(
        100.0,
        "largest norm of an update, per unit of its weight, as a multiple of the largest median of "
        "a round so far",
    )
    beyond_norm: Literal["refuse", "clip", "keep"] = setting(
        "refuse",
        "what happens to a plain update of a larger norm; it is counted in any case",
    )


class SecureSettings(Branch):
    """Secure aggregation: the server sees the cohort's sum, and no single update."""

    aggregation: Literal["off", "semi-honest", "active"] = setting(
        "off",
        "hide single updates from the server; active: even from a server that cheats",
        "--secure-aggregation",
        on=ALL,
        short=True,
    )
    ring_bits: Literal[16, 32] = setting(
        32, "bits of a masked coordinate; 16 halves the traffic and rounds coarser"
    )
    min_members: int = setting(
        3,
        "fewest members of a secure session; all members but one, if they collude, see the last "
        "one's update: with 3 members, two suffice, so set it as high as the fleet allows",
        on=ALL,
        ge=3,
    )
    min_quota: int = setting(
        8, "fewest examples of a masked plan; a device answers no plan of fewer", ge=1
    )
    max_plans: int = setting(
        16, "masked plans in a row that a device trains on with the same examples", on="", ge=1
    )
    order_seed: int | None = setting(
        None,
        "order of this device's examples in masked rounds; not set: secret, and drawn once; 0: "
        "that of a plain round, as the simulator has it",
        on="",
        ge=0,
        le=2**53,
    )
    declared_examples: int | None = setting(
        None,
        "the number of examples that a masking device tells the server, for --weighting dataset; "
        "not set: none",
        on=DEVICE,
        ge=1,
        le=2**40,
    )
    min_survivors: Part = setting(
        0.7, "share of a session's members below which a device reveals nothing", on=""
    )
    max_share: Part = setting(
        0.6, "largest part of a session's planned weight that a device accepts for itself", on=""
    )
    member_bits: int = setting(
        4, "a device requires 2^this steps of the ring for each member", on="", ge=1, le=24
    )
    corrupted: Probability = setting(
        0.1, "share of devices assumed to collude; decides the graph of more than 64 members", on=""
    )
    dropout: Probability = setting(
        0.1, "share of devices assumed to drop out, in cohorts above 64", on=""
    )
    phase_seconds: Seconds = setting(20.0, "how long the server waits in each phase", on="")
    identity: File | None = setting(
        None, "file of this device's signing identity (active)", on=f"{DEVICE} identity"
    )
    allow_list: File | None = setting(
        None,
        "file with a line NAME KEY for each identity that this device trusts (active); never get "
        "it from the server",
        on=DEVICE,
    )


class PrivacySettings(Branch):
    """Differential privacy of each device's whole part (docs/privacy.md)."""

    epsilon: Epsilon | None = setting(
        None,
        "bound what all rounds reveal of any one device to this epsilon: clip updates and add "
        "noise; the server does it in plain rounds, the devices under masks",
        "--privacy-epsilon",
    )
    delta: Delta = setting(
        1e-5,
        "delta of the privacy; far below one over the number of devices",
        "--privacy-delta",
        on=ALL,
    )
    noise_multiplier: NoiseMultiplier | None = setting(
        None,
        "in place of an epsilon: the noise of a round's sum, in clip norms",
        "--privacy-noise-multiplier",
    )
    clip: Rate = setting(
        1.0, "L2 norm to which a device's mean gradient is clipped", "--privacy-clip"
    )
    budget: Epsilon | None = setting(
        None,
        "the most that this device spends over all its runs; it refuses rounds without noise",
        "--privacy-budget",
        on=DEVICE,
    )

    @field_validator("noise_multiplier")
    @classmethod
    def _check_noise(cls, number: float | None, info: ValidationInfo) -> float | None:
        if number is not None and info.data.get("epsilon") is not None:
            raise ValueError("the noise follows from privacy.epsilon: set one of the two")
        return number

    @property
    def is_on(self) -> bool:
        """Whether the run's rounds have noise."""
        return self.epsilon is not None or self.noise_multiplier is not None


class ModelSettings(Branch):
    """The model that training starts from."""

    initial: File | None = setting(
        None,
        "file of weights to start from (safetensors); not set: by the seed",
        "--initial-model",
        on=RUNS,
    )
    replace_batch_norm: bool = setting(
        False,
        "use GroupNorm in place of BatchNorm, which mixes examples; the same on both sides",
        "--replace-batch-norm/--keep-batch-norm",
    )
    local_parameters: Patterns | None = setting(
        None,
        "parameters that stay on each device and are trained there alone, such as 'head.*'; commas "
        "separate patterns; the same on both sides (docs/extend.md)",
    )


class EvaluationSettings(Branch):
    """When and where the model is tested."""

    every_rounds: Count = setting(
        1, "rounds between tests; the last round is always tested", "--evaluate-every"
    )
    on_devices: bool = setting(
        False,
        "test also on examples that the devices hold out",
        "--evaluate-on-devices/--no-evaluate-on-devices",
    )
    held_out_fraction: float = setting(
        0.1, "share of a device's examples that is held out, if on_devices", on="", gt=0, lt=1
    )
    best: Criterion | None = setting(
        None,
        "also keep best.safetensors, the model of the best evaluated round, by a metric such as "
        "accuracy, loss, min:NAME or max:NAME (docs/model.md)",
    )
    stop_when: Criterion | None = setting(
        None, "end the run when this metric has not improved for `patience` evaluations"
    )
    patience: Count | None = setting(
        None, "evaluations without improvement after which stop_when ends the run; not set: 10"
    )

    @field_validator("patience")
    @classmethod
    def _check_patience(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is not None and info.data.get("stop_when") is None:
            raise ValueError("patience is for stop_when: name the metric with --stop-when")
        return number


class TlsSettings(Branch):
    """Three PEM files; all or none."""

    ca: File | None = setting(None, "the authority's certificate", "--tls-ca")
    certificate: File | None = setting(None, "this side's certificate", "--tls-certificate")
    key: File | None = setting(None, "this side's private key", "--tls-key")


METRICS = (
    "where to serve Prometheus metrics, in plain text (not only on loopback: --public-metrics)"
)


class ServerSettings(Branch):
    """The aggregation server's own settings."""

    listen: Address = setting(
        "127.0.0.1:8500", "where clients connect; port 0 takes a free port", short=True
    )
    enrolment_listen: Address | None = setting(
        None, "where devices join while a join token is valid; not set: the port after `listen`"
    )
    metrics: Address | None = setting(None, METRICS)
    staging_bytes: Bytes = setting(
        64 * 2**20, "memory for uploads in progress; the rest goes to a spool file", on=""
    )


class ClientSettings(Branch):
    """A device's own settings."""

    server: Address = setting("127.0.0.1:8500", "address of the server", short=True)
    name: Name | None = setting(
        None, "the device's unique name; not set: the host's", on=f"{DEVICE} identity", short=True
    )
    data: Path | None = setting(None, "this device's own file or folder of examples", short=True)
    part: int = setting(0, "this device's part of bundled data, from 0", ge=0, short=True)
    num_parts: Count = setting(1, "parts that the task splits bundled data into", short=True)
    state: Folder | None = setting(
        None, "folder for the device's position in its examples; not set: ~/.local/state/headwater"
    )
    memory_limit_bytes: Bytes | None = setting(
        None,
        "use no more memory; not set: what machine and cgroup allow",
        "--memory-limit",
        short=True,
    )
    spool: Folder | None = setting(
        None, "folder that keeps a half-summed update through a power cut"
    )
    battery_share: Part = setting(
        0.5, "share of the time that the planner may count on, on battery"
    )
    hot_celsius: float = setting(80.0, "temperature above which it is hot", on="", ge=0, le=200)
    hot_share: Part = setting(0.5, "share of its time when hot, or throttled", on="")
    busy_above: Fraction = setting(
        0.75, "share of the cores taken by other programs that makes the device busy", on=""
    )
    busy_share: Part = setting(
        1.0, "share of its time when busy; its speed, and so its quota, falls in any case", on=""
    )
    active_hours: Hours | None = setting(
        None,
        "when the device takes part, by this machine's clock: 22:00-06:00, or Mon-Fri "
        "18:00-08:00, Sat-Sun 00:00-24:00; outside these hours it disconnects; not set: always "
        "(docs/install.md)",
        short=True,
    )
    inactive_share: Fraction = setting(
        0.0, "share of its time outside the active hours; 0: it disconnects", on=""
    )
    bytes_per_day: Bytes | None = setting(
        None,
        "send and receive no more from midnight to midnight, by this machine's clock; then stay "
        "away until the next day",
    )
    metrics: Address | None = setting(None, METRICS)
    stay: bool = setting(
        False, "wait for the next run when one has ended", "--stay/--leave", short=True
    )
    patience_seconds: Seconds = setting(
        600.0, "give up after so long without contact", "--patience"
    )

    @property
    def state_folder(self) -> Path:
        """The folder for the device's position; by default where XDG puts state."""
        if self.state is not None:
            return self.state
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(base) / "headwater"


class PartitionSettings(Branch):
    """How one data set is partitioned over the devices of a run (docs/data.md)."""

    kind: Kind = setting(
        "task",
        "how to split one data set over the devices: iid, dirichlet:ALPHA, labels:N, column:NAME "
        "or quantity:SIGMA (docs/data.md); task: as the task does",
        "--partition",
        short=True,
    )
    examples_per_device: Count | None = setting(
        None, "each device draws so many, and devices share; not set: each example once"
    )

    @field_validator("examples_per_device")
    @classmethod
    def _check_examples(cls, number: int | None, info: ValidationInfo) -> int | None:
        # ValueError if the partition, which was checked before, takes no such number.
        parse_rule(info.data.get("kind", "iid"), examples_per_device=number, seed=0)
        return number

    def rule(self, *, seed: int) -> PartitionRule | None:
        """Return the partition with the run's seed; None if the task splits its own data."""
        return parse_rule(self.kind, examples_per_device=self.examples_per_device, seed=seed)


class SimulationSettings(Branch):
    """Many clients on one machine."""

    clients: Count = setting(
        100,
        "simulated devices; with a fleet or own data, as many as there are",
        on="simulate sweep",
        short=True,
    )
    data: Annotated[str, Unit("PATTERN")] | tuple[str, ...] | None = setting(
        None,
        "the devices' own data, a file or folder each: 'devices/*.csv', in quotes; with "
        "--partition the one data set to split (docs/data.md)",
        on="simulate sweep",
        short=True,
    )
    fleet: Annotated[Path, Unit("FLEET.toml")] | None = setting(
        None,
        "file of the devices' speed, memory, link and availability (docs/fleet.md); not set: drawn "
        "by the seed",
        short=True,
    )
    dropout: Probability = setting(
        0.0, "probability that an invited device drops out, in training or in a secure phase"
    )
    faults: Annotated[Path, Unit("FAULTS.toml")] | None = setting(
        None,
        "file of faults to inject: dropouts at a phase, slow links, lying devices (docs/fleet.md)",
    )
    engine: Literal["in-process", "grpc", "flower-ray"] = setting(
        "in-process",
        "how the devices run; grpc: a server and a process per device, over the real wire; "
        "flower-ray: on Flower's Ray workers",
    )
    compute: Literal["auto", "one-by-one", "vectorised", "fused"] = setting(
        "auto",
        "how the devices compute; one-by-one: the same bits as the wire; vectorised: many devices "
        "in a pass, each with its own norms; fused: their sum alone; auto: the fastest that fits",
    )
    workers: Count | Literal["auto"] = setting(
        1, "processes that compute devices one by one; auto: one per usable core"
    )


class Settings(Branch):
    """The whole tree."""

    task: Annotated[str, Unit("FILE.py:Class")] | None = setting(
        None,
        "your task: FILE.py:Class or package.module:Class; the simulator without one trains the "
        "bundled digits",
        on=f"{ALL} sweep",
        panel=TASK,
        short=True,
    )
    seed: int = setting(
        0,
        "seed of the initial model, the partition, the order of examples and the cohorts",
        on=ALL,
        panel=TRAINING,
        ge=0,
        le=2**53,
    )
    rounds: Count = setting(
        100, "server steps to take", on=f"{RUNS} sweep", panel=TRAINING, short=True
    )
    threads: Count | None = setting(
        None,
        "threads of torch; equal numbers give equal bits; not set: 1 in the simulator, all usable "
        "cores elsewhere",
        on=ALL,
        panel=RUN,
    )
    out: Folder | None = setting(
        None,
        "folder for model, metrics and checkpoints; not set: runs/TASK-TIME",
        on=RUNS,
        panel=RUN,
        short=True,
    )
    track: Annotated[str, Unit("mlflow|wandb|FILE.py:CLASS")] | None = setting(
        None,
        "record the run with MLflow or Weights & Biases, or with an observer of your own "
        "(docs/extend.md)",
        on=RUNS,
        panel=RUN,
    )
    check_task: bool = setting(
        True,
        "test on real examples that the task's loss is a sum, and try the client algorithm",
        "--check/--no-check",
        on="client simulate",
        panel=TASK,
    )
    plain_text: bool = setting(
        False,
        "allow a run without TLS and certificates beyond loopback: anyone on the way may read and "
        "change models and updates, and anyone may join",
        on=f"server {DEVICE}",
        panel=TLS,
    )
    public_metrics: bool = setting(
        False,
        "allow --metrics beyond loopback, in plain text and without a password: anyone who reaches "
        "the port may read devices' names and figures",
        on=f"server {DEVICE}",
        panel=TLS,
    )
    optimizer: OptimizerSettings = branch(OptimizerSettings, TRAINING, on=RUNS)
    schedule: ScheduleSettings = branch(ScheduleSettings, TRAINING, on=RUNS)
    plan: PlanSettings = branch(PlanSettings, PLAN, on=RUNS)
    algorithm: AlgorithmSettings = branch(AlgorithmSettings, PLAN, on=ALL)
    cohort: CohortSettings = branch(CohortSettings, RUN, on=RUNS)
    aggregation: AggregationSettings = branch(AggregationSettings, RUN, on=RUNS)
    secure: SecureSettings = branch(SecureSettings, SECURE, on=RUNS)
    privacy: PrivacySettings = branch(PrivacySettings, PRIVACY, on=RUNS)
    model: ModelSettings = branch(ModelSettings, TASK, on=ALL)
    evaluation: EvaluationSettings = branch(EvaluationSettings, RUN, on=RUNS)
    tls: TlsSettings = branch(TlsSettings, TLS, on=f"server {DEVICE}")
    server: ServerSettings = branch(ServerSettings, SERVER, on="server")
    client: ClientSettings = branch(ClientSettings, DEVICE_PANEL, on=DEVICE)
    partition: PartitionSettings = branch(PartitionSettings, TASK, on=f"simulate {DEVICE}")
    simulation: SimulationSettings = branch(SimulationSettings, SIMULATION, on="simulate")

    def to_toml(self) -> str:
        """Return the tree as TOML; settings that are not set are left out, as TOML has no null."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))

    def to_run_config(self) -> dict[str, Scalar]:
        """Flatten the tree to Flower's run_config: dotted keys, scalar values."""
        return dict(flattened(self.model_dump(mode="json", exclude_none=True)))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    """Yield each value of a tree with its dotted key; a list's keys end in its positions."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            for position, item in enumerate(value):
                yield f"{prefix}{key}.{position}", item
        else:
            yield prefix + key, value
