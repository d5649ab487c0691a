"""Servers and devices of two versions together: which ways of training work, and which say why not.

Builds the wheel of a git revision (``--with REV``) and that of this tree, each in an environment of
its own, and runs a server and three devices of the bundled digits over loopback, in both mixtures.
``resumed`` stops a server of the older version after two rounds and continues with the newer one.
A cell is ``N rounds`` or the last line that the side without success has printed::

    python -m benchmarks.mixed_versions --with v0.1.0
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from benchmarks.measure import ROOT, Figures, argument_parser, report
from tests.venvs import install, make_venv, pip

TASK = f"{ROOT}/examples/digits.py:Digits"  # one file: masked members have the same code
DEVICES, ROUNDS, SECONDS = 3, 3, 120
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((), ()),
    "masked": (("--secure-aggregation", "semi-honest"), ("--secure-aggregation", "semi-honest")),
    "int8 up": (("--compress", "int8"), ()),
    "int4 both ways": (("--compress", "int4", "--compress-down", "int4"), ()),
    "local steps": (("--local-steps", "3"), ()),
    "evaluated on devices": (("--evaluate-on-devices",), ()),
    "asynchronous": (("--asynchronous",), ()),
}
"""Flags of the server, and those of its devices."""


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--with", dest="revision", default="HEAD", help="the other version")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        new = environment(Path(folder) / "new", None)
        old = environment(Path(folder) / "old", chosen.revision)
        ways = ["plain", "masked"] if chosen.quick else [*WAYS]
        figures: Figures = {
            way: {
                "old devices": mixed(Path(folder), way, server=new, device=old),
                "old server": mixed(Path(folder), way, server=old, device=new),
            }
            for way in ways
        }
        figures["resumed"] = {
            way: mixed(Path(folder), way, server=old, device=old, then=new) for way in ways[:2]
        }
    report(figures, as_json=chosen.json, doc=__doc__)


def environment(folder: Path, revision: str | None) -> Path:
    """Return the ``bin`` folder of an environment with the wheel of a revision; None: this tree."""
    source = folder / "source"
    source.mkdir(parents=True)
    if revision is None:
        revision = _git("stash", "create").decode().strip() or "HEAD"
    with tarfile.open(fileobj=BytesIO(_git("archive", revision))) as archive:
        archive.extractall(source, filter="fully_trusted")  # our own; it has symbolic links
    pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)),
        str(source),
    )
    found = make_venv(folder / "venv")
    install(next(folder.glob("headwater-*.whl")), found)
    return found


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def mixed(folder: Path, way: str, *, server: Path, device: Path, then: Path | None = None) -> str:
    """Return how a run ended; ``then`` is the server that continues it after two rounds."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        out, state = Path(inside) / "out", Path(inside) / "state"
        of_server, of_devices = WAYS[way]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        first = 2 if then is not None else ROUNDS
        run: tuple[str, ...] = (
            *("--task", TASK, "--listen", f"127.0.0.1:{port}", "--min-clients", str(DEVICES)),
        )
        run = (*run, "--out", str(out), "--threads", "1", *of_server)
        with contextlib.ExitStack() as started:
            at = started.enter_context(process(server, "server", *run, "--rounds", str(first)))

            def device_of(part: int) -> subprocess.Popen[bytes]:
                return started.enter_context(
                    process(
                        *(device, "client", "--task", TASK, "--server", f"127.0.0.1:{port}"),
                        *("--name", f"d{part}", "--part", str(part), "--num-parts", str(DEVICES)),
                        *("--state", str(state), "--threads", "1", *of_devices),
                    )
                )

            devices = [device_of(part) for part in range(DEVICES)]
            _wait(at, *devices)
            if then is not None:
                devices = [
                    device_of(part) if _has_ended(one) else one for part, one in enumerate(devices)
                ]
                at = started.enter_context(
                    process(then, "server", *run, "--rounds", str(ROUNDS), "--resume")
                )
                _wait(at, *devices)
            rows = out / "rounds.jsonl"
            number = len(rows.read_text().splitlines()) if rows.exists() else 0
            if number == ROUNDS:
                return f"{number} rounds"
            said = [one for one in (*devices, at) if one.poll() not in (None, 0)] or [at]
            return f"{number} rounds; {last_words(said[0])}"


@contextlib.contextmanager
def process(folder: Path, command: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; its output is in the file ``log`` of the process."""
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(
            [folder / f"headwater-{command}", *arguments],
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
        LOGS[started.pid] = log.fileno()
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()


LOGS: dict[int, int] = {}


def last_words(process: subprocess.Popen[bytes]) -> str:
    """Return the last line that names an error, or the last one."""
    handle = LOGS[process.pid]
    lines = os.pread(handle, 1 << 20, 0).decode(errors="replace").split("\n")
    named = [line for line in lines if re.search(r"\b[A-Z][a-z]+[A-Z]\w+: ", line)]
    return (named or [line for line in lines if line.strip()] or ["no word"])[-1].strip()[:300]


def _has_ended(device: subprocess.Popen[bytes]) -> bool:
    """Return whether a device ends with its run, as those of early versions do."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        device.wait(5)
    return device.poll() is not None


def _wait(server: subprocess.Popen[bytes], *devices: subprocess.Popen[bytes]) -> None:
    """Wait for the server's end, that of all devices, or the limit."""
    end = time.monotonic() + SECONDS
    while server.poll() is None and time.monotonic() < end:
        if all(device.poll() is not None for device in devices):
            break
        time.sleep(0.1)


if __name__ == "__main__":
    main()
