"""Checks the settings of a run before it is put into a server's queue.

A mistake is found when the run is submitted, and not days later, when the run before it ends: the
task is loaded, the model built, the optimizer made, and the files of code are noted. Paths become
absolute if the server runs in another working folder.
"""

from __future__ import annotations

from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.settings.changes import check_code
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import default_out, load
from headwater.common.user_code.task_spec import source_file, split_place
from headwater.server.rounds import checkpoint
from headwater.server.rounds.run_state import Training
from headwater.server.succession.submitted_code import noted_code


def read_submission(config: Path, *, server_folder: Path | None) -> Settings:
    """Return the settings of a run that can be trained here.

    ``server_folder`` is the server's working folder; None if it is not known.

    Raises:
        SettingsError: the file names no task, a folder that holds a run, or code outside of this
            process's working folder or of the server's; or see ``load``.
        HeadwaterError: the run cannot begin, see ``Training``.
    """
    settings = load(config, {})
    if settings.task is None:
        raise SettingsError(f"{config} names no task", remedy="add the line task = FILE.py:Class")
    if settings.out is not None and (settings.out / checkpoint.FILE).exists():
        raise SettingsError(
            f"{config}: {settings.out} already holds a run",
            remedy="choose another out, or leave it out: then it is runs/TASK-TIME",
        )
    check_code(settings, config)
    if server_folder != Path.cwd():
        settings = _with_absolute_paths(settings)
        check_code(settings, config, folder=server_folder)
    if settings.has_task_bundle:
        from headwater.common.task_bundles.signed_bundle import with_opened_task

        settings = with_opened_task(settings)
    written = settings.model_copy(update={"out": settings.out or default_out(settings)})
    Training(written, run_id=0).check()
    return settings.model_copy(update={"submitted_code": noted_code(settings)})


def _with_absolute_paths(settings: Settings) -> Settings:
    optimizer, algorithm, model = settings.optimizer, settings.algorithm, settings.model
    initial, out = model.initial, settings.out
    return settings.model_copy(
        update={
            "task": _absolute(settings.task),
            "out": None if out is None else out.absolute(),
            "optimizer": optimizer.model_copy(update={"name": _absolute(optimizer.name)}),
            "algorithm": algorithm.model_copy(update={"name": _absolute(algorithm.name)}),
            "model": model.model_copy(
                update={"initial": None if initial is None else initial.absolute()}
            ),
        }
    )


def _absolute(spec: str | None) -> str | None:
    """Return FILE.py:NAME or FILE.task with the file's absolute path; any other name as it is."""
    if spec is None:
        return None
    if spec.endswith(".task"):
        return str(Path(spec).absolute())
    place, name = split_place(spec)
    if not place.endswith(".py"):
        return spec
    file = source_file(spec) or Path(place)
    return f"{file.absolute()}:{name}" if name else str(file.absolute())


def of_this_server(settings: Settings, server: Settings, *, address: str | None) -> Settings:
    """Return a run's settings on a server that runs: address, certificates and ports stay.

    So do its alerts, unless the run has its own. ``address`` is where the server's devices connect;
    None before it has listened.
    """
    own = server.server
    if address is not None:
        own = own.model_copy(update={"listen": address})
    return settings.model_copy(
        update={
            "server": own,
            "tls": server.tls,
            "standby": server.standby,
            "plain_text": server.plain_text,
            "public_metrics": server.public_metrics,
            "threads": server.threads,
            "alerts": server.alerts if settings.alerts.notify is None else settings.alerts,
        }
    )
