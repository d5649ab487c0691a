"""The named algorithms of local training: the settings that each chooses where the user has not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What a named algorithm sets where the user has set nothing."""

    steps: int | None = None
    epochs: int | None = None
    optimizer: str = "sgd"
    proximal: float = 0.0
    server_rate: float = 1.0
    server_arguments: Mapping[str, bool | float] = field(default_factory=dict)
    local_arguments: Mapping[str, bool | float] = field(default_factory=dict)
    """Of the local optimizer, if that is the algorithm's own."""
    keeps: Literal["nothing", "control variate", "optimizer"] = "nothing"
    """What stays on a device for its next round."""


PRESETS = {
    "exact": Preset(steps=1),
    # McMahan et al. 2017, algorithm 1.
    "fedavg": Preset(epochs=1),
    # Li et al. 2020, algorithm 2.
    "fedprox": Preset(epochs=1, proximal=0.1),
    # Karimireddy et al. 2020, algorithm 1, option II.
    "scaffold": Preset(epochs=1, keeps="control variate"),
    # Momentum that does not begin anew in each round, as that of DiLoCo's workers.
    "client-momentum": Preset(epochs=1, local_arguments={"momentum": 0.9}, keeps="optimizer"),
    # Hsu et al. 2019: server momentum; 0.3 is what served AdamW inside (benchmarks.bytes_to_loss).
    "fedavgm": Preset(steps=50, optimizer="adamw", server_arguments={"momentum": 0.3}),
    # Douillard et al. 2023, algorithm 1: AdamW inside, Nesterov momentum outside.
    "diloco": Preset(
        steps=50,
        optimizer="adamw",
        server_rate=0.7,
        server_arguments={"momentum": 0.9, "nesterov": True},
    ),
}
LOCAL_BATCH_SIZE = 16
"""Examples of a local step, if neither its size nor K is set."""
