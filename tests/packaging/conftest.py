"""What the tests of the wheel share: an environment that has it, made once for all of them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.venvs import build_wheel, install, make_venv


@pytest.fixture(scope="session")
def wheel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel, and with the environment ``venv`` that it is installed in.

    The first of pytest's workers that needs it makes it, and the other worker waits.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "wheel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "is_made").exists():
            install(build_wheel(folder), make_venv(folder / "venv"))
            (folder / "is_made").touch()
    return folder
