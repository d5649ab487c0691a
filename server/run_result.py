"""The result of a run for Python: its rounds, the trained model and a plot."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from headwater.common.errors import LocalParametersMissing, SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.user_code.run_scope import PREFIX
from headwater.server.operations.curves import curves
from headwater.server.operations.round_log import read_rows, row_of_dict, row_to_dict
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headwater.common.task import Examples
    from headwater.server.evaluate_model import DataResult


# Methods of other libraries' results, and the lines that stand for each.
_SAVE = "torch.save(run.model.state_dict(), FILE), or simulate(..., out=FOLDER), which keeps all"
_CALL = "run.model(inputs), an ordinary module of torch's; .argmax(1) gives classes"
INSTEAD = {
    "fit": "headwater.simulate(...), which has trained it",
    "losses": "[row.loss for row in run.history]",
    "parameters": "run.model.parameters()",
    "predict": _CALL,
    "predict_proba": "run.model(inputs).softmax(1)",
    "save": _SAVE,
    "save_checkpoint": _SAVE,
    "save_model": _SAVE,
    "score": "run.evaluate(examples).metrics",
    "state_dict": "run.model.state_dict()",
    "test": "run.evaluate(examples)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that has ended."""

    settings: Settings
    """All settings of the run, also those that were not set."""
    shared_model: nn.Module = field(repr=False)
    """As ``model``, but the parameters that stayed on the clients, if any, are untrained."""
    history: list[RoundRow]
    """The rounds, each with the figures of each client; of a resumed run those before, too."""
    task: Any = field(repr=False)
    """The server's task, as the last round has left it."""

    @property
    def model(self) -> nn.Module:
        """The model after the last round, an ordinary module in evaluation mode.

        Raises:
            LocalParametersMissing: some parameters stayed on the clients.
        """
        patterns, out = self.settings.model.local_parameters, self.settings.out
        if patterns is None:
            return self.shared_model
        folder = "the folder of a run with out=..." if out is None else str(out)
        raise LocalParametersMissing(
            f"the run has no single model: {patterns} stayed on the clients, each of which has "
            "its own",
            remedy=f"headwater.load_model(PATH, task, local=FILE) gives a client's model: PATH is "
            f"{folder}, and a simulated client's FILE is PATH/local/NAME.safetensors",
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics after the last round; empty if there was none."""
        return dict(self.history[-1].metrics) if self.history else {}

    def evaluate(self, examples: Examples | None = None) -> DataResult:
        """Test the model on examples, or on the task's test examples.

        Raises:
            HeadwaterError: see ``headwater.evaluate``.
        """
        from headwater.server.evaluation_api import evaluate

        return evaluate(self.model, examples, task=self.task)

    def table(self) -> list[dict[str, float]]:
        """Return a flat dictionary of numbers for each round, as pandas takes them."""
        return [row.figures() for row in self.history]

    def plot(self) -> Figure:
        """Draw the loss, the metrics and more over the rounds; a notebook shows the figure.

        Raises:
            SettingsError: matplotlib is not installed, or there is no round.
        """
        folder = self.settings.out
        rows: list[Any] = [] if folder is None else read_rows(folder)
        rows = rows or [row_to_dict(row) for row in self.history]
        if not rows:
            raise SettingsError("there is no round to plot", remedy="train for a round or more")
        try:
            figure = curves(rows, task=self.settings.task)
        except ImportError as error:
            raise SettingsError(
                "plot() needs matplotlib, which is not installed: pip install 'headwater[server]'",
                remedy="pip install 'headwater[server]'",
            ) from error
        # A notebook asks for this method; without pyplot nothing else would draw the figure.
        figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]
        return figure

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Name what to use for a method that other libraries' results have."""
            meant = INSTEAD.get(name)
            raise AttributeError(
                f"a Run has no {name}{f'; write {meant}' if meant else ''}", name=name, obj=self
            )

    def __repr__(self) -> str:
        """Return one line with the key figures."""
        task = (self.settings.task or "").removeprefix(PREFIX)
        if not self.history:
            return f"<Run of {task}: no round>"
        last = self.history[-1]
        parts = [f"{last.round} round{'s' if last.round > 1 else ''}", last.loss_text()]
        parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in last.metrics.items()]
        parts.append(f"{sum(row.seconds for row in self.history):,.1f} s")
        return f"<Run of {task}: {', '.join(parts)}>"


class RunRecorder(Observer):
    """Collects a run's rows, and its model."""

    def __init__(self) -> None:
        """Begin without a run."""
        self._task: Any = None
        self._settings: Settings | None = None
        self._model: nn.Module | None = None
        self._rows: list[RoundRow] = []

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._settings, self._model = settings, model
        before = [] if settings.out is None or not round_number else read_rows(settings.out)
        self._rows = [row_of_dict(row) for row in before if row["round"] <= round_number]

    def loaded(self, task: Any) -> None:
        self._task = task

    def on_round(self, row: RoundRow) -> None:
        self._rows.append(row)

    @property
    def result(self) -> Run:
        """The run, after its end."""
        assert self._settings is not None  # the run has started
        assert self._model is not None
        return Run(
            settings=self._settings,
            shared_model=self._model.eval(),
            history=self._rows,
            task=self._task,
        )


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
