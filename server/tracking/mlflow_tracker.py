"""The observer of ``--track mlflow``: settings, each round's figures and the model's path.

It writes to where MLflow is set up to write (``MLFLOW_TRACKING_URI``; by default mlflow.db in the
working folder), into the experiment of ``MLFLOW_EXPERIMENT_NAME`` or ``headwater``. MLflow's own
active run is left alone. Tried with mlflow-skinny 3.17.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

from torch import nn

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings, flattened
from headwater.common.system.printable import printable, printable_name
from headwater.server.rounds.model_files import recorded_settings
from headwater.server.rounds.round_row import RoundRow

EXPERIMENT = "headwater"
MAX_PARAMETERS = 100  # in one call of log_batch


class MlflowTracker:
    """Writes a run to MLflow."""

    def __init__(self) -> None:
        """Load MLflow.

        Raises:
            SettingsError: it is not installed, or refuses the place that it is to write to.
        """
        # Else it tries a place that does not answer for minutes, and the run shows nothing.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        try:
            import mlflow
        except ImportError as error:
            raise SettingsError(
                "--track mlflow needs MLflow, which is not installed",
                remedy="pip install 'headwater[mlflow]'",
            ) from error
        self._entities: Any = mlflow.entities
        try:
            self._client: Any = mlflow.MlflowClient()
        except Exception as error:  # MLflow's own, of the place that it is set up to write to
            raise SettingsError(
                f"--track mlflow: MLflow refuses its place: {printable(str(error))}",
                remedy="set MLFLOW_TRACKING_URI to another (sqlite:///mlflow.db is a file of the "
                "working folder), or leave --track out",
            ) from error
        self._id = ""
        self._settings: Settings | None = None

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Begin a run with the recorded settings as parameters; a resumed run is one of its own."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_name = settings.out.name if settings.out is not None else None
        tags = {"headwater.after_round": str(round_number)}
        self._id = self._client.create_run(experiment, run_name=run_name, tags=tags).info.run_id
        self._settings = settings
        parameters = [
            self._entities.Param(key, str(value))
            for key, value in flattened(recorded_settings(settings))
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=parameters[start : start + MAX_PARAMETERS])

    def on_round(self, row: RoundRow) -> None:
        """Log the round's numbers and metrics, with the round as their step."""
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(metric_key(name), float(value), now, row.round)
            for name, value in row.figures().items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def ended(self) -> None:
        """Tag the run with the path of its model, and end it."""
        if self._settings is None:
            return
        has_failed = sys.exc_info()[0] is not None
        folder = self._settings.out
        if folder is not None and (folder / MODEL).exists():
            self._client.set_tag(self._id, "headwater.model", str((folder / MODEL).resolve()))
        self._client.set_terminated(self._id, "FAILED" if has_failed else "FINISHED")


def metric_key(name: str) -> str:
    """Return a metric's name as MLflow accepts it; it refuses a round with another one."""
    return re.sub(r"[^\w\-. /]", "_", printable_name(name))
