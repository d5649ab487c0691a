"""A run's folder: a run begins or resumes there, and keeps its checkpoint, settings and models.

``checkpoint`` and ``model_files`` write the files; this module chooses what is in them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.common.errors import HeadwaterError, RunFolderGone, SettingsError, StateError
from headwater.common.model.mismatch import mismatch_error
from headwater.common.model.trained_model import MODEL
from headwater.common.settings.changes import changes, check_no_links, optimizer_of, values_of
from headwater.common.settings.schema import SETTINGS_FILE, Settings
from headwater.common.settings.sources import load
from headwater.common.wording import counted
from headwater.server.fleet import Fleet
from headwater.server.planning import device_estimates, exclusions
from headwater.server.planning.plan_table import held_out_fraction
from headwater.server.rounds import checkpoint
from headwater.server.rounds.features import FEATURES, check_resumed
from headwater.server.rounds.model_files import save_adapter, save_model
from headwater.server.rounds.run_state import Training

log = logging.getLogger(__name__)

INITIAL = "model.initial"


def check_beginning(training: Training, folder: Path, *, resume: bool) -> None:
    """Check, before any client connects, that the run may begin or resume in its folder.

    Raises:
        SettingsError: the folder has a checkpoint, and the run should not resume.
        CheckpointCorrupt: the checkpoint, or the file of the spent privacy, cannot be read.
        PrivacySpent: nothing is left of the run's epsilon.
    """
    if not resume:
        _check_new(folder)
    elif training.features:
        _, done = checkpoint.run_position(folder, resume=True)
        for feature in training.features.values():
            feature.begin(num_rounds=done)
            if training.settings.has_round_after(done):
                feature.check_left(round_number=done + 1)


def _check_new(folder: Path) -> None:
    check_no_links(folder)
    if not (folder / checkpoint.FILE).exists():
        return
    done = checkpoint.saved_round(folder)
    what = "a checkpoint" if done is None else f"a run of {counted(done, 'round')}"
    raise SettingsError(
        f"{folder} already holds {what}, and without --resume a run begins anew",
        remedy="continue that run with --resume (--rounds N for more rounds in all), or choose "
        "another --out",
    )


def resume_or_begin(training: Training, fleet: Fleet, folder: Path, *, resume: bool) -> None:
    """Restore the checkpoint in the run's folder, or check that there is none.

    Without a checkpoint a resumed run begins: a service is started with --resume each time.

    Raises:
        SettingsError: there is one, and the run should not resume.
        HeadwaterError: see ``restore``.
    """
    if not resume:
        _check_new(folder)
    elif restore(training, folder, fleet):
        log.info("resumed after round %d", training.round)
    else:
        log.info("there is no checkpoint in %s: starting with round 1", folder)


def restore(training: Training, folder: Path, fleet: Fleet) -> bool:
    """Restore the checkpoint in ``folder``; return False if there is none.

    Raises:
        CheckpointCorrupt: it cannot be read.
        ModelMismatch: it belongs to another model.
        FrozenPartMismatch: the task's model has another frozen part.
        SettingsError: a setting has changed that decides which examples a device takes, or one
            that the state of the run does not fit.
    """
    saved = checkpoint.load(folder)
    if saved is None:
        return False
    try:
        _restore(training, folder, fleet, saved)
    except (HeadwaterError, OSError):
        raise
    except Exception as error:  # a field has another form than any run has written
        raise checkpoint.corrupt(folder, error) from error
    return True


def _restore(training: Training, folder: Path, fleet: Fleet, saved: checkpoint.Saved) -> None:
    """Restore a checkpoint whose content has its digest, which whoever sent it may have computed.

    Raises:
        HeadwaterError: see ``restore``.
    """
    progress = saved.progress
    if progress.layout_digest != training.image.layout.digest:
        raise mismatch_error(
            f"the checkpoint in {folder} belongs to another model",
            training.image.layout.rows,
            progress.layout,
            here="the task's model",
            there="the checkpoint",
            remedy="resume with the task that the run was started with",
        )
    checkpoint.check_frozen(folder, training.image, progress)
    for name in saved.features:
        if name not in FEATURES and name not in training.features:
            raise SettingsError(
                f"the run in {folder} was trained with the feature {name:.80}, of which nothing is "
                "here",
                remedy="resume with the --feature that it was started with",
            )
    chosen = _data_settings(training.settings)
    for key, saved_value in progress.asked.items():
        if chosen[key] != saved_value:
            raise SettingsError(
                f"the run in {folder} was started with {key} = {saved_value!r:.200}, not "
                f"{chosen[key]!r:.200}: the devices would take other examples",
                remedy="resume with the run's own settings: --resume --out DIR alone",
            )
    before = progress.settings or _settings_left(folder)
    check_resumed(before, training.settings)
    training.changed = changes(before, values_of(training.settings))
    if INITIAL in training.changed:
        raise SettingsError(
            f"the run in {folder} has a model already, and --initial-model names another",
            remedy="leave --initial-model out; or begin a new run with it: another --out",
        )
    training.image.bytes_U8.copy_(saved.image_U8)
    training.optimizer.restore(
        saved.optimizer,
        progress.optimizer,
        before=optimizer_of(before) if before else None,
        num_steps=progress.round,
    )
    training.sum.restore(progress.largest)
    training.norm_watch = replace(training.norm_watch, largest_median=progress.largest_median_norm)
    training.round, training.run_id = progress.round, progress.run_id
    training.counted = dict(progress.counted)
    training.planner.restore(
        device_estimates.from_json(progress.learned),
        exclusions.from_json(progress.held_back),
    )
    training.target.restore(progress.target)
    for name, feature in training.features.items():
        feature.restore(progress.features.get(name, {}), saved.features.get(name, {}))
    fleet.restore_simulated(progress.simulated)


def _settings_left(folder: Path) -> dict[str, Any]:
    """Return the settings that an earlier version's run left beside its checkpoint, if any."""
    file = folder / SETTINGS_FILE
    try:
        return values_of(load(file, {})) if file.exists() else {}
    except SettingsError as error:
        log.warning("what the resumed run changes is not known: %s", error)
        return {}


def _data_settings(chosen: Settings) -> dict[str, Any]:
    """Return the settings that decide which examples each device takes."""
    return {
        "seed": chosen.seed,
        "task": chosen.task,
        "simulation.clients": chosen.simulation.clients,
        "simulation.data": chosen.simulation.model_dump(mode="json")["data"],
        "held_out_fraction": held_out_fraction(chosen.evaluation),
        "held_out": chosen.evaluation.held_out,
        "partition.kind": chosen.partition.kind,
        "partition.examples_per_device": chosen.partition.examples_per_device,
    }


def save_checkpoint(training: Training, fleet: Fleet, folder: Path) -> None:
    """Replace the checkpoint by the last committed round.

    Raises:
        CheckpointFailed: see ``checkpoint.save``.
    """
    tensors, rest = training.optimizer.state()
    checkpoint.save(
        folder,
        _progress(training, fleet, rest),
        image_U8=training.image.bytes_U8,
        optimizer=tensors,
        features={name: feature.tensors() for name, feature in training.features.items()},
    )


def _progress(training: Training, fleet: Fleet, optimizer: str) -> checkpoint.Progress:
    """Return what a checkpoint stores in addition to its tensors."""
    features = training.features.items()
    return checkpoint.Progress(
        run_id=training.run_id,
        round=training.round,
        layout_digest=training.image.layout.digest,
        layout=training.image.layout.text,
        optimizer=optimizer,
        largest=training.sum.largest,
        largest_median_norm=training.norm_watch.largest_median,
        counted=training.counted,
        learned=training.planner.known.to_json(),
        asked=_data_settings(training.settings),
        target=training.target.state(),
        held_back=exclusions.to_json(training.planner.excluded),
        simulated=fleet.simulated_state(),
        features={name: state for name, one in features if (state := one.to_json())},
        frozen_digest=training.image.frozen_digest,
        settings=values_of(training.settings),
    )


def step_back(training: Training, folder: Path) -> None:
    """Return to the last checkpoint's model: a step may be half taken, or not stored."""
    saved = checkpoint.load(folder)
    training.round = 0 if saved is None else saved.progress.round
    if saved is not None:
        training.image.bytes_U8.copy_(saved.image_U8)


def interrupt_after(round_number: int, folder: Path | None) -> KeyboardInterrupt:
    """Return the interrupt of a run that was stopped, with a text about what it leaves."""
    if folder is None:
        return KeyboardInterrupt("stopped")
    if not round_number:
        return KeyboardInterrupt("stopped before round 1 had ended: no round is kept")
    return KeyboardInterrupt("stopped; committed rounds are kept, --resume continues after them")


@contextmanager
def removal_named(folder: Path | None) -> Iterator[None]:
    """Say of a file that vanished from the run's folder that somebody removes it.

    Whichever file it is: the files of a folder go one by one, and the folder last.

    Raises:
        RunFolderGone: a file of ``folder`` could not be written or read, as it is not there.
    """
    try:
        yield
    except Exception as error:
        if folder is not None and _has_lost_file(error, folder):
            raise RunFolderGone(f"{folder} was removed while the run went on") from error
        raise


def _has_lost_file(error: BaseException | None, folder: Path) -> bool:
    seen = set[int]()  # a cause may be in a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        name = error.filename if isinstance(error, FileNotFoundError) else None
        if name is not None and Path(os.fsdecode(name)).is_relative_to(folder):
            return True
        error = error.__cause__
    return False


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the run's settings to a file that --config reads.

    Raises:
        StateError: the folder is full or not writable.
    """
    try:
        (folder / SETTINGS_FILE).write_text(settings.to_toml(), encoding="utf-8")
    except OSError as error:
        raise StateError(f"cannot write {folder / SETTINGS_FILE}: {error.strerror}") from error


def save_last(folder: Path, training: Training) -> None:
    """Write the model, and beside it an adapter file if a part is frozen, after a committed round.

    Raises:
        StateError: the disk is full or not writable.
    """
    image, number = training.image, training.round
    if not number:
        return
    with training.optimizer.kept_weights():
        save_model(folder / MODEL, image, training.settings, round_number=number)
        if any(not parameter.requires_grad for parameter in image.model.parameters()):
            save_adapter(folder, image, training.settings, round_number=number)
