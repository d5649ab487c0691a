"""Looks over the devices' examples before the first round, and says which cannot be trained on.

The check of the task looks at the first device alone. This looks at a sample of every device's
examples for ``MAX_SECONDS`` in all: at least one batch of each device, until the time is over.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from headwater.client.trainer.trainer import Trainer
from headwater.common.additivity.survey import look_over
from headwater.common.additivity.trial_state import as_it_was
from headwater.common.data.example_faults import ExampleFault, own_position
from headwater.common.errors import (
    TASK_MISTAKES,
    HeadwaterError,
    NoFiniteExample,
    SettingsError,
    TaskFailed,
)
from headwater.common.wording import counted
from headwater.simulation.fleet.identities import Identities

log = logging.getLogger(__name__)

MAX_SECONDS, MAX_DEVICES = 1.0, 1000
MAX_NAMED = 5
# The device cannot take part; it says so when it describes itself.
UNABLE = (SettingsError, TaskFailed, NoFiniteExample)


@dataclass(kw_only=True, slots=True)
class DeviceSurvey:
    """The examples that were looked at on the devices, and those that cannot be trained on."""

    num_devices: int
    """The devices of the run; ``num_looked_at`` of them were looked at."""
    num_looked_at: int = 0
    num_examples: int = 0
    num_seen: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """The examples to be left out, by the device's name."""
    kinds: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[str, int, ExampleFault]] = field(default_factory=dict)
    """The first example with each kind of fault: its device, its position, and the fault."""

    def summary(self) -> str | None:
        """Return how many examples are left out, on which devices and why; None if none is."""
        if not self.left_out:
            return None
        most = self.left_out.most_common(MAX_NAMED)
        where = [f"{number:,} on {name}" for name, number in most]
        if len(self.left_out) > len(most):
            rest = self.left_out.total() - sum(number for _, number in most)
            where.append(f"{rest:,} on {counted(len(self.left_out) - len(most), 'other device')}")
        lines = [
            f"{self.left_out.total():,} of {self._scope()} cannot be trained on and will be left "
            f"out: {', '.join(where)}"
        ]
        for kind, number in self.kinds.most_common():
            name, position, fault = self.first[kind]
            lines.append(f"  {number:,}: {kind} (first on {name}: position {position})")
            lines += [f"    {line}" for line in fault.detail.splitlines()]
        return "\n".join(lines)

    def _scope(self) -> str:
        devices = counted(self.num_looked_at, "device")
        if self.num_looked_at < self.num_devices:
            devices = f"{self.num_looked_at:,} of {counted(self.num_devices, 'device')}"
        examples = f"{counted(self.num_seen, 'example')} looked at"
        if self.num_seen < self.num_examples:
            examples += f", of {self.num_examples:,},"
        return f"{examples} on {devices}"


def report_left_out(trainer: Trainer, identities: Identities) -> None:
    """Log a summary of the devices' examples that cannot be trained on, after the task's check.

    Raises:
        HeadwaterError: some device's examples show a mistake of the task.
    """
    trainer.logs_left_out = False  # of the first device alone
    for part in range(identities.num_devices):
        try:
            trainer.examples(identities.of(part))
        except UNABLE:
            continue
        except HeadwaterError:
            return  # a fault of the task, which ends the run when the device describes itself
        break
    report = trainer.first_check
    if report is None or not report.num_seen:
        return
    text = survey_devices(trainer, identities, batch_size=report.survey_batch_size).summary()
    if text is not None:
        log.warning("%s", text)


def survey_devices(
    trainer: Trainer,
    identities: Identities,
    *,
    batch_size: int,
    seconds: Callable[[], float] = time.monotonic,
) -> DeviceSurvey:
    """Look at a sample of the devices' examples, ``batch_size`` at a time."""
    survey = DeviceSurvey(num_devices=identities.num_devices)
    parts = range(0, identities.num_devices, -(-identities.num_devices // MAX_DEVICES))
    begun = seconds()
    with as_it_was(trainer.image.model), _same_draws():
        for done, part in enumerate(parts):
            left = MAX_SECONDS - (seconds() - begun)
            if left <= 0:
                break
            try:
                _look(survey, trainer, identities, part, batch_size, left / (len(parts) - done))
            except TASK_MISTAKES:
                raise
            except (HeadwaterError, MemoryError) as error:
                log.info("device %s is not looked over: %s", identities.name(part), error)
    return survey


def _look(
    survey: DeviceSurvey,
    trainer: Trainer,
    identities: Identities,
    part: int,
    batch_size: int,
    max_seconds: float,
) -> None:
    identity = identities.of(part)
    examples = trainer.examples(identity)
    found = look_over(
        trainer.task,
        trainer.image.model,
        examples,
        batch_size=batch_size,
        max_seconds=max_seconds,
    )
    survey.num_looked_at += 1
    survey.num_examples += len(examples)
    survey.num_seen += len(found.seen)
    for position, fault in sorted(found.faults.items()):
        survey.left_out[identity.name] += 1
        survey.kinds[fault.kind] += 1
        if fault.kind not in survey.first:
            own = own_position(examples, position)
            survey.first[fault.kind] = (identity.name, own, fault)


@contextmanager
def _same_draws() -> Iterator[None]:
    """Leave the generators of Python and numpy as they were: a data set may draw from them."""
    pythons, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
