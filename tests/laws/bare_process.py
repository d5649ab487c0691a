"""Runs copies of the project in processes that have torch loaded already, and nothing of ours.

To import torch takes longer than what such a run does. This module is a program too: it imports
torch once, and each run is a fork of it. It imports nothing of the project. Python's own fork
server does not serve here: a process has one of them, and another test may have loaded ours in it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

LOADED = (
    *("torch", "torch.utils.data", "numpy", "flwr.app", "flwr.clientapp", "pydantic", "typer"),
    *("sklearn.datasets", "matplotlib.backends.backend_agg", "matplotlib.figure"),
    *("tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2"),
)


class BareProcess:
    """The program below, as a context: it ends with its input."""

    def __enter__(self) -> BareProcess:
        # -I: a folder of the project is not on its path, whatever the environment says.
        self._program = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate(timeout=60)

    def simulate(self, folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run ``headwater-simulate`` of the project that lies in ``folder``, in that folder."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps([str(folder), *arguments]) + "\n")
        self._program.stdin.flush()
        code = int(self._program.stdout.readline())
        said = (folder / "said").read_text()
        return subprocess.CompletedProcess([*arguments], code, said, said)


def _serve() -> None:
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, *arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            _simulate(Path(folder), arguments)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _simulate(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    with Path("said").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(folder))
    sys.argv = ["headwater-simulate", *arguments]
    code = 1
    try:
        from headwater.server.operations import round_log
        from headwater.simulation.cli import main

        round_log._draw = lambda *_: None  # half of the time of a run
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
