"""A sweep's worker process: executes one run after another, so that torch loads only once.

The sweep and the worker hold the two ends of a pipe. The sweep sends the settings of a run; the
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
from typing import Literal

from headwater.common.errors import Diverged, HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.common.system.portability import PipeEnd
from headwater.common.system.stop_signals import interrupt

log = logging.getLogger(__name__)

RESULT, LOG = "result.json", "log.txt"

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


def _execute(settings: Settings, pipe: PipeEnd) -> RunProgress:
    """Execute or resume a run, and write its result unless another attempt could end otherwise."""
    from headwater.server.operations.round_display import brief_line
    from headwater.server.operations.round_log import read_rows
    from headwater.server.rounds.checkpoint import FILE
    from headwater.server.rounds.round_row import RoundRow
    from headwater.simulation.run import run_engine

    def on_round(row: RoundRow) -> None:
        pipe.send(RunProgress(round=row.round, line=brief_line(row)))

    folder = settings.out
    assert folder is not None  # a sweep sets each run's folder
    folder.mkdir(parents=True, exist_ok=True)
    _redirect_output(folder / LOG)
    ended: Outcome = "whole"
    message = ""
    try:
        run_engine(settings, on_round=on_round, resume=(folder / FILE).exists())
    except Diverged as error:
        ended, message = "diverged", error.message
    except HeadwaterError as error:
        log.error("%s: %s", error.code, error.message)
        return RunProgress(ended="failed", line=f"{error.code}: {error.message}")
    except Exception as error:
        log.exception("the run failed")
        return RunProgress(ended="failed", line=f"{type(error).__name__}: {error}")
    keys = ("round", "loss", "weight", "metrics")
    rounds = [{key: row[key] for key in keys} for row in read_rows(folder)]
    result = {"ended": ended, "message": message, "rounds": rounds}
    write_atomically(folder / RESULT, json.dumps(result).encode())
    return RunProgress(ended=ended, line=message)


def _redirect_output(path: Path) -> None:
    """Append this process's standard output and error to a file from now on."""
    with path.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
