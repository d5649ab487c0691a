"""The observer of ``--track wandb``: settings, each round's figures and the model's path.

It writes to where Weights & Biases is set up to write (``wandb login``; ``WANDB_MODE=offline``
keeps a run on the disk), into the project of ``WANDB_PROJECT`` or ``headwater``. Tried with wandb
0.31.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import nn

from headwater.common.errors import SettingsError
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.schema import Settings, flattened
from headwater.common.system.printable import printable_name
from headwater.server.rounds.model_files import recorded_settings
from headwater.server.rounds.round_row import RoundRow

PROJECT = "headwater"


class WandbTracker:
    """Writes a run to Weights & Biases."""

    def __init__(self) -> None:
        """Load the wandb package.

        Raises:
            SettingsError: it is not installed.
        """
        try:
            import wandb
        except ImportError as error:
            raise SettingsError(
                "--track wandb needs the package wandb, which is not installed",
                remedy="pip install 'headwater[wandb]'",
            ) from error
        self._wandb: Any = wandb
        self._run: Any = None
        self._settings: Settings | None = None

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Begin a run with the recorded settings as its config; a resumed run is one of its own."""
        self._settings = settings
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=settings.out.name if settings.out is not None else None,
            config={**dict(flattened(recorded_settings(settings))), "after_round": round_number},
            reinit="create_new",  # a run of the caller's own goes on
        )

    def on_round(self, row: RoundRow) -> None:
        """Log the round's numbers and metrics, with the round as their step."""
        self._run.log(
            {printable_name(name): value for name, value in row.figures().items()}, step=row.round
        )

    def ended(self) -> None:
        """Note the path of the model, and end the run."""
        if self._run is None or self._settings is None:
            return
        has_failed = sys.exc_info()[0] is not None
        folder = self._settings.out
        if folder is not None and (folder / MODEL).exists():
            self._run.summary["model"] = str((folder / MODEL).resolve())
        self._run.finish(exit_code=int(has_failed))
