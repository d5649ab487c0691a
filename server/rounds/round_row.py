"""What a run leaves behind: one JSON object a round, TensorBoard events, a plot.

Whatever is skipped, refused or shifted is counted here.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from headwater.common.errors import StateError
from headwater.common.messages import Plan, Ready, Reported
from headwater.common.stats.gradient_noise import after_each
from headwater.common.system.atomic_file import write_whole
from headwater.server.planning.target_batch import TargetBy

log = logging.getLogger(__name__)

ROUNDS = "rounds.jsonl"
CURVES = "curves.png"
EVENTS = "tensorboard"
NOISE = (
    "noise_scale",
    "gradient_variance",
    "squared_gradient",
    "heterogeneity",
    "measured_share",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRow:
    """One client's part in a round."""

    name: str
    accumulation_steps: int
    micro_batch_size: int
    num_examples: int
    num_refused: int
    weight: int
    seconds: float
    loss: float
    step_seconds: list[float]
    step_loss: list[float]
    step_gradient_norm: list[float | None]
    gradient_variance: list[float | None]
    peak_bytes: int
    reason: str
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedClientRow:
    """One client's part in a masked round: what it was asked for, and what it shows of itself.

    How much of that it summed, and what came out, nobody knows but the client.
    """

    name: str
    planned_steps: int
    planned_micro_batch_size: int
    planned_examples: int
    seconds: float
    peak_bytes: int
    plan: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRow:
    """One committed round, as it stands in rounds.jsonl."""

    round: int
    num_clients: int
    num_invited: int
    num_examples: int
    weight: int
    loss: float
    metrics: dict[str, float]
    learning_rate: float
    seconds: float
    seconds_split: dict[str, float]
    slowest_client_seconds: float
    updates_per_hour: float
    bytes_up: int
    bytes_down: int
    num_scale_shifts: int
    # What the round was to gather, in examples, and by which setting; not set where K is.
    target: int | None = None
    target_by: TargetBy | None = None
    # S, |G|^2 and heterogeneity are this round's own, the noise scale S/|G|^2 that of the rounds so
    # far, all per unit of weight (server/planning/noise_scale.py). The devices that measured sent this share
    # of the round's weight. Not set where none did.
    noise_scale: float | None = None
    gradient_variance: float | None = None
    squared_gradient: float | None = None
    heterogeneity: float | None = None
    measured_share: float | None = None
    # Times that the round was begun before, and aborted.
    num_aborted: int = 0
    # Coordinates and numbers that a masked round's fixed-point ranges cut off; not set in others.
    num_clipped: int | None = None
    # Devices that claimed more than was believed, and those that were too slow for the deadline.
    num_bounded: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    clients: Sequence[ClientRow] = ()
    masked_clients: list[MaskedClientRow] = field(default_factory=list)

    @property
    def k_range(self) -> tuple[int, int]:
        """The smallest and the largest K of the cohort; in a masked round, of its plans."""
        steps = (
            self.clients.num_steps
            if isinstance(self.clients, ClientRows)
            else [row.accumulation_steps for row in self.clients]
        )
        steps += [row.planned_steps for row in self.masked_clients]
        return min(steps), max(steps)


def client_row(report: Reported, *, plan_reason: str, local_steps: int) -> ClientRow:
    """Turn a client's report into its row."""
    steps = report.steps
    return ClientRow(
        name=report.name,
        accumulation_steps=report.num_steps,
        micro_batch_size=report.micro_batch_size,
        num_examples=report.num_examples,
        num_refused=report.num_refused,
        weight=report.weight,
        seconds=report.seconds,
        loss=report.loss_sum / report.weight,
        step_seconds=[step.seconds for step in steps],
        step_loss=[step.loss for step in steps],
        step_gradient_norm=[step.gradient_norm for step in steps],
        # Between local steps the model moves and the sum begins anew: no two batch sizes of one.
        gradient_variance=(
            [found.variance if found else None for found in after_each(steps)]
            if local_steps == 1
            else [None] * len(steps)
        ),
        peak_bytes=max((step.peak_bytes for step in steps), default=0),
        reason=report.reason,
        plan=plan_reason,
    )


class ClientRows(Sequence[ClientRow]):
    """The rows of a round's clients, each made when it is asked for: nobody may be."""

    def __init__(self, accepted: Mapping[str, Reported], plans: Mapping[str, Plan]) -> None:
        self._reports = [accepted[name] for name in plans if name in accepted]
        self._plans = plans

    @property
    def num_steps(self) -> list[int]:
        """K of each."""
        return [report.num_steps for report in self._reports]

    def __len__(self) -> int:
        return len(self._reports)

    @overload
    def __getitem__(self, at: int) -> ClientRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[ClientRow]: ...
    def __getitem__(self, at: int | slice) -> ClientRow | list[ClientRow]:
        if isinstance(at, slice):
            return [self._row(report) for report in self._reports[at]]
        return self._row(self._reports[at])

    def _row(self, report: Reported) -> ClientRow:
        plan = self._plans[report.name]
        return client_row(report, plan_reason=plan.reason, local_steps=plan.local_steps)


def masked_client_row(ready: Ready, plan: Plan) -> MaskedClientRow:
    """Turn what a client tells of itself in a masked round into its row."""
    return MaskedClientRow(
        name=ready.name,
        planned_steps=plan.accumulation_steps,
        planned_micro_batch_size=plan.micro_batch_size,
        planned_examples=plan.quota,
        seconds=ready.seconds,
        peak_bytes=ready.peak_bytes,
        plan=plan.reason,
    )


class Journal:
    """Appends to rounds.jsonl and to the TensorBoard log."""

    def __init__(self, folder: Path, *, resumed_round: int) -> None:
        """Open the journal and drop the rows behind ``resumed_round``.

        They belong to rounds whose checkpoint was never written.

        Raises:
            StateError: the folder cannot be written.
        """
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_rows(folder) if row["round"] <= resumed_round]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_whole(folder / ROUNDS, text.encode())
            self._file = (folder / ROUNDS).open("a")
        except OSError as error:
            raise StateError(
                f"cannot write {folder / ROUNDS}: {error.strerror}", remedy="choose another --out"
            ) from error
        self._board = _Board.open(folder / EVENTS)

    def append(self, row: RoundRow) -> None:
        """Write one round.

        Raises:
            StateError: the disk is full.
        """
        try:
            self._file.write(_json(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise StateError(
                f"round {row.round} cannot be written to {self._folder / ROUNDS}: {error.strerror}",
                remedy="free space and go on with --resume",
            ) from error
        if self._board is not None:
            scalars = {"loss": row.loss, "learning_rate": row.learning_rate, **row.metrics}
            scalars |= {"effective_batch_size": row.weight, "seconds": row.seconds}
            scalars |= {
                name: value
                for name in ("target", *NOISE)
                if (value := getattr(row, name)) is not None
            }
            self._board.add(row.round, scalars)

    def close(self) -> None:
        """Close the files and draw the curves; a full disk costs the curves and no more."""
        try:
            self._file.close()
            if self._board is not None:
                self._board.close()
            draw_curves(self._folder)
        except OSError as error:
            log.warning("no %s in %s: %s", CURVES, self._folder, error.strerror)


def plain(row: RoundRow) -> dict[str, Any]:
    """Return a row's fields by name; ``dataclasses.asdict`` would copy all figures of all steps."""
    return {
        **_fields(row),
        "clients": [_fields(client) for client in row.clients],
        "masked_clients": [_fields(client) for client in row.masked_clients],
    }


def _json(row: RoundRow) -> str:
    told = plain(row)
    try:
        return json.dumps(told, allow_nan=False)
    except ValueError:
        return json.dumps(_plain(told), allow_nan=False)


def _fields(row: RoundRow | ClientRow | MaskedClientRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}


def _plain(value: Any) -> Any:
    """Put null for what JSON has no number for: a test loss may be NaN or infinite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read rounds.jsonl; a last line that was cut off is left out."""
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            log.warning("%s: a line that was cut off is left out", path)
    return rows


class _Board:
    """TensorBoard's event file, written without importing TensorFlow or torch's wrapper."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    @staticmethod
    def open(folder: Path) -> _Board | None:
        if importlib.util.find_spec("tensorboard") is None:
            log.warning("no TensorBoard log: pip install 'headwater[server]' writes one")
            return None
        return _Board(folder)

    def add(self, step: int, scalars: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


def draw_curves(folder: Path) -> Path | None:
    """Draw loss, test metrics and K over the rounds into curves.png; None if it cannot be drawn.

    Where the noise scale was followed a fourth panel shows it, with the effective batch.
    """
    rows = read_rows(folder)
    if not rows:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        log.warning("no curves.png: pip install 'headwater[server]' draws one")
        return None
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    rounds = [row["round"] for row in rows]
    has_batch = any(row.get("target_by") == "noise scale" for row in rows)
    num_panels = 4 if has_batch else 3
    width = 3.7 * num_panels
    figure = Figure(figsize=(width, 3.4))
    # Margins in inches: to measure every label for them takes as long as to draw the whole.
    margins = {"left": 0.8 / width, "right": 1 - 0.1 / width, "bottom": 0.15, "top": 0.9}
    loss, quality, work, *batch = figure.subplots(
        1, num_panels, gridspec_kw={**margins, "wspace": 0.22}
    )
    losses = [math.nan if row["loss"] is None else row["loss"] for row in rows]
    loss.plot(rounds, losses, label="training")
    for name in ("test_loss", "held_out_loss"):
        _plot_metric(loss, rows, name, name.removesuffix("_loss").replace("_", " "))
    shown = [value for line in loss.get_lines() for value in line.get_ydata()]
    scale = "linear" if any(value <= 0 for value in shown) else "log"
    loss.set(title="loss per unit of weight", xlabel="round", yscale=scale)
    loss.legend(frameon=False)
    names = sorted({name for row in rows for name in row["metrics"] if not name.endswith("_loss")})
    for name in names:
        _plot_metric(quality, rows, name, name.replace("_", " "))
    quality.set(title="metrics", xlabel="round")
    if names:
        quality.legend(frameon=False)
    steps = [
        [client["accumulation_steps"] for client in row["clients"]]
        + [client["planned_steps"] for client in row.get("masked_clients", [])]
        for row in rows
    ]
    work.fill_between(
        rounds, [min(s) for s in steps], [max(s) for s in steps], alpha=0.3, label="K, min to max"
    )
    work.plot(rounds, [sum(s) / len(s) for s in steps], label="K, mean")
    work.set(title="accumulation steps per device", xlabel="round")
    work.legend(frameon=False)
    if has_batch:
        _draw_batch(batch[0], rows)
    for axes in (loss, quality, work, *batch):
        axes.spines[["top", "right"]].set_visible(False)
    path = folder / CURVES
    figure.savefig(path, dpi=120)
    return path


def _draw_batch(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the effective batch and the noise scale, in the same units: of weight."""
    rounds = [row["round"] for row in rows]
    axes.plot(rounds, [row["weight"] for row in rows], label="effective batch")
    # A round without an estimate leaves a gap.
    scale = [math.nan if row["noise_scale"] is None else row["noise_scale"] for row in rows]
    axes.plot(rounds, scale, label="noise scale")
    axes.set(title="weight per round", xlabel="round")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.legend(frameon=False)


def _plot_metric(axes: Any, rows: list[dict[str, Any]], name: str, label: str) -> None:
    points = [
        (row["round"], row["metrics"][name]) for row in rows if row["metrics"].get(name) is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), label=label)
