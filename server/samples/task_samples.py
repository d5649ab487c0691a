"""Shows what a task's ``sample(model)`` returns: a text that the model of the run makes.

A loss does not show what a language model writes. After each round that ends with a test the task
makes a sample from the model as it is. It is logged, and the newest one is in the run's folder, in
the result that the command prints, on the page and in the report. A sample takes time of the
server's, between two rounds, and no random number of the run's. A run outlives a sample that fails.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from torch import nn

from headwater.common.errors import TaskError, TaskFailed
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.common.system.printable import printable_lines
from headwater.common.task import Task
from headwater.common.user_code.failures import running
from headwater.server.rounds.evaluation import is_due
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow

log = logging.getLogger(__name__)

FILE = "sample.json"
MAX_CHARACTERS = 4000  # of a sample; the page shows it as it is


class TaskSamples(Observer):
    """Makes a sample after each tested round, and keeps the newest one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._settings: Settings | None = None
        self._model: nn.Module | None = None
        self._has_failed = False

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._settings, self._model = settings, model

    def on_round(self, row: RoundRow) -> None:
        """Log a sample and write it into the run's folder; the first failure is logged."""
        assert self._settings is not None
        assert self._model is not None
        if not is_due(self._settings, round_number=row.round):
            return
        try:
            text = sample_of(self._task, self._model)
            if text is None:
                return
            log.info("sample after round %d: %s", row.round, printable_lines(text))
            if self._settings.out is not None:
                found = {"round": row.round, "text": text}
                write_atomically(self._settings.out / FILE, json.dumps(found).encode())
        except (TaskFailed, TaskError, OSError) as error:
            if not self._has_failed:
                log.warning("no sample after round %d, the training goes on: %s", row.round, error)
            self._has_failed = True


def sample_of(task: Task, model: nn.Module) -> str | None:
    """Return the task's sample; None if it makes none.

    The model is in evaluation mode meanwhile, and torch's random numbers are the same afterwards.

    Raises:
        TaskFailed: ``sample`` raised an exception.
        TaskError: it returned neither a text nor None.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with running("sample"), torch.no_grad(), torch.random.fork_rng(devices=[]):
            found: object = task.sample(model)  # type: ignore[attr-defined]
    finally:
        for module, is_training in modes:
            module.training = is_training
    if found is not None and not isinstance(found, str):
        raise TaskError(f"sample must return a text or None, found {type(found).__name__}")
    return None if found is None else found[:MAX_CHARACTERS]


def sample_lines(folder: Path) -> list[str]:
    """Return the newest sample of a run's folder as a line; none if it cannot be read."""
    try:
        found = json_of((folder / FILE).read_text(encoding="utf-8"))
        return [f"sample after round {int(found['round'])}: {found['text']}"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
