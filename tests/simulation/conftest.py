"""What the tests of simulations share: runs that draw no plot."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as where matplotlib is not installed: a plot takes longer than most of these runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
