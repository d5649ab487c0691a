"""A call of the Python API leaves the caller's process alone, also from another thread."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headwater
from headwater.common.system.caller_state import caller_state
from headwater.common.system.console import console, silent
from tests.python_tasks import Signs


def test_a_call_in_another_thread_does_not_undo_the_main_thread_s_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ending = threading.Event(), threading.Event()

    def call() -> None:
        with caller_state(is_silent=True):
            begun.set()
            ending.wait()

    thread, handler, root = (
        threading.Thread(target=call),
        logging.NullHandler(),
        logging.getLogger(),
    )
    thread.start()
    begun.wait()
    monkeypatch.chdir(tmp_path)
    root.addHandler(handler)
    try:
        ending.set()
        thread.join()
        assert Path.cwd() == tmp_path
        assert handler in root.handlers
    finally:
        root.removeHandler(handler)


def test_a_call_in_the_main_thread_restores_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, handlers = Path.cwd(), logging.getLogger().handlers[:]
    num_threads = torch.get_num_threads()
    with caller_state(is_silent=True):
        monkeypatch.chdir(tmp_path)
        logging.getLogger().addHandler(logging.NullHandler())
        torch.set_num_threads(num_threads + 1)
    assert Path.cwd() == folder
    assert logging.getLogger().handlers == handlers
    assert torch.get_num_threads() == num_threads


MODES = [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_inside_of_a_caller_s_mode_is_the_run_outside(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    given: dict[str, Any] = {"clients": 3, "rounds": 2, "accumulation_steps": 2}
    run = headwater.simulate(Signs, **given, progress=False)
    with mode():
        before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        inside = headwater.simulate(Signs, **given, progress=False)
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == before
    for one, other in zip(run.model.parameters(), inside.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert not other.is_inference()
    assert run.history[-1].loss == inside.history[-1].loss


def test_silences_that_overlap_end_with_the_last_one() -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(silent(True))
    second.enter_context(silent(True))
    first.close()
    assert console.quiet
    second.close()
    assert not console.quiet


class NamesItself:
    """Raises Ctrl-C where Python turns each error of a name into one of its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_a_library_has_turned_into_its_own_error_is_one() -> None:
    with pytest.raises(KeyboardInterrupt), caller_state(is_silent=True):
        type("Imported", (), {"name": NamesItself()})
