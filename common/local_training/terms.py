"""Local steps, and client algorithms, in a plan."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.messages import AlgorithmLabel
from headwater.common.terms import Terms
from headwater.common.wording import counted


class LocalPlan(Terms):
    """How a device moves the model within the round."""

    NAME: ClassVar[str] = "local_training"

    steps: Annotated[int, Field(ge=1, le=2**20)] = 1
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    how: LocalTerms | None = Field(None, description="None: the exact sum, or plain SGD")
    algorithm: AlgorithmLabel | None = Field(
        None, description="the client algorithm, which takes the steps itself"
    )

    @property
    def takes_steps(self) -> bool:
        """Whether the model moves on the device within the round, even if in one step only."""
        return self.how is not None or self.steps > 1

    @property
    def repeats_examples(self) -> bool:
        return self.takes_steps

    @property
    def moves_model(self) -> bool:
        return self.takes_steps or self.algorithm is not None

    @property
    def carries_state(self) -> bool:
        return self.how is not None and self.how.keeps_state

    @property
    def why_alone(self) -> str | None:
        if self.algorithm is not None:
            return f"the client algorithm {self.algorithm} takes each device by itself"
        if not self.moves_model:
            return None
        if self.carries_state:
            return "each device keeps a state of its own from round to round (--algorithm)"
        return "each device's local steps need a model of its own, as --compute vectorised has it"

    @property
    def has_columns(self) -> bool:
        return self.algorithm is None and not self.carries_state

    def unfit_for_masks(self, quota: int) -> str | None:
        if self.steps > quota:  # a step has at least one example
            examples = counted(quota, "example")
            return f"{self.steps} local steps on {examples}: others take all of them"
        return None if self.how is None else self.how.outweighing(self.learning_rate)

    def bounds(self, number: int, *, quota: int) -> tuple[int, int]:
        """Return where a step, from 0, begins and ends in the window of a quota.

        The examples are divided evenly: two steps differ by one example at most, and a whole number
        of passes over the data ends with a step.
        """
        start, end = (quota * at // self.steps for at in (number, number + 1))
        return start, end


PLAIN = LocalPlan()
"""Of a plan without such terms: one step, on the server."""
