"""Leaves a caller's process as it was: the frame of the functions of the Python API.

A command has its process to itself. A function that is called from a notebook or a script must not
change what the caller's next line sees: torch's threads, random numbers, signal handlers, the log,
the working folder. Allocation hints to the C library stay: they change no result.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from headwater.common.errors import HeadwaterError, remedy_in_traceback
from headwater.common.system.atomic_file import keep_private
from headwater.common.system.console import QUIET_DEPENDENCIES, silent
from headwater.common.system.heap import unfreeze_loaded_objects
from headwater.common.system.lasting_output import lasting_output
from headwater.common.system.stop_signals import (
    StopRequests,
    at_stop_signals,
    interrupt,
    interrupt_at_once,
    raise_if_interrupted,
)

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.2


@contextmanager
def caller_state(*, is_silent: bool) -> Iterator[None]:
    """Restore the process's state afterwards, also after an error; ``is_silent`` prints nothing.

    In the main thread SIGTERM raises KeyboardInterrupt, as Ctrl-C does. An error gets its remedy as
    a note, which a traceback shows. What the whole process shares (random states, torch's threads,
    the log, the working folder, the umask, the garbage collector) is restored in the main thread
    only: another thread would undo what the main thread changed meanwhile.
    """
    is_main = threading.current_thread() is threading.main_thread()
    variables = {name: os.environ.get(name) for name in QUIET_DEPENDENCIES}
    try:
        os.environ.update(
            {name: QUIET_DEPENDENCIES[name] for name, it in variables.items() if not it}
        )
        with remedy_in_traceback(), ExitStack() as stack:
            stack.enter_context(lasting_output())
            stack.enter_context(silent(is_silent))
            stack.enter_context(at_stop_signals(StopRequests(interrupt, interrupt_at_once)))
            for mode in _own_modes():
                stack.enter_context(mode)
            if is_main:
                stack.enter_context(_own_process_state())
                stack.enter_context(_own_random_numbers())
            try:
                yield
            except Exception as error:
                if not isinstance(error, HeadwaterError):
                    raise_if_interrupted()  # a library may have turned the interrupt into its own
                raise
    finally:
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)


def _own_modes() -> Iterator[AbstractContextManager[Any]]:
    """Yield what undoes modes of torch that the caller's lines are in; they are of its thread.

    The settings say what a run computes in, wherever it is called from.
    """
    yield torch.inference_mode(False)
    yield torch.enable_grad()
    yield torch.autocast("cpu", enabled=False)


@contextmanager
def _own_process_state() -> Iterator[None]:
    num_threads, folder = torch.get_num_threads(), os.getcwd()
    root = logging.getLogger()
    level, log_handlers = root.level, root.handlers[:]
    umask = keep_private()
    try:
        yield
    finally:
        os.umask(umask)
        torch.set_num_threads(num_threads)
        root.setLevel(level)
        root.handlers[:] = log_handlers
        if os.getcwd() != folder:
            os.chdir(folder)
        unfreeze_loaded_objects()


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    numbers = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(numbers[0])
        np.random.set_state(numbers[1])
        random.setstate(numbers[2])


_ONE_RUN = threading.RLock()


@contextmanager
def one_run_at_a_time() -> Iterator[None]:
    """Let another thread's run in this process end first, and say that it is waited for.

    Torch's random numbers are the process's: two runs at once would draw from one another's, so
    that a seed gave another model each time.
    """
    if not _ONE_RUN.acquire(blocking=False):
        log.warning(
            "another run of this process is going on: this one begins when it ends, as torch's "
            "random numbers are the whole process's (runs in processes of their own go on together)"
        )
        while not _ONE_RUN.acquire(timeout=WAIT_SECONDS):
            pass  # Ctrl-C comes between two waits
    try:
        yield
    finally:
        _ONE_RUN.release()
