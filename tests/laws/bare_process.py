"""Runs a copy of the project in a process that has torch loaded already, and nothing of ours.

To import torch takes longer than what such a run does. A process of ``forkserver`` has it, and each
run is a fork of it. This module imports nothing of the project.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

LOADED = ("torch", "torch.utils.data", "numpy", "flwr.app", "flwr.clientapp", "pydantic", "typer")
SECONDS = 120


def run_simulation(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run ``headwater-simulate`` of the project that lies in ``folder``, in that folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*LOADED])
    said = folder / "said"
    child = context.Process(target=_simulate, args=(folder, [*arguments], said))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        child.kill()
        child.join()
    text = said.read_text()
    said.unlink()
    return subprocess.CompletedProcess([*arguments], child.exitcode or 0, text, text)


def _simulate(folder: Path, arguments: list[str], said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.argv = ["headwater-simulate", *arguments]
    try:
        from headwater.simulation.cli import main

        main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise
