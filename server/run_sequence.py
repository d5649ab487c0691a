"""Serves one run after another: the first, then those of its queue, on the same fleet.

Between two runs the server closes the devices' streams without a goodbye. The devices connect
again, as after a restart of the server, and one that has another task loaded changes to the new
run's task if that is installed on it (``server.transport.admission``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.common.settings.schema import SETTINGS_FILE, Settings
from headwater.common.settings.sources import default_out, load_run
from headwater.common.system.console import console
from headwater.common.transport.tls import Credentials
from headwater.server.features import run_queue
from headwater.server.operations.progress import print_result, print_settings, show_progress
from headwater.server.serve import serve_run

if TYPE_CHECKING:
    from headwater.server.standby.takeover import SharedRun


def serve_runs(
    settings: Settings,
    credentials: Credentials | None,
    *,
    resume: bool,
    shared: SharedRun | None = None,
) -> None:
    """Serve a run, and then each run of the queue; a drained or ``shared`` run is the last one.

    A run that others have followed is closed: its server goes on with the last of them.

    Raises:
        HeadwaterError: see ``serve_run``, ``take_next`` and ``check_submitted``.
    """
    assert settings.out is not None
    first, queue = settings, run_queue(settings.out)
    last = settings.out if queue is None else queue.last_run(settings.out)
    if resume and last != settings.out:
        console.print(f"{settings.out} is closed: the run in {last} follows it", soft_wrap=True)
        settings = _left_in(last, first, address=None)
    while True:
        assert settings.out is not None
        if resume and settings.submitted_code is not None:
            _check_submitted(settings, settings.out)
        print_settings(settings, where=settings.server.listen)
        with show_progress(settings) as (on_round, observer):
            end = serve_run(
                settings,
                credentials,
                on_round=on_round,
                resume=resume,
                observer=observer,
                shared=shared,
                follows_queue=shared is None,  # a shared run has no queue
            )
        print_result(settings)
        if not end.goes_on:
            return
        from headwater.server.succession.run_queue import take_next  # now that a run waits

        out = take_next(settings.out, default_out=default_out(settings))
        if out is None:
            return
        # With --resume, as its folder may have rounds from before a kill.
        settings, resume = _left_in(out, first, address=end.address), True


def _left_in(out: Path, first: Settings, *, address: str | None) -> Settings:
    """Return the settings of a run from the queue, as this server trains it."""
    from headwater.server.succession.submission import of_this_server

    return of_this_server(
        load_run(None, {"out": out}, resume=True, is_own=True), first, address=address
    )


def _check_submitted(settings: Settings, out: Path) -> None:
    """Check the code of a queued run that has taken no step, also if its server was killed."""
    from headwater.server.rounds.checkpoint import saved_round
    from headwater.server.succession.submitted_code import check_submitted

    if saved_round(out) is None:
        file = out / SETTINGS_FILE
        check_submitted(settings, remedy=f"put the file back, or take submitted_code out of {file}")
