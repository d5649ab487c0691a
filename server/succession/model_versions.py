"""Keeps dated versions of a run's model: a file for each week, day or month, and an index of them.

A run that does not end has no last model, and its checkpoint is replaced each round. A version is
the model of the first round that is committed in a new period, in UTC: ``versions/2026-W48`` begins
the 48th week of ISO 8601. The period in which the run begins has no version, as its model has not
learned yet. A server that was down for three weeks writes one version, and no two have one name.

The index is replaced after the model file. A kill between both leaves a file without an entry,
which the next round of the period replaces.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from headwater.common.errors import StateError
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import make_private_folder, write_atomically
from headwater.common.system.json_logs import rfc3339, to_json_value
from headwater.server.features import versions_every
from headwater.server.rounds.model_files import save_model
from headwater.server.rounds.observer import Observer
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training

log = logging.getLogger(__name__)

FOLDER, INDEX = "versions", "index.json"
FORMATS = {"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}

Clock = Callable[[], float]


def period_of(every: str, now: float) -> str:
    """Return the period of a time in seconds since 1970: 2026-11-23, 2026-W48 or 2026-11.

    Later periods of one kind are greater texts.
    """
    return dt.datetime.fromtimestamp(now, dt.UTC).strftime(FORMATS[every])


@dataclass(kw_only=True, slots=True)
class VersionIndex:
    """The versions of a run, oldest first, and the last period that needs none any more."""

    every: str
    period: str
    versions: list[dict[str, Any]] = field(default_factory=list)

    def is_due(self, period: str) -> bool:
        """Return whether a period is a new one; after a clock was set back, none is."""
        return period > self.period


def read_index(folder: Path) -> VersionIndex | None:
    """Return the index of a run's folder; None if the run has written none.

    Raises:
        StateError: it cannot be read.
    """
    path = folder / FOLDER / INDEX
    try:
        plain = json_of(path.read_text(encoding="utf-8"))
        files = [str(one["file"]) for one in plain["versions"]]
        if any(Path(name).name != name for name in files):
            raise ValueError("a version's file lies in another folder")
        return VersionIndex(**plain)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"the index of model versions {path} cannot be read: {error}",
            remedy="delete it: the versions' files stay, and a new index begins",
        ) from error


class ModelVersions(Observer):
    """Writes the versions of a training to the folder ``versions`` of its run."""

    def __init__(self, training: Training, *, clock: Clock = time.time) -> None:
        self._training = training
        self._clock = clock
        self._every = versions_every(training.settings)
        self._index: VersionIndex | None = None

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        """Read the index, or begin it in the current period.

        Raises:
            StateError: it cannot be read or written.
        """
        if settings.out is None:
            return
        index, period = read_index(settings.out), period_of(self._every, self._clock())
        if index is None or index.every != self._every:
            versions = [] if index is None else index.versions
            index = VersionIndex(every=self._every, period=period, versions=versions)
            try:
                make_private_folder(settings.out / FOLDER)
                _write(settings.out, index)
            except OSError as error:
                raise StateError(
                    f"cannot write {settings.out / FOLDER}: {error.strerror}"
                ) from error
        self._index = index

    def on_round(self, row: RoundRow) -> None:
        """Write a version in the first round of a period; a full disk delays it by a round."""
        folder = self._training.settings.out
        if self._index is None or folder is None:
            return
        now = self._clock()
        if not self._index.is_due(period := period_of(self._every, now)):
            return
        try:
            version = self._save(folder, period, row, now)
            versions = [one for one in self._index.versions if one["file"] != version["file"]]
            index = VersionIndex(every=self._every, period=period, versions=[*versions, version])
            too_old = self._too_old(index)
            _write(folder, index)
            for one in too_old:
                (folder / FOLDER / one["file"]).unlink(missing_ok=True)
        except (StateError, OSError) as error:
            log.warning("version %s is not written yet: %s", period, error)
            return
        self._index = index
        log.info("model version %s: the model of round %d", version["file"], row.round)

    def _save(self, folder: Path, period: str, row: RoundRow, now: float) -> dict[str, Any]:
        file = folder / FOLDER / f"{period}.safetensors"
        with self._training.optimizer.kept_weights():
            save_model(file, self._training.image, self._training.settings, round_number=row.round)
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {
            "file": file.name,
            "round": row.round,
            "at": rfc3339(now),
            "sha256": digest,
            "metrics": to_json_value(row.metrics),
        }

    def _too_old(self, index: VersionIndex) -> list[dict[str, Any]]:
        """Take the versions beyond the number to keep from the index, and return them."""
        kept = self._training.settings.versions.kept
        num_old = 0 if kept is None else max(len(index.versions) - kept, 0)
        old, index.versions = index.versions[:num_old], index.versions[num_old:]
        return old


def _write(folder: Path, index: VersionIndex) -> None:
    text = json.dumps(asdict(index), indent=1, allow_nan=False)
    write_atomically(folder / FOLDER / INDEX, text.encode())
