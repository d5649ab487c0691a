"""The algorithms that are compared, and what to type for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.settings.introspection import all_settings
from headwater.common.settings.training import LocalSettings, OptimizerSettings
from headwater.simulation.compare.flags import CHOSEN
from headwater.simulation.sweep.grid import Point

ALGORITHM, EPOCHS, LOCAL_RATE = "local.algorithm", "local.epochs", "local.learning_rate"
INSIDE = "local.optimizer"
SERVER_RATE = "optimizer.learning_rate"
LOCAL, SERVER = "local", "optimizer"
UP, DOWN = "compression.up", "compression.down"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An algorithm, with the learning rate that is searched."""

    name: str
    point: Point
    """Its settings, without the rate."""
    rate_key: str
    first_rate: float
    """The rate around which the search begins: the one that the product takes if none is set."""
    other_branch: str
    """The branch of settings that is for other algorithms: a user's values there are left out."""

    def at(self, rate: float) -> Point:
        """Return its settings with a rate."""
        return {**self.point, self.rate_key: rate}

    def flags(self, rate: float) -> str:
        """Return what to type."""
        settings = all_settings()
        return " ".join(f"{settings[key].flag} {value}" for key, value in self.at(rate).items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """The settings that all algorithms share: a file's tree, and dotted overrides above it."""

    tree: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def without(self, branch: str) -> Shared:
        """Return the settings without those of a branch.

        The server optimizer's are for exact steps alone: one that suits gradients, as Adam does,
        takes differences of models too far. Those of local steps are for the others.
        """
        return Shared(
            tree={key: value for key, value in self.tree.items() if key != branch},
            overrides={
                key: value
                for key, value in self.overrides.items()
                if not key.startswith(f"{branch}.")
            },
        )

    def check(self) -> None:
        """Check that none of them is one that the comparison chooses.

        Raises:
            SettingsError: one is.
        """
        for key in CHOSEN:
            section, _, leaf = key.rpartition(".")
            values = self.tree.get(section, {}) if section else self.tree
            if key in self.overrides or (isinstance(values, Mapping) and leaf in values):
                flag = all_settings()[key].flag
                remedy = "give --budget rounds=N" if key == "rounds" else f"leave out {flag}"
                raise SettingsError(
                    f"{flag} is set, and a comparison chooses it for each algorithm", remedy=remedy
                )


def candidates(server: OptimizerSettings, *, few_bytes: bool) -> tuple[Candidate, ...]:
    """Return the algorithms; ``server`` is the optimizer with which exact steps are taken.

    With ``few_bytes`` some stand a second time, and send their vectors in fewer bytes.
    """
    exact: dict[str, Point] = {"exact": {ALGORITHM: "exact"}}
    local: dict[str, Point] = {
        "fedavg E=1": {ALGORITHM: "fedavg", EPOCHS: 1},
        "fedavg E=5": {ALGORITHM: "fedavg", EPOCHS: 5},
        "fedprox E=5": {ALGORITHM: "fedprox", EPOCHS: 5},
        "scaffold E=1": {ALGORITHM: "scaffold", EPOCHS: 1},
        "client-momentum E=1": {ALGORITHM: "client-momentum", EPOCHS: 1},
        "fedavgm": {ALGORITHM: "fedavgm"},
        "fedavgm muon": {ALGORITHM: "fedavgm", INSIDE: "muon"},
        "diloco": {ALGORITHM: "diloco"},
    }
    if few_bytes:
        exact["exact int8"] = {ALGORITHM: "exact", UP: "int8", DOWN: "int8"}
        for bits in ("int4", "int2"):
            for name in ("fedavgm", "fedavgm muon"):
                local[f"{name} {bits}"] = {**local[name], UP: bits, DOWN: bits}
        local["fedavgm low-rank"] = {ALGORITHM: "fedavgm", UP: "low-rank", DOWN: "int4"}
    return (
        *(
            Candidate(
                name=name,
                point=point,
                rate_key=SERVER_RATE,
                first_rate=server.rate,
                other_branch=LOCAL,
            )
            for name, point in exact.items()
        ),
        *(
            Candidate(
                name=name,
                point=point,
                rate_key=LOCAL_RATE,
                first_rate=LocalSettings(
                    algorithm=point[ALGORITHM], optimizer=point.get(INSIDE)
                ).rate,
                other_branch=SERVER,
            )
            for name, point in local.items()
        ),
    )
