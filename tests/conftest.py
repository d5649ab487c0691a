"""What all tests share: hypothesis, Ctrl-C, the heap, event loops, a process without updates."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# One thread for each of the processes that share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` draws the same examples each time; `make test-slow` draws fresh ones, and prints how
# to draw a failing one again.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile(
    "fresh",
    deadline=None,
    derandomize=False,  # or else hypothesis draws the same wherever the variable CI is set
    max_examples=200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would do every command
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And nohup what it starts with a closed terminal ignored.
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Exclude what the test modules imported from Python's garbage collection.

    A simulation ends with a full collection, which scanned torch, flwr and all tests: that took
    almost half of the time of the tests that simulate.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude what a file of tests left behind, too: it grows to a second for each collection."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def short_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time a device's micro-batches twice, and not up to 15 times, where no test is about that."""
    if "trainer" not in request.path.parts:
        monkeypatch.setattr("headwater.client.trainer.probe.MAX_TURNS", 1)
        monkeypatch.setattr("headwater.client.trainer.probe.FINAL_TURNS", 2)


@pytest.fixture
def draws_curves() -> None:
    """Let a test's runs draw curves.png, which takes three quarters of a small run's time."""


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no curves.png where no test is about it."""
    if "draws_curves" not in request.fixturenames:
        monkeypatch.setattr("headwater.server.operations.round_log._draw", lambda *_: None)


@pytest.fixture(autouse=True)
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of simulations, which else import torch, where no test is about them."""
    if {"compute", "engines"}.isdisjoint(request.path.parts):
        from tests.forked_workers import fork_workers

        fork_workers(monkeypatch)


@pytest.fixture
def a_process_of_its_own() -> Iterator[None]:
    """Begin without updates, and without what another test learned of the task."""
    from headwater.client.trainer.run_trainer import trainer_of

    trainer_of.cache_clear()
    yield
    trainer_of.cache_clear()
