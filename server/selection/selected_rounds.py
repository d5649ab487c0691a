"""Rounds of which the best model is kept, or whose metric ends the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import BEST
from headwater.server.rounds.evaluation import test_metric_names
from headwater.server.rounds.features import RunFeature, RunState
from headwater.server.rounds.model_files import save_model
from headwater.server.rounds.round_row import RoundRow
from headwater.server.selection import model_selection
from headwater.server.selection.model_selection import HELD_OUT, ModelSelection

log = logging.getLogger(__name__)


class SelectedRounds(RunFeature):
    """Follows what ``--best`` and ``--stop-when`` name."""

    def __init__(self, run: RunState) -> None:
        self._run, self._chosen = run, run.settings.evaluation
        self._found = ModelSelection()

    def check(self) -> None:
        """Check that the evaluations can have the metrics.

        Raises:
            SettingsError, UnknownMetric: see ``model_selection.check_criteria``.
        """
        run = self._run
        if self._chosen.best is not None and run.settings.out is None:
            raise SettingsError(
                "--best keeps a file, and the run writes to no folder", remedy="name one: --out DIR"
            )
        names = test_metric_names(run.task, run.image.model, run.test_examples)
        model_selection.check_criteria(self._chosen, names)

    def to_json(self) -> dict[str, Any]:
        return self._found.to_json()

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._found = model_selection.restored(row, self._chosen)

    def tested(self, row: RoundRow) -> None:
        """Note an evaluated round's metrics; the training's loss, if it is released, as train_loss.

        Raises:
            UnknownMetric: it is the first evaluation, and it has no such metric.
        """
        if self._chosen.on_devices and HELD_OUT not in row.metrics:
            log.warning("round %d: no device has tested the model", row.round)
        is_released = row.epsilon is None
        metrics = {"train_loss": row.loss, **row.metrics} if is_released else row.metrics
        self._found = model_selection.after_evaluation(
            self._found,
            self._chosen,
            metrics,
            round_number=row.round,
            is_extra=bool(row.round % self._chosen.every_rounds),
        )

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the last committed round is the best one so far."""
        return self._found.best is not None and self._found.best.round == self._run.round

    def saved(self, folder: Path) -> None:
        """Keep the model of the last committed round, if it is the best one so far."""
        run, best = self._run, self._found.best
        if best is None or not self.needs_checkpoint:
            return
        with run.optimizer.kept_weights():
            save_model(
                folder / BEST,
                run.image,
                run.settings,
                round_number=run.round,
                best={"metric": best.metric, "value": best.value, "round": best.round},
            )

    def why_stopped(self) -> str | None:
        why = model_selection.why_stopped(self._found, self._chosen)
        return None if why is None else f"{why}; a larger --patience with --resume goes on"
