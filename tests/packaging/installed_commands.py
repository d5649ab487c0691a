"""Commands of an installed wheel, each in a process of its own that has torch already.

A process of the environment imports what the commands need and forks itself for each of them: what
a command does, and in which folder, is as in a shell, and torch is read from disk once for all.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

# Like the scripts that pip writes it lies in the environment's ``bin``, which Python looks through
# in place of the working folder. A sweep's workers import it again, under another name.
PROGRAM = """
import gc, json, os, runpy, sys
from importlib.metadata import entry_points
from types import ModuleType


def become(scripts, words):
    if words[0] != "python":
        sys.argv = words
        sys.exit(scripts[words[0]].load()())
    _, flag, program, *sys.argv[1:] = words
    sys.path[0] = os.getcwd()
    if flag == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0], sys.modules["__main__"] = flag, ModuleType("__main__")
        exec(program, vars(sys.modules["__main__"]))
    sys.exit()


def main():
    os.environ["GRPC_VERBOSITY"] = "NONE"  # as the commands set it before they import grpc
    os.environ["HF_HUB_OFFLINE"] = "1"  # as the examples set it before they import transformers
    import headwater.simulation.run, matplotlib.backends.backend_agg, matplotlib.figure, peft
    import sklearn.datasets, tensorboard.summary.writer.record_writer
    import torch.fx.experimental.symbolic_shapes

    del os.environ["HF_HUB_OFFLINE"]
    gc.freeze()
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    for line in sys.stdin:
        words, folder, log = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            nothing, printed = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY)
            for number, descriptor in enumerate((nothing, printed, printed)):
                os.dup2(descriptor, number)
            become(scripts, words)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command's exit status, and what it printed on both streams."""

    status: int
    text: str


class InstalledCommands:
    """Runs the commands of one environment, until it is left."""

    def __init__(self, bin_folder: Path, log: Path) -> None:
        program = bin_folder / f"fork_commands_{os.getpid()}.py"
        program.write_text(PROGRAM)
        environment = {key: it for key, it in os.environ.items() if key != "PYTHONPATH"}
        self._log = log
        self._environment = {
            **environment,
            "PATH": f"{bin_folder}{os.pathsep}{environment['PATH']}",
        }
        self._process = subprocess.Popen(
            [bin_folder / "python", program],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()

    def run(self, command: str, folder: Path) -> Ended:
        """Run a line of a shell in a folder, to its end."""
        self._log.write_text("")
        request = json.dumps([self._words(command, folder), str(folder), str(self._log)])
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        status = self._process.stdout.readline()
        assert status, f"the process that forks ended at {command}"
        return Ended(status=int(status), text=self._log.read_text())

    def _words(self, command: str, folder: Path) -> list[str]:
        """Return a command's words as the shell divides them."""
        divided = subprocess.run(
            f"printf '%s\\0' {command}",
            shell=True,
            cwd=folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return divided.stdout.split("\0")[:-1]
