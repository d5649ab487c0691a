"""Settings of the simulator: its devices, and the partition of one data set over them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ValidationInfo, field_validator

from headwater.common.data.partition_spec import PartitionRule, parse_rule
from headwater.common.settings.fields import Branch, Count, Kind, Probability, Unit, setting


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
        "file of the devices' speed, memory, link and availability (docs/fleet.md), or 'equal': "
        "the same laptop for each, always plugged in; not set: drawn by the seed, of five profiles",
        short=True,
    )
    dropout: Probability = setting(
        0.0, "probability that an invited device drops out, in training or in a secure phase"
    )
    faults: Annotated[Path, Unit("FAULTS.toml")] | None = setting(
        None,
        "file of faults to inject: dropouts at a phase, slow links, lying devices (docs/fleet.md)",
    )
    aggregators: Count = setting(
        1,
        "aggregators, each with an equal part of the devices: the server adds their sums, and the "
        "model is the same, bit for bit (docs/scale.md); 1: none",
    )
    engine: Literal["in-process", "ray", "grpc", "flower-ray"] = setting(
        "in-process",
        "how the devices run; ray: computed on a Ray cluster; grpc: a server and a process per "
        "device, over the real wire; flower-ray: on Flower's Ray workers",
    )
    compute: Literal["auto", "one-by-one", "vectorised", "fused"] = setting(
        "auto",
        "how the devices compute; one-by-one: the same bits as the wire; vectorised: many devices "
        "in a pass, each with its own norms; fused: their sum alone; auto: the fastest that fits",
    )
    workers: Count | Literal["auto"] = setting(
        1, "processes that compute devices; auto: one per usable core"
    )
