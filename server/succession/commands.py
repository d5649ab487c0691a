"""The command ``headwater-server submit``: puts a run into the queue of another."""

from __future__ import annotations

from pathlib import Path

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import SETTINGS_FILE
from headwater.common.settings.sources import load
from headwater.common.system.console import console
from headwater.common.wording import in_shell
from headwater.server.operations.orders import check_run
from headwater.server.operations.run_lock import read_server_state
from headwater.server.succession.run_queue import last_run, queued_runs, submit
from headwater.server.succession.submission import read_submission


def submit_run(config: Path, folder: Path, *, is_next: bool) -> None:
    """Put a run into the queue of the run in a folder, and print when it begins.

    Raises:
        SettingsError: there is no run in the folder.
        HeadwaterError: see ``read_submission`` and ``submit``.
    """
    last = last_run(folder)
    check_run(last)
    file = last / SETTINGS_FILE
    if file.exists() and load(file, {}).standby.shared_state is not None:
        raise SettingsError(
            f"the run in {last} has a standby server, and such a run has no queue",
            remedy="end it with drain, and start the next run with its own --shared-state",
        )
    if not read_server_state(last).follows_queue:
        raise SettingsError(
            f"the server of the run in {last} takes no runs from a queue: it is one of the Python "
            "API or of the simulator",
            remedy="serve the run with headwater-server, or start the next run when this one ends",
        )
    server_folder = read_server_state(last).info.get("working_folder")
    settings = read_submission(
        config, server_folder=None if server_folder is None else Path(server_folder)
    )
    folder = submit(folder, settings, is_next=is_next)
    server, number = read_server_state(folder), len(queued_runs(folder))
    if not server.is_up:
        restart = f"{server.command} --resume --out {in_shell(folder)}"
        when = f"no server runs; the queue goes on with: {restart}"
    elif is_next:
        when = "it begins after the current round"
    else:
        when = "it begins when the runs before it have ended; --next begins one after this round"
    console.print(f"{number} in the queue of {folder}; {when}", soft_wrap=True)
