"""A sweep's worker process: executes one run after another, so that torch loads only once.

The sweep and the worker hold the two ends of a pipe. The sweep sends a run with its settings; the
worker answers with a ``RunProgress`` for each committed round and one for the run's end. SIGINT, or
the end of the sweep's process, interrupts the run as Ctrl-C does: its committed rounds are kept.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwater.common.errors import Diverged, HeadwaterError, TooFewClients
from headwater.common.system.atomic_file import make_private_folder, write_atomically
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.portability import PipeEnd
from headwater.common.system.stop_signals import interrupt

if TYPE_CHECKING:
    from headwater.server.rounds.round_loop import OnRound
    from headwater.simulation.sweep.grid import SweepRun

log = logging.getLogger(__name__)

RESULT, LOG = "result.json", "log.txt"
# What a result holds of each round.
KEYS = (
    *("round", "loss", "weight", "metrics"),
    *("num_examples", "bytes_up", "bytes_down", "virtual_seconds", "seconds"),
)

Outcome = Literal["whole", "diverged", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """A committed round, or with ``ended`` the end of a run, and a line of text about it."""

    line: str
    round: int = 0
    ended: Outcome | None = None


def execute_runs(pipe: PipeEnd) -> None:
    """Execute each run whose settings arrive, until the sweep closes the pipe."""
    from headwater.common.system.console import start_log

    # A process group of its own: the terminal's Ctrl-C reaches the sweep, which then decides.
    # SIGINT is blocked until here, and ignored where a shell started the sweep in the background.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, lambda *_: interrupt())
    threading.Thread(target=_interrupt_when_the_sweep_ends, daemon=True).start()
    try:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        with lasting_output():
            start_log(verbose=False)
            while True:
                pipe.send(_execute(pipe.recv(), pipe))
    except EOFError:
        return
    except (KeyboardInterrupt, OSError):
        os._exit(130)  # the run's files are complete, and its threads need not be awaited


def _interrupt_when_the_sweep_ends() -> None:
    sweep = parent_process()
    assert sweep is not None  # this process is a child
    sweep.join()
    os.kill(os.getpid(), signal.SIGINT)


def _execute(run: SweepRun, pipe: PipeEnd) -> RunProgress:
    """Execute or resume a run, and write its result unless another attempt could end otherwise."""
    from headwater.server.operations.round_display import brief_line
    from headwater.server.rounds.round_row import RoundRow

    def on_round(row: RoundRow) -> None:
        pipe.send(RunProgress(round=row.round, line=brief_line(row)))

    make_private_folder(run.folder)
    _redirect_output(run.folder / LOG)
    try:
        ended, message = execute_run(run, on_round=on_round)
    except HeadwaterError as error:
        log.error("%s: %s", error.code, error.message)
        return RunProgress(ended="failed", line=f"{error.code}: {error.message}")
    except Exception as error:
        log.exception("the run failed")
        return RunProgress(ended="failed", line=f"{type(error).__name__}: {error}")
    return RunProgress(ended=ended, line=message)


def execute_run(run: SweepRun, *, on_round: OnRound) -> tuple[Outcome, str]:
    """Execute or resume a run in this process, and write its result; return how and why it ended.

    Raises:
        HeadwaterError: it did not end, and another attempt could end otherwise; there is no result.
    """
    from headwater.server.operations.round_log import read_rows
    from headwater.server.rounds.checkpoint import FILE
    from headwater.simulation.run import run_engine

    folder = run.folder
    ended: Outcome = "whole"
    message = ""
    try:
        run_engine(
            run.settings,
            on_round=on_round,
            resume=(folder / FILE).exists(),
            has_report=not run.is_trial,
        )
    except Diverged as error:
        ended, message = "diverged", error.message
    except TooFewClients as error:
        if not run.is_trial:
            raise
        ended, message = "diverged", error.message
    rounds = [{key: row[key] for key in KEYS} for row in read_rows(folder)]
    result = {"ended": ended, "message": message, "rounds": rounds}
    write_atomically(folder / RESULT, json.dumps(result).encode())
    return ended, message


def _redirect_output(path: Path) -> None:
    """Append this process's standard output and error to a file from now on."""
    with path.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
