"""A process that runs one run of a sweep after another: torch is loaded and data read once.

It reads the settings of a run as a JSON object a line, and answers with one for each round and one
for the end. A run that has a checkpoint goes on from it. When its input ends the process stops, in
mid-run as after Ctrl-C: what was committed stays. So nothing is left running when a sweep dies.
"""

from __future__ import annotations

import _thread
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO

from headwater.common.errors import Diverged, HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_whole

log = logging.getLogger(__name__)

RESULT, LOG = "result.json", "log.txt"

Ended = Literal["whole", "diverged", "failed"]


def work(asked: TextIO, answers: TextIO) -> None:
    """Run what is asked for until there is no more."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    has_ended, is_running = threading.Event(), threading.Event()

    def listen() -> None:
        for line in asked:
            lines.put(line)
        has_ended.set()
        lines.put(None)
        if is_running.is_set():
            _thread.interrupt_main()

    def tell(**told: Any) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    threading.Thread(target=listen, daemon=True).start()
    while (line := lines.get()) is not None:
        settings = Settings.model_validate(json.loads(line))
        assert settings.out is not None  # a sweep gives each run its folder
        settings.out.mkdir(parents=True, exist_ok=True)
        _log_into(settings.out / LOG)
        is_running.set()
        if has_ended.is_set():
            return
        ended, message = _run(settings, settings.out, tell)
        is_running.clear()
        tell(ended=ended, message=message)


def _run(settings: Settings, folder: Path, tell: Callable[..., None]) -> tuple[Ended, str]:
    """Run the settings, and leave the result in their folder if it would be the same again."""
    from headwater.server.operations.progress import line_of
    from headwater.server.rounds.checkpoint import FILE
    from headwater.server.rounds.round_row import RoundRow
    from headwater.simulation.run import run_engine

    def on_round(row: RoundRow) -> None:
        tell(round=row.round, line=line_of(row))

    ended: Ended = "whole"
    message = ""
    try:
        run_engine(settings, on_round=on_round, resume=(folder / FILE).exists())
    except Diverged as error:
        ended, message = "diverged", error.message
    except HeadwaterError as error:
        log.error("%s: %s", error.code, error.message)
        return "failed", f"{error.code}: {error.message}"
    except Exception as error:
        log.exception("the run failed")
        return "failed", f"{type(error).__name__}: {error}"
    result = {"ended": ended, "message": message, "rounds": told_rounds(folder)}
    write_whole(folder / RESULT, json.dumps(result).encode())
    return ended, message


def told_rounds(folder: Path) -> list[dict[str, Any]]:
    """Return what a sweep needs of each round: its number, loss, weight and metrics."""
    from headwater.server.rounds.round_row import read_rows

    keys = ("round", "loss", "weight", "metrics")
    return [{key: row[key] for key in keys} for row in read_rows(folder)]


def _log_into(path: Path) -> None:
    """Send all that this process prints from now on to the end of a file."""
    with path.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def main() -> None:
    """Take orders from the standard input; the answers have a way of their own."""
    from headwater.common.system.console import start_log

    # Where the sweep was started in the background, a shell has Ctrl-C ignored, for us as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a task that prints does not print into the answers
    start_log(verbose=False)
    try:
        work(sys.stdin, answers)
    except KeyboardInterrupt:
        os._exit(130)  # the run has left its files; nothing else is to be waited for


if __name__ == "__main__":
    main()
