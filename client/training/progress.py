"""How far the training of a plan has come, for the display of a running client.

The training thread writes it after each micro-batch, and the display reads it at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from headwater.common.messages import Plan


@dataclass(kw_only=True, slots=True)
class TrainingProgress:
    """The current plan, or the last one, and the work that is done of it."""

    plan: Plan | None = None
    num_steps: int = 0
    num_examples: int = 0
    num_left_out: int = 0
    """Examples that cannot be trained on."""
    are_apart: bool = False
    """Whether a masked window had to be taken apart, see ``client.training.faults``."""
    seconds: float = 0.0
    """From the start of the plan's training to the end of the last micro-batch."""
    _begun: float = 0.0

    def begin(self, plan: Plan) -> None:
        """Start over with a plan."""
        self.plan, self.num_steps, self.num_examples, self.num_left_out = plan, 0, 0, 0
        self.are_apart = False
        self.seconds = 0.0
        self._begun = time.monotonic()

    def reach(
        self, num_steps: int, num_examples: int, num_left_out: int, *, are_apart: bool = False
    ) -> None:
        """Take the work done so far; it is less than before if the window was begun again."""
        self.num_steps, self.num_examples = num_steps, num_examples
        self.num_left_out = num_left_out
        self.are_apart = are_apart
        self.seconds = time.monotonic() - self._begun

    @property
    def examples_per_second(self) -> float | None:
        """The training's pace; None before the first micro-batch."""
        return self.num_examples / self.seconds if self.num_examples and self.seconds else None
