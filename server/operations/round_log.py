"""A run's log files: rounds.jsonl (one JSON object per round), TensorBoard events and curves.png."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from headwater.common.errors import StateError
from headwater.common.system.atomic_file import write_whole
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import ClientRow, MaskedClientRow, RoundRow

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


class RoundLog(Observer):
    """Appends each round to rounds.jsonl and to the TensorBoard log, and draws curves.png."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._file: TextIO
        self._board: _Board | None = None

    def started(self, folder: Path, *, round_number: int) -> None:
        """Open the files and drop the rows after ``round_number``, the last checkpoint's round.

        The checkpoints of the dropped rounds were never written: they are run again.

        Raises:
            StateError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_rows(folder) if row["round"] <= round_number]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            write_whole(folder / ROUNDS, text.encode())
            self._file = (folder / ROUNDS).open("a")
        except OSError as error:
            raise StateError(
                f"cannot write {folder / ROUNDS}: {error.strerror}", remedy="choose another --out"
            ) from error
        self._folder = folder
        self._board = _Board.open(folder / EVENTS)

    def stepped(self, row: RoundRow) -> None:
        """Write one round's row.

        Raises:
            StateError: the disk is full.
        """
        if self._folder is None:
            return
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

    def ended(self) -> None:
        """Close the files and draw the curves; on a full disk only the curves are missing."""
        if self._folder is None:
            return
        try:
            self._file.close()
            if self._board is not None:
                self._board.close()
            draw_curves(self._folder)
        except OSError as error:
            log.warning("no %s in %s: %s", CURVES, self._folder, error.strerror)


def row_to_dict(row: RoundRow) -> dict[str, Any]:
    """Return a row's fields by name; ``dataclasses.asdict`` would copy every step's figures."""
    return {
        **_fields(row),
        "clients": [_fields(client) for client in row.clients],
        "masked_clients": [_fields(client) for client in row.masked_clients],
    }


def _json(row: RoundRow) -> str:
    fields = row_to_dict(row)
    try:
        return json.dumps(fields, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(fields), allow_nan=False)


def _fields(row: RoundRow | ClientRow | MaskedClientRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__slots__}


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by null, which JSON has no numbers for; a test loss may be one."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read rounds.jsonl as dictionaries; a last line that a crash cut off is skipped."""
    path = folder / ROUNDS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            log.warning("%s: an incomplete line is skipped", path)
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
