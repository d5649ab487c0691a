"""The terms of a device's local steps, which its plan carries: the same for all devices of a round.

They name plain settings (``common.settings.training.LocalSettings``): an optimizer of torch, a
proximal term (FedProx; Li et al. 2020, "Federated optimization in heterogeneous networks"), and the
correction for devices that take unlike numbers of steps (FedNova; Wang et al. 2020, "Tackling the
objective inconsistency problem in heterogeneous federated optimization").
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from headwater.common.parsed_text import json_of
from headwater.common.settings.training import LocalSettings, PlanSettings

MAX_ARGUMENTS, MAX_CHARACTERS = 16, 40
GROWING = ("rprop", "lbfgs")
"""Optimizers whose 60th step may be ten thousand times the first, whatever their arguments."""

OptimizerName = Annotated[str, Field(pattern=r"^[A-Za-z]+$", max_length=MAX_CHARACTERS)]
Argument = Annotated[str, Field(pattern=r"^[a-z_0-9]+$", max_length=MAX_CHARACTERS)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Value = bool | int | Number | Annotated[list[Number], Field(max_length=4)]
Arguments = Annotated[dict[Argument, Value], Field(max_length=MAX_ARGUMENTS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalTerms:
    """How a device takes its local steps, apart from their number and learning rate."""

    optimizer: OptimizerName = "sgd"
    """A class of ``torch.optim``; no code of the server's ever runs on a device."""
    arguments: Arguments = field(default_factory=dict)
    """The optimizer's other arguments, such as momentum."""
    proximal: Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)] = 0.0
    """mu: each step's gradient gets mu x (parameters - those that the server sent)."""
    is_normalized: bool = False
    """Whether the update is divided by the device's own steps, and the server multiplies the sum by
    the cohort's mean number of steps."""
    keeps_state: bool = False
    """Whether the optimizer's state stays on the device, for its next round."""

    @property
    def text(self) -> str:
        """All fields, exactly: equal terms have equal texts."""
        return json.dumps(
            {
                "optimizer": self.optimizer.lower(),
                "arguments": self.arguments,
                "proximal": float(self.proximal),
                "is_normalized": self.is_normalized,
                "keeps_state": self.keeps_state,
            },
            sort_keys=True,
        )

    def outweighing(self, rate: float) -> str | None:
        """Return why a step could outweigh all others at this rate, or grow them; None: none can.

        An argument that is not known to do neither counts as one that could.
        """
        if self.optimizer.lower() in GROWING:
            return (
                "a step of its local training could outweigh all others: those of "
                f"{self.optimizer} grow from one to the next"
            )
        for name, value in self.arguments.items():
            values = value if isinstance(value, list) else [value]
            if not all(_is_tame(name, one, rate) for one in values):
                return (
                    f"a step of its local training could outweigh all others: {name} = {value} of "
                    f"{self.optimizer} at the rate {rate:g}"
                )
        if self.proximal * rate > 1:
            return f"its proximal term of {self.proximal:g} grows at the rate {rate:g}"
        return None

    @staticmethod
    def of_text(text: str) -> LocalTerms:
        """Return the terms of a ``text``."""
        return LocalTerms(**json_of(text))


def _is_tame(name: str, value: float, rate: float) -> bool:
    if isinstance(value, bool):
        return name in FLAGS
    if name == "weight_decay":
        return 0 <= value * rate <= 1
    low, high, includes_high = TAME.get(name, (1.0, 0.0, False))
    return low <= value < high or (includes_high and value == high)


FLAGS = {"nesterov", "amsgrad", "centered", "decoupled_weight_decay", "foreach", "fused"}
TAME = {
    "momentum": (0.0, 1.0, False),
    "dampening": (0.0, 1.0, True),
    "betas": (0.0, 1.0, False),
    "alpha": (0.0, 1.0, False),
    "rho": (0.0, 1.0, False),
    "eps": (1e-30, 1.0, True),
    "lr_decay": (0.0, 1.0, True),
    "initial_accumulator_value": (0.0, 1.0, True),
    "momentum_decay": (0.0, 1.0, False),
}
"""From where to where each argument makes no step of a device's outweigh its others, and whether
the end is included."""


def local_terms(local: LocalSettings, plan: PlanSettings) -> LocalTerms:
    """Return what the plans of a run say of the steps, but for their number and rate."""
    chosen = local.step_correction
    if chosen is None:
        # FedAvg's devices take unlike numbers of steps by their data; its paper corrects none.
        is_by_speed = local.num_epochs is None and plan.accumulation_steps is None
        chosen = "normalized" if is_by_speed else "none"
    return LocalTerms(
        optimizer=local.kind,
        arguments=dict(local.all_arguments),
        proximal=local.mu,
        is_normalized=chosen == "normalized",
        keeps_state=local.preset.keeps == "optimizer",
    )
