"""Every setting of the project, one frozen tree for server, client and simulator.

One TOML file serves all three commands; a flag on the command line overrides the file. The tree
also travels as Flower's flat ``run_config`` (dotted keys), so that the same apps find the same
settings whichever engine runs them.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headwater.common.data.partition_spec import Rule, rule_of
from headwater.common.errors import SettingsError
from headwater.common.settings.weekly_hours import weekly

SETTINGS_FILE = "settings.toml"

Scalar = bool | int | float | str
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Part = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]


def _hours(text: str) -> str:
    weekly(text)  # ValueError if these are no windows of the week
    return text


Hours = Annotated[str, AfterValidator(_hours)]


class Branch(BaseModel):
    """A branch of the tree: frozen, and unknown keys are an error rather than ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerSettings(Branch):
    """The server optimizer: any class of ``torch.optim`` that needs no closure."""

    name: str = Field("sgd", description="class in torch.optim, in any case: sgd, adam, adamw")
    learning_rate: float = Field(0.1, gt=0, allow_inf_nan=False, description="its lr")
    arguments: dict[str, Scalar | list[float]] = Field(
        default_factory=dict, description="its other arguments, e.g. momentum = 0.9"
    )


class ScheduleSettings(Branch):
    """How the learning rate changes from round to round."""

    name: str | None = Field(None, description="class in torch.optim.lr_scheduler")
    arguments: dict[str, Scalar | list[int]] = Field(
        default_factory=dict, description="its arguments, e.g. T_max = 100"
    )
    batch_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="the rate grows with the effective batch over plan.effective_batch_size, "
        "linearly or by its square root",
    )
    warmup_rounds: int = Field(
        0,
        ge=0,
        description="rounds of linear growth of the rate, from 1/(warmup + 1) of it",
    )


class PlanSettings(Branch):
    """What a client is asked to do in a round."""

    accumulation_steps: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="K, the same for all, 4096 at most; not set: the planner decides"
    )
    micro_batch_size: Count | None = Field(
        None, description="examples per micro-batch; not set: the planner decides by memory"
    )
    set_micro_batch_size: Count = Field(
        16, description="the micro-batch size where K is set and no size is"
    )
    effective_batch_size: Count = Field(
        512, description="examples the planner gathers per round over the whole cohort"
    )
    tokens_per_update: Count | None = Field(
        None, description="weight instead of examples: tokens that the planner gathers per round"
    )
    follow_noise_scale: bool = Field(
        False, description="gather as many examples as the gradient noise scale says"
    )
    max_effective_batch_size: Count = Field(
        65_536, description="the most examples that the noise scale may ask for"
    )
    max_micro_batch_size: Count = Field(
        256, description="beyond this a CPU gains no speed from larger micro-batches"
    )
    memory_fraction: float = Field(
        0.8, gt=0, le=1, description="share of a device's memory limit that the planner fills"
    )
    local_steps: Annotated[int, Field(ge=1, le=4096)] = Field(
        1, description="H > 1: fewer, longer rounds of H local SGD steps each"
    )
    local_learning_rate: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="of those local steps"
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the forward pass; sums are float32 always"
    )


class CohortSettings(Branch):
    """Who is invited, and how long a round waits."""

    min_clients: Count = Field(1, description="clients without which no round starts or counts")
    size: Count | None = Field(None, description="clients invited per round; not set: all")
    deadline_seconds: Seconds | None = Field(None, description="not set: wait for all")
    max_aborted_rounds: Count = Field(
        5, description="aborted rounds in a row after which the run gives up"
    )
    weighting: Literal["samples", "dataset"] = Field(
        "samples",
        description="what an update weighs: what it was summed over, or what its device owns",
    )
    invite_within_rounds: Count = Field(
        10,
        description="a device that is too slow for the deadline, or came late three times in a "
        "row, is still asked once in so many",
    )
    reconnect_seconds: Seconds = Field(
        60.0, description="how long a client that vanished may take to come back in a round"
    )


class SecureSettings(Branch):
    """Secure aggregation: the server sees the cohort's sum, and no device's (docs/security.md)."""

    aggregation: Literal["off", "semi-honest", "active"] = Field(
        "off", description="active: identities, signed keys and signed survivors besides"
    )
    ring_bits: Literal[16, 32] = Field(32, description="16 halves the traffic, and rounds coarser")
    min_members: Annotated[int, Field(ge=3)] = Field(
        3, description="of a session; a device refuses one with fewer than its own"
    )
    min_survivors: Annotated[float, Field(gt=0, le=1)] = Field(
        0.7, description="share of a session's members without whom a device reveals nothing"
    )
    corrupted: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of devices assumed to collude, above 64 in a cohort"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of devices assumed to vanish, above 64 in a cohort"
    )
    phase_seconds: Seconds = Field(20.0, description="how long the server waits in each phase")
    identity: Path | None = Field(None, description="this device's signing identity (active)")
    allow_list: Path | None = Field(
        None, description="names and public keys that this device trusts (active)"
    )


class ModelSettings(Branch):
    """The model that everybody starts from."""

    initial: Path | None = Field(None, description="safetensors file with the state_dict's names")
    replace_batch_norm: bool = Field(False, description="put GroupNorm in place of BatchNorm")


class EvaluationSettings(Branch):
    """When and where the model is tested."""

    every_rounds: Count = Field(1, description="rounds between tests; the last is always tested")
    on_devices: bool = Field(False, description="also on examples that the devices hold out")
    held_out_fraction: float = Field(
        0.1, gt=0, lt=1, description="of a device's own examples, if on_devices"
    )


class TlsSettings(Branch):
    """Three PEM files; all or none."""

    ca: Path | None = Field(None, description="the authority's certificate")
    certificate: Path | None = Field(None, description="this side's")
    key: Path | None = Field(None, description="this side's private key")


class ServerSettings(Branch):
    """The aggregation server's own settings."""

    listen: str = Field("127.0.0.1:8500", description="HOST:PORT")
    enrolment_listen: str | None = Field(
        None, description="HOST:PORT for devices that join; not set: the next port after `listen`"
    )
    metrics: str | None = Field(
        None, description="HOST:PORT of the Prometheus metrics, plain text; not set: none"
    )
    staging_bytes: Count = Field(
        64 * 2**20, description="uploads in flight held in RAM; beyond it they go to a spool file"
    )


class ClientSettings(Branch):
    """A device's own settings."""

    server: str = Field("127.0.0.1:8500", description="HOST:PORT")
    name: str | None = Field(None, description="not set: the host's name")
    data: Path | None = Field(None, description="this device's own file or folder")
    part: int = Field(0, ge=0, description="of a task that splits bundled data: which part")
    num_parts: Count = Field(1, description="of how many parts")
    state: Path | None = Field(None, description="folder for the device's place in its examples")
    memory_limit_bytes: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="a limit below the machine's own"
    )
    spool: Path | None = Field(
        None, description="folder in which a half-summed update outlives a power cut"
    )
    battery_share: Part = Field(
        0.5, description="of the time that the planner may count on, on battery"
    )
    hot_celsius: float = Field(80.0, ge=0, le=200, description="from this on the device is hot")
    hot_share: Part = Field(0.5, description="of its time when hot, or throttled")
    busy_above: float = Field(
        0.75, ge=0, le=1, description="share of the cores taken by others that makes it busy"
    )
    busy_share: Part = Field(
        1.0, description="of its time when busy; its pace, and so its quota, falls in any case"
    )
    upload_window: Hours | None = Field(
        None,
        description="when it may use its link, by this machine's clock: 22:00-06:00, or Mon-Fri "
        "18:00-08:00, Sat-Sun 00:00-24:00; not set: always (docs/install.md)",
    )
    bytes_per_day: Annotated[int, Field(ge=1, le=2**53)] | None = Field(
        None, description="sent and received, from midnight to midnight by this machine's clock"
    )
    working_hours: Hours | None = Field(
        None, description="when its owner needs it, written as the upload window is"
    )
    working_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="of its time in working hours; 0: it leaves for as long as they last"
    )
    metrics: str | None = Field(
        None, description="HOST:PORT of the Prometheus metrics, plain text; not set: none"
    )
    stay: bool = Field(False, description="wait for the next run when one has ended")
    patience_seconds: Seconds = Field(600.0, description="without contact, before giving up")

    @property
    def state_folder(self) -> Path:
        """The folder for the device's place, by default where XDG wants state."""
        if self.state is not None:
            return self.state
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return Path(base) / "headwater"


class PartitionSettings(Branch):
    """How one data set is dealt out to the devices of a run (docs/data.md)."""

    kind: str = Field(
        "task",
        description="task: as the task splits it; iid, dirichlet:ALPHA, labels:N, column:NAME, "
        "quantity:SIGMA or quantity:dirichlet:BETA",
    )
    examples_per_device: Count | None = Field(
        None, description="each device draws so many, and devices share; not set: dealt out once"
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        self.rule(seed=0)  # ValueError if it is none
        return self

    def rule(self, *, seed: int) -> Rule | None:
        """Return what is set, with the run's seed; None where the task splits its own data."""
        return rule_of(self.kind, examples_per_device=self.examples_per_device, seed=seed)


class SimulationSettings(Branch):
    """Many clients on one machine."""

    clients: Count = Field(
        100, description="devices, named 0 to N-1; with a fleet, as many as its file says"
    )
    fleet: Path | None = Field(
        None, description="TOML file of the devices (docs/fleet.md); not set: drawn by the seed"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="chance that an invited device vanishes, in training or in a secure phase"
    )
    faults: Path | None = Field(
        None, description="TOML file of dropouts, slow links and liars (docs/fleet.md)"
    )
    engine: Literal["in-process", "grpc", "flower-ray"] = Field(
        "in-process",
        description="in-process; grpc: a server and a process per device, over the real wire; or "
        "flower-ray: Flower's Ray workers",
    )
    compute: Literal["auto", "one-by-one", "vectorised", "fused"] = Field(
        "auto",
        description="auto, one-by-one (the same bits as the wire), vectorised (many devices in a "
        "pass, each with its own norms) or fused (their sum alone)",
    )
    workers: Count | Literal["auto"] = Field(
        1,
        description="processes that compute devices one by one; auto: as many as usable cores "
        "(docs/simulation.md)",
    )
    compile: bool = Field(
        False,
        description="let torch.compile make the passes over many devices; needs a C++ compiler "
        "(docs/simulation.md)",
    )
    wire: bool = Field(
        False, description="push every plan and update through encoding and decoding"
    )


class Settings(Branch):
    """The whole tree."""

    task: str | None = Field(None, description="FILE.py:Class")
    seed: int = Field(
        0, ge=0, le=2**53, description="of the model, the examples' order, the cohorts"
    )
    rounds: Count = Field(30, description="server steps")
    threads: Count | None = Field(
        None, description="of torch; not set: 1 in the simulator, all usable cores elsewhere"
    )
    out: Path | None = Field(None, description="folder for model, metrics and checkpoints")
    check_task: bool = Field(True, description="try on real examples that the loss is a sum")
    insecure: bool = Field(False, description="allow plain text beyond loopback")
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    plan: PlanSettings = PlanSettings()
    cohort: CohortSettings = CohortSettings()
    secure: SecureSettings = SecureSettings()
    model: ModelSettings = ModelSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tls: TlsSettings = TlsSettings()
    server: ServerSettings = ServerSettings()
    client: ClientSettings = ClientSettings()
    partition: PartitionSettings = PartitionSettings()
    simulation: SimulationSettings = SimulationSettings()

    def to_toml(self) -> str:
        """Write the tree as TOML; what is not set is left out, as TOML has no null."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))

    def to_run_config(self) -> dict[str, Scalar]:
        """Flatten the tree to Flower's run_config: dotted keys, scalar values."""
        return dict(_flatten(_without_none(self.model_dump(mode="json")), prefix=""))


def load(config: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Read the settings file, if any, and lay the given dotted overrides over it.

    An override of ``None`` means that the flag was not given.

    Raises:
        SettingsError: the file is not there, is not TOML, or holds an unknown or impossible value.
    """
    tree: dict[str, Any] = {}
    if config is not None:
        try:
            tree = tomllib.loads(config.read_text())
        except OSError as error:
            raise SettingsError(
                f"cannot read the settings file {config}: {error.strerror}"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{config} is not a TOML file: {error}") from error
    for dotted, value in overrides.items():
        if value is not None:
            _put(tree, dotted, value)
    return _validated(tree, source=str(config or "the command line"))


def load_run(config: Path | None, overrides: Mapping[str, Any], *, resume: bool) -> Settings:
    """Read the settings of a run; a resumed run takes up those that it left in its folder.

    Raises:
        SettingsError: as ``load``, or a resumed run without a folder to resume from.
    """
    if resume and config is None:
        out = overrides.get("out")
        if out is None:
            raise SettingsError(
                "--resume needs --out", remedy="name the folder of the run: --out DIR"
            )
        left = Path(out) / SETTINGS_FILE
        config = left if left.exists() else None
    return load(config, overrides)


def from_run_config(flat: Mapping[str, Any]) -> Settings:
    """Rebuild the tree from Flower's flat run_config; the inverse of ``to_run_config``.

    A string that is empty means "not set", as Flower's pyproject needs every key to exist.
    """
    tree: dict[str, Any] = {}
    for dotted, value in flat.items():
        if value != "":
            _put(tree, dotted, value)
    return _validated(_with_lists(tree), source="run_config")


def _validated(tree: Mapping[str, Any], *, source: str) -> Settings:
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        given = "" if first["type"] == "missing" else f" (found {first['input']!r})"
        said = first["msg"].lower().removeprefix("value error, ")
        raise SettingsError(f"{source}: {where}: {said}{given}") from error


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *branches, leaf = dotted.split(".")
    for branch in branches:
        child = tree.setdefault(branch, {})
        if not isinstance(child, dict):
            raise SettingsError(f"{branch} is a value, but {dotted} is set below it")
        tree = child
    tree[leaf] = value


def _with_lists(tree: dict[str, Any]) -> dict[str, Any]:
    """Turn the keys 0, 1, ... that a list was flattened to back into the list."""
    rebuilt: dict[str, Any] = {}
    for key, value in tree.items():
        rebuilt[key] = value
        if isinstance(value, dict):
            is_list = bool(value) and value.keys() == {str(at) for at in range(len(value))}
            rebuilt[key] = (
                [value[str(at)] for at in range(len(value))] if is_list else _with_lists(value)
            )
    return rebuilt


def _without_none(tree: dict[str, Any]) -> dict[str, Any]:
    pruned = {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }
    return {key: value for key, value in pruned.items() if value != {}}


def _flatten(tree: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, Scalar]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, prefix=f"{prefix}{key}.")
        elif isinstance(value, list):
            for position, item in enumerate(value):
                yield f"{prefix}{key}.{position}", item
        else:
            yield prefix + key, value


def to_markdown() -> str:
    """Return docs/settings.md: every setting with its default and meaning."""
    lines = [
        "# Settings",
        "",
        "One TOML file serves all three commands (`--config FILE`); a flag overrides it. A run",
        "leaves its own in `settings.toml`, to be repeated from. `make docs` writes this page.",
    ]
    pages: dict[str, type[Branch]] = {"": Settings, **_branches()}
    for name, branch in pages.items():
        lines += ["", f"## [{name}]" if name else "## Top level", ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for key, field in branch.model_fields.items():
            if key in _branches() and not name:
                continue
            default = field.get_default(call_default_factory=True)
            shown = "not set" if default is None else f"`{json.dumps(default)}`"
            lines.append(f"| `{key}` | {shown} | {field.description or ''} |")
    return "\n".join(lines) + "\n"


def _branches() -> dict[str, type[Branch]]:
    return {
        key: field.annotation
        for key, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Branch)
    }


if __name__ == "__main__":
    print(to_markdown(), end="")
