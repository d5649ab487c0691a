"""Settings of the training: model, optimizer, schedule, plan, local training, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from headwater.common.optimizers.presets import LOCAL_BATCH_SIZE, PRESETS, Preset
from headwater.common.settings.fields import (
    RUNS,
    Branch,
    Count,
    Criterion,
    File,
    Name,
    Part,
    Patterns,
    Places,
    Rate,
    Scalar,
    Steps,
    Unit,
    setting,
)
from headwater.common.user_code.task_spec import split_place


class OptimizerSettings(Branch):
    """The server optimizer: any class of ``torch.optim`` that needs no closure."""

    name: Name | None = setting(
        None,
        "class of torch.optim, muon, or FILE.py:NAME of yours; not set: adam, sgd with local steps",
        "--optimizer",
        short=True,
    )
    learning_rate: Rate | None = setting(
        None,
        "the server's; not set: 0.1 for sgd, 0.01 for others, 1 with local steps",
        alias="--lr",
        short=True,
    )
    arguments: dict[str, Scalar | list[float]] = setting(
        {}, "another argument of the optimizer, e.g. momentum=0.9", "--optimizer-argument"
    )

    @property
    def rate(self) -> float:
        """The learning rate: as set, or one that suits the optimizer on small models."""
        default = 0.1 if self.kind.lower() == "sgd" else 0.01
        return default if self.learning_rate is None else self.learning_rate

    @property
    def kind(self) -> str:
        """The optimizer's name: as set, or adam."""
        return "adam" if self.name is None else self.name

    def with_local_steps(self, local: LocalSettings) -> OptimizerSettings:
        """Return the optimizer with every choice made that local training makes for the user.

        Updates of local steps are differences of parameters, which SGD with a rate of 1 adds as
        they are (McMahan et al. 2017, algorithm 1).
        """
        if not local.is_on:
            return self.model_copy(update={"name": self.kind, "learning_rate": self.rate})
        preset, arguments = PRESETS[local.algorithm], self.arguments
        rate = self.learning_rate
        if self.name is None:
            arguments = {**preset.server_arguments, **arguments}
            rate = preset.server_rate if rate is None else rate
        elif self.name.lower() == "sgd" and rate is None:
            rate = 1.0
        return OptimizerSettings(
            name=self.name or "sgd", learning_rate=rate or self.rate, arguments=arguments
        )


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


Precision = Literal["float32", "bfloat16", "auto"]
ChosenPrecision = Literal["float32", "bfloat16"]


class PlanSettings(Branch):
    """What each client computes in a round."""

    accumulation_steps: Steps | None = setting(
        None, "K, micro-batches per update; not set: by each device's speed", short=True
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
    least_share: Part = setting(
        0.25,
        "part of an even share that each client gets if the round then takes at most 5 % longer; "
        "clients with less are named",
    )
    max_micro_batch_size: Count = setting(
        256, "most examples per micro-batch; larger ones are no faster on a CPU", on=""
    )
    max_tokens_per_micro_batch: Count | None = setting(
        None,
        "most tokens of a micro-batch, padding included: its examples x the longest; a longer one "
        "is alone; not set: by each device's memory (docs/large-models.md)",
    )
    memory_fraction: Part = setting(
        0.8, "share of a device's memory limit that the planner fills", on=""
    )
    precision: Precision = setting(
        "float32",
        "precision of the passes: bfloat16 under autocast, or auto: each device takes the faster "
        "one, as it measures; sums are always float32",
    )

    @property
    def set_quota(self) -> int:
        """The examples of a plan if K is set."""
        assert self.accumulation_steps is not None
        return self.accumulation_steps * (self.micro_batch_size or self.set_micro_batch_size)


class LocalSettings(Branch):
    """Local training: several steps on each device in a round (docs/local.md)."""

    algorithm: Literal[
        "exact", "fedavg", "fedprox", "scaffold", "client-momentum", "fedavgm", "diloco"
    ] = setting(
        "exact",
        "exact sums, or local steps (docs/local.md)",
        "--algorithm",
        short=True,
    )
    steps: Steps | None = setting(
        None,
        "H, the local steps of a device in a round: their mean over the devices, faster ones take "
        "more; 1: the exact sum; not set: 50 with fedavgm and diloco",
        "--local-steps",
    )
    epochs: Count | None = setting(
        None,
        "passes of each device over its own examples in a round, in place of --local-steps; not "
        "set: 1, but with fedavgm and diloco",
        "--local-epochs",
    )
    batch_size: Count | None = setting(
        None,
        "examples of one local step of one device; not set: K x micro-batch if K is set, or 16",
        "--local-batch-size",
    )
    optimizer: Name | None = setting(
        None,
        "class of torch.optim, or muon (docs/local.md), for the local steps; not set: sgd, adamw "
        "with fedavgm and diloco",
        "--local-optimizer",
    )
    arguments: dict[str, bool | int | float | list[float]] = setting(
        {},
        "another argument of the local optimizer, e.g. momentum=0.9, which client-momentum has",
        "--local-optimizer-argument",
    )
    learning_rate: Rate | None = setting(
        None,
        "learning rate of the local steps, and of the parameters that stay on the devices; not "
        "set: 0.1 for sgd, 0.001 for others",
        "--local-learning-rate",
    )
    proximal: Annotated[float, Field(ge=0, le=1e6), Unit("MU")] | None = setting(
        None,
        "mu: pull the local steps towards the server's model, as FedProx does; not set: 0, 0.1 "
        "with fedprox",
        "--proximal",
    )
    step_correction: Literal["none", "normalized"] | None = setting(
        None,
        "normalized: devices that take more steps have no more influence, as in FedNova; not set: "
        "normalized where the planner chooses each device's number of steps",
        "--step-correction",
    )

    @property
    def preset(self) -> Preset:
        """What the algorithm's name sets."""
        return PRESETS[self.algorithm]

    @property
    def num_epochs(self) -> int | None:
        """E, the passes over a device's examples; None if H is set."""
        if self.steps is not None:
            return None
        return self.preset.epochs if self.epochs is None else self.epochs

    @property
    def num_steps(self) -> int:
        """H, the local steps of a device on average; 1 if E is set."""
        if self.num_epochs is not None:
            return 1
        return self.steps or self.preset.steps or 1

    @property
    def is_on(self) -> bool:
        """Whether devices take local steps in place of one exact sum."""
        return self.num_epochs is not None or self.num_steps > 1

    @property
    def kind(self) -> str:
        """The local optimizer's name."""
        return self.preset.optimizer if self.optimizer is None else self.optimizer

    @property
    def all_arguments(self) -> dict[str, bool | int | float | list[float]]:
        """The local optimizer's arguments, with those of the algorithm if the optimizer is its."""
        preset = (
            self.preset.local_arguments if self.optimizer in (None, self.preset.optimizer) else {}
        )
        return {**preset, **self.arguments}

    @property
    def keeps_state(self) -> bool:
        """Whether devices keep something of a round for their next one."""
        return self.preset.keeps != "nothing"

    @property
    def rate(self) -> float:
        """The learning rate of the local steps."""
        default = 0.1 if self.kind.lower() == "sgd" else 1e-3
        return default if self.learning_rate is None else self.learning_rate

    @property
    def mu(self) -> float:
        """The proximal term."""
        return self.preset.proximal if self.proximal is None else self.proximal

    def step_examples(self, plan: PlanSettings) -> int:
        """Return B, the examples of one local step of one device."""
        if plan.accumulation_steps is not None:
            return plan.set_quota
        return self.batch_size or LOCAL_BATCH_SIZE


class LocalScheduleSettings(Branch):
    """How the learning rate of local steps changes from round to round."""

    name: Name | None = setting(
        None,
        "class of torch.optim.lr_scheduler for the local learning rate, e.g. CosineAnnealingLR",
        "--local-schedule",
    )
    arguments: dict[str, Scalar | list[int]] = setting(
        {}, "an argument of the local schedule, e.g. T_max=100", "--local-schedule-argument"
    )


MAX_ALGORITHM_CHARACTERS = 1024  # of a client algorithm's name and arguments, in a plan


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


class FeatureSettings(Branch):
    """Features of your own: what plans ask, and what both sides do (docs/extend.md)."""

    name: Places | None = setting(
        None,
        "feature of your own: state, sums beside the model's, selection, holders; the same on both "
        "sides; commas separate several, which act in this order",
        "--feature",
    )
    arguments: dict[str, Scalar | list[float]] = setting(
        {},
        "an argument of the feature's server side, e.g. rate=0.1, of one of several scaffold.rate="
        "0.1; devices get it in their plans",
        "--feature-argument",
        on=RUNS,
    )

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if given and info.data.get("name", "") is None:
            raise ValueError("they are for a feature of your own: name it with --feature")
        return given

    @property
    def names(self) -> Sequence[str]:
        """The features, in the order in which they act."""
        return () if self.name is None else self.name.split(",")


def _plain(value: Any) -> Any:
    """Return an argument with its whole numbers as int, also within a list."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class ModelSettings(Branch):
    """The model that training starts from."""

    initial: File | None = setting(
        None,
        "weights to start from: a run's folder, .safetensors, .pt, .ckpt, or a folder of "
        "save_pretrained; not set: by the seed",
        "--initial-model",
        on=RUNS,
    )
    batch_norm: Literal["frozen", "group"] | None = setting(
        None,
        "frozen: keep BatchNorm's running statistics as they are, and train its scale and shift, "
        "as for a pretrained network; group: GroupNorm in its place, for a network without "
        "statistics; the same on both sides; not set: BatchNorm in training mode is refused",
    )
    frozen_dtype: Literal["bfloat16", "nf4"] | None = setting(
        None,
        "store, send and keep frozen weights in bfloat16, at half the memory, or those of linear "
        "layers in four bits (nf4), at a seventh; the same on both sides; not set: as the task "
        "builds them",
    )
    local_parameters: Patterns | None = setting(
        None,
        "parameters that stay on each device and are trained there alone, such as 'head.*'; commas "
        "separate patterns; the same on both sides (docs/extend.md)",
    )


class VersionSettings(Branch):
    """Dated versions of the model, which a run writes while it goes on (docs/operation.md)."""

    every: Literal["never", "day", "week", "month"] | None = setting(
        None,
        "write the model to OUT/versions in the first round of each such period, by UTC; not set: "
        "week with --rounds forever, else never",
        "--version-every",
    )
    kept: Count | None = setting(
        None, "delete the oldest versions beyond so many; not set: all stay", "--versions-kept"
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
    held_out: Annotated[
        str,
        Field(pattern=r"^(random|last|group:[^\x00-\x1f\x7f]{1,64})$"),
        Unit("random|last|group:COL"),
    ] = setting(
        "random",
        "which: at random; its last ones, for time series; or whole groups by a column, such as "
        "group:patient (docs/data.md)",
        "--held-out",
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

    @field_validator("held_out")
    @classmethod
    def _check_held_out(cls, chosen: str, info: ValidationInfo) -> str:
        if chosen != "random" and not info.data.get("on_devices"):
            raise ValueError("devices hold out examples with --evaluate-on-devices alone")
        return chosen

    @field_validator("patience")
    @classmethod
    def _check_patience(cls, number: int | None, info: ValidationInfo) -> int | None:
        if number is not None and info.data.get("stop_when") is None:
            raise ValueError("patience is for stop_when: name the metric with --stop-when")
        return number
