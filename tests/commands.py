"""Commands that a test runs to their end, and what they print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def python(*words: object, status: int = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python in the checkout; it must end with ``status``. ``how`` is of subprocess.run.

    Raises:
        AssertionError: it ended with another one; the message is what it printed.
    """
    given: dict[str, Any] = {"cwd": ROOT, "timeout": 560} | how
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    assert done.returncode == status, done.stdout + done.stderr
    return done
