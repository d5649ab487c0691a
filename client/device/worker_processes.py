"""Starts the worker processes of a task's data so that they do not copy a process with threads.

On Linux Python forks a worker by default (``DataLoader(num_workers=4)``, a ``Pool``). A copy has
one thread and the locks of all: beside the threads of gRPC most workers hung or died. From a *fork
server*, a process of its own that has no other thread, they start as well, and each imports the
task's module.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

FORK, FORK_SERVER = "fork", "forkserver"


@contextmanager
def workers_of_a_fork_server() -> Iterator[None]:
    """Start workers from a fork server, where they would be forked from this process.

    What a worker gets must be picklable then: no lambda, no class within a function. A context that
    a task names itself (``multiprocessing_context="fork"``) stays as it is.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    is_forking = multiprocessing.get_context().get_start_method() == FORK
    if not is_forking or FORK_SERVER not in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method(FORK_SERVER, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
