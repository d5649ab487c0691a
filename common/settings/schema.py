"""Declares every setting of the project, once, as one frozen pydantic tree.

The tree's root is here, and its branches are in the modules beside: ``training``, ``rounds``,
``machines`` and ``simulation``. A field holds all that is known of a setting: key, type, range,
unit, default, meaning and flag. ``flags.py`` generates the command line from this tree,
``sources.py`` reads the TOML file and the flags into it, and ``introspection.py`` writes
docs/settings.md. To add a setting, add a field.

The tree also travels as Flower's flat ``run_config`` (dotted keys), so that the same apps find the
same settings on every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import model_validator

from headwater.common.settings.conflicts import check_together
from headwater.common.settings.fields import (
    ALL,
    DEVICE,
    DEVICE_PANEL,
    OWNER,
    PANELS,
    PLAN,
    PRIVACY,
    RUN,
    RUNS,
    SECURE,
    SERVER,
    SIMULATION,
    TASK,
    TLS,
    TRAINING,
    Branch,
    Folder,
    Rounds,
    Scalar,
    Threads,
    Unit,
    branch,
    setting,
)
from headwater.common.settings.machines import (
    AlertSettings,
    ClientSettings,
    ServerSettings,
    StandbySettings,
    TlsSettings,
)
from headwater.common.settings.rounds import (
    AggregationSettings,
    AsynchronousSettings,
    CohortSettings,
    CompressionSettings,
    DeviceTestSettings,
    PrivacySettings,
    SecureSettings,
    StatisticsSettings,
)
from headwater.common.settings.simulation import PartitionSettings, SimulationSettings
from headwater.common.settings.training import (
    AlgorithmSettings,
    EvaluationSettings,
    FeatureSettings,
    LocalScheduleSettings,
    LocalSettings,
    ModelSettings,
    OptimizerSettings,
    PlanSettings,
    ScheduleSettings,
    VersionSettings,
)

__all__ = [
    "PANELS",
    "SETTINGS_FILE",
    "AggregationSettings",
    "AlertSettings",
    "AlgorithmSettings",
    "AsynchronousSettings",
    "ClientSettings",
    "CohortSettings",
    "CompressionSettings",
    "EvaluationSettings",
    "LocalSettings",
    "ModelSettings",
    "OptimizerSettings",
    "PartitionSettings",
    "PlanSettings",
    "PrivacySettings",
    "ScheduleSettings",
    "SecureSettings",
    "ServerSettings",
    "Settings",
    "SimulationSettings",
    "StandbySettings",
    "TlsSettings",
    "VersionSettings",
    "flattened",
]

SETTINGS_FILE = "settings.toml"


class Settings(Branch):
    """The whole tree."""

    task: Annotated[str, Unit("FILE.py:Class")] | None = setting(
        None,
        "your task: FILE.py:Class or package.module:Class; the simulator without one trains the "
        "bundled digits",
        on=f"{ALL} sweep {OWNER}",
        panel=TASK,
        short=True,
    )
    seed: int = setting(
        0,
        "seed of the initial model, the partition, the order of examples and the cohorts",
        on=f"{ALL} {OWNER}",
        panel=TRAINING,
        ge=0,
        le=2**53,
    )
    rounds: Rounds = setting(100, "server steps", on=f"{RUNS} sweep", panel=TRAINING, short=True)
    threads: Threads | None = setting(
        None,
        "threads of torch; equal numbers give equal bits; not set: 1 in the simulator, all usable "
        "cores elsewhere",
        on=f"{ALL} {OWNER}",
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
    submitted_code: str | None = setting(
        None,
        "written by `headwater-server submit`: the SHA-256 of each file of the run's code; the run "
        "begins with no other code",
        on="",
        panel=RUN,
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
    local: LocalSettings = branch(LocalSettings, PLAN, on=RUNS)
    local_schedule: LocalScheduleSettings = branch(LocalScheduleSettings, PLAN, on=RUNS)
    algorithm: AlgorithmSettings = branch(AlgorithmSettings, PLAN, on=ALL)
    feature: FeatureSettings = branch(FeatureSettings, PLAN, on=ALL)
    cohort: CohortSettings = branch(CohortSettings, RUN, on=RUNS)
    statistics: StatisticsSettings = branch(StatisticsSettings, RUN, on=RUNS)
    device_test: DeviceTestSettings = branch(DeviceTestSettings, RUN, on=RUNS)
    aggregation: AggregationSettings = branch(AggregationSettings, RUN, on=RUNS)
    compression: CompressionSettings = branch(CompressionSettings, RUN, on=RUNS)
    asynchronous: AsynchronousSettings = branch(AsynchronousSettings, RUN, on=RUNS)
    secure: SecureSettings = branch(SecureSettings, SECURE, on=RUNS)
    privacy: PrivacySettings = branch(PrivacySettings, PRIVACY, on=RUNS)
    model: ModelSettings = branch(ModelSettings, TASK, on=ALL)
    evaluation: EvaluationSettings = branch(EvaluationSettings, RUN, on=RUNS)
    versions: VersionSettings = branch(VersionSettings, RUN, on=RUNS)
    tls: TlsSettings = branch(TlsSettings, TLS, on=f"server {DEVICE}")
    server: ServerSettings = branch(ServerSettings, SERVER, on="server")
    alerts: AlertSettings = branch(AlertSettings, SERVER, on="server")
    standby: StandbySettings = branch(StandbySettings, SERVER, on="server")
    client: ClientSettings = branch(ClientSettings, DEVICE_PANEL, on=DEVICE)
    partition: PartitionSettings = branch(PartitionSettings, TASK, on=f"simulate {DEVICE} {OWNER}")
    simulation: SimulationSettings = branch(SimulationSettings, SIMULATION, on="simulate")

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        check_together(self)
        return self

    @property
    def keeps_device_files(self) -> bool:
        """Whether devices keep more of a run than their places in their data, in files."""
        return any(
            (
                self.model.local_parameters is not None,
                self.local.keeps_state,
                self.compression.up != "off",  # residuals, of the last two rounds
                self.feature.name is not None,
                self.privacy.is_on,  # what was spent
            )
        )

    @property
    def server_optimizer(self) -> OptimizerSettings:
        """The server optimizer with its name and rate, chosen by the algorithm if not set."""
        return self.optimizer.with_local_steps(self.local)

    @property
    def has_task_bundle(self) -> bool:
        """Whether the task is in a signed file, as ``headwater-server publish`` writes it."""
        return self.task is not None and self.task.endswith(".task")

    @property
    def num_rounds(self) -> int | None:
        """The rounds of the run; None for ``forever``."""
        return None if self.rounds == "forever" else self.rounds

    def has_round_after(self, round_number: int) -> bool:
        """Return whether another round follows the one of this number."""
        return self.num_rounds is None or round_number < self.num_rounds

    @property
    def num_clients_needed(self) -> int:
        """The clients without which no round begins; under masks as many as a session needs."""
        is_masked = self.secure.aggregation != "off"
        return max(self.cohort.min_clients, self.secure.min_members if is_masked else 0)

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
