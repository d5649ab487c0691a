"""Workers of a task's data are not copies of a process with threads."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from headwater.client.device.worker_processes import FORK, workers_of_a_fork_server

pytestmark = pytest.mark.skipif(
    FORK not in multiprocessing.get_all_start_methods(), reason="this system forks no process"
)


def test_a_device_s_workers_come_from_a_fork_server_and_the_caller_s_as_before() -> None:
    before = multiprocessing.get_start_method()
    with workers_of_a_fork_server(), workers_of_a_fork_server():
        assert multiprocessing.get_start_method() == "forkserver"
    assert multiprocessing.get_start_method() == before


def test_a_start_method_that_the_task_has_chosen_stays() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with workers_of_a_fork_server():
            assert multiprocessing.get_start_method() == "spawn"
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.slow
def test_a_worker_is_no_child_of_this_process() -> None:
    with workers_of_a_fork_server(), multiprocessing.Pool(1) as pool:
        assert pool.apply(os.getppid) != os.getpid()
