"""What all tests share: how hypothesis draws, Ctrl-C, and what a quick test may cost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

MAX_CPU_SECONDS = 2.0

# One thread for each of the processes that share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` draws the same examples each time; `make test-slow` draws fresh ones, and prints how
# to draw a failing one again.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile(
    "fresh",
    deadline=None,
    max_examples=200,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")

# A shell starts what it runs in the background with Ctrl-C ignored, and so would do every command
# that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes long and is not marked as slow.

    Its processor time counts, with that of the processes that it waited for: it hardly depends on
    what else the machine does.
    """
    before = sum(os.times()[:4])
    yield
    seconds = sum(os.times()[:4]) - before
    is_fresh = settings.default is not None and not settings.default.derandomize
    may_be_slow = is_fresh or any(item.iter_markers("slow")) or any(item.iter_markers("engine"))
    if seconds > MAX_CPU_SECONDS and not may_be_slow:
        pytest.fail(
            f"took {seconds:.1f} s of processor time: mark it with pytest.mark.slow", pytrace=False
        )
