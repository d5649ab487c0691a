"""Shows how far a fine-tuning has come, and how long it takes at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from headwater.client.adaptation.fine_tuning import TrainingState
from headwater.common.system.console import console
from headwater.common.system.live_status import LiveStatus, duration, line_of, pack


class AdaptationProgress:
    """The text of a training: the last state, and the time since the first step."""

    def __init__(self, num_epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_epochs = num_epochs
        self._clock = clock
        self._state = TrainingState()
        self._began: float | None = None
        """When the first step was done."""

    def take(self, state: TrainingState) -> None:
        """Take the state after a step."""
        if self._began is None:
            self._began = self._clock()
        self._state = state

    def parts(self) -> list[str]:
        """Return epoch, step, the loss before and now, and the time that is left at most."""
        state = self._state
        if not state.steps_per_epoch:
            return ["tests the common model"]
        is_between = state.num_steps == state.epoch * state.steps_per_epoch
        epoch = state.epoch if is_between else state.epoch + 1
        step = state.num_steps - (epoch - 1) * state.steps_per_epoch
        return [
            f"epoch {epoch} of at most {self._num_epochs}",
            f"step {step} of {state.steps_per_epoch}",
            f"loss {state.stop_losses[-1]:.4g}, before {state.stop_losses[0]:.4g}",
            self._left(),
        ]

    def _left(self) -> str:
        state = self._state
        if self._began is None or state.num_steps < 2 or state.ended:
            return ""
        each = (self._clock() - self._began) / (state.num_steps - 1)
        left = self._num_epochs * state.steps_per_epoch - state.num_steps
        return f"at most {duration(float(round(each * left)))} left"


@contextmanager
def show_progress(num_epochs: int) -> Iterator[Callable[[TrainingState], None]]:
    """Yield what takes each state: a terminal shows it in one place, elsewhere lines are rare."""
    progress = AdaptationProgress(num_epochs)

    def block(width: int) -> list[Text]:
        return pack(progress.parts(), width)

    def line() -> str:
        return line_of(progress.parts())

    with LiveStatus(console, block=block, wait_line=line) as status:

        def take(state: TrainingState) -> None:
            progress.take(state)
            if state.num_steps == state.epoch * state.steps_per_epoch:
                status.event(line)

        yield take
