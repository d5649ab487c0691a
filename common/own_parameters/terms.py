"""The step of the parameters that stay on a device, in a plan."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headwater.common.terms import Terms


class OwnStepTerms(Terms):
    """How a device steps its own parameters."""

    NAME: ClassVar[str] = "own_parameters"

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1

    @property
    def carries_state(self) -> bool:
        return True

    @property
    def why_alone(self) -> str | None:
        return "each device has parameters of its own (--local-parameters)"
