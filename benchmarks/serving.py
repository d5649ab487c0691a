"""The real server and real devices as child processes, for the benchmarks that need sockets.

``python -m benchmarks.serving`` runs ``server.serve.serve_run``, the whole of ``headwater-server``
without its command line, and writes one line of JSON for each committed round. With ``pause`` it
holds the run after a round, with ``pace_seconds`` for so long after each: the devices stay
connected and idle. ``planned_at`` in a line is when the round's plans were ready, by
``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.confine import Cage
from benchmarks.measure import ROOT, Figures, memory_of, num_descriptors, num_threads

POLL_SECONDS = 0.005
LIMIT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server that runs, and where."""

    process: subprocess.Popen[str]
    port: int

    def rows(self) -> Iterator[Figures]:
        """Yield what the server says of each round, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                yield json.loads(line)


def environment(num_parameters: int | None = None) -> dict[str, str]:
    """Return the environment of the child processes."""
    chosen = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    if num_parameters is not None:
        chosen["HEADWATER_BENCHMARK_P"] = str(num_parameters)
    return chosen


@contextmanager
def server(
    settings: Mapping[str, Any],
    *,
    num_parameters: int | None = None,
    pause: tuple[int, float] | None = None,
    pace_seconds: float = 0.0,
    limit_seconds: float = LIMIT_SECONDS,
    cage: Cage | None = None,
) -> Iterator[Serving]:
    """Start a server on a free port of loopback; it is ended at the end, or after the limit.

    It is confined to ``cage``, if that is given.

    Raises:
        RuntimeError: it did not come up.

    """
    told = {
        "settings": {"server.listen": "127.0.0.1:0", **settings},
        "pause": pause,
        "pace_seconds": pace_seconds,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving", json.dumps(told)],
        cwd=ROOT,
        env=environment(num_parameters),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=None if cage is None else cage.enter,
    )
    guard = threading.Timer(limit_seconds, process.terminate)
    guard.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening on"):
                yield Serving(process=process, port=int(line.split()[2].rpartition(":")[2]))
                break
        else:
            raise RuntimeError(f"the server ended with status {process.wait()}")
    finally:
        guard.cancel()
        end(process)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def clients(
    port: int,
    task: str,
    *,
    number: int,
    num_parameters: int | None = None,
    flags: Sequence[str] = (),
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start real devices, one process each; they are ended at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headwater-benchmark-")))
        started = []
        for part in range(number):
            command = [
                sys.executable,
                "-m",
                "headwater.client",
                *client_flags(port, task, part, folder),
            ]
            command += ["--num-parts", str(number), *flags]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(num_parameters), stdout=subprocess.DEVNULL
            )
            stack.callback(end, process)
            started.append(process)
        yield started


def client_flags(port: int, task: str, part: int, state: Path) -> list[str]:
    """Return the flags of ``headwater-client`` for a device of a benchmark."""
    flags = ["--server", f"127.0.0.1:{port}", "--task", task, "--name", f"device-{part}"]
    return [
        *flags,
        "--part",
        str(part),
        "--state",
        str(state),
        "--threads",
        "1",
        "--no-check",
        "--once",
    ]


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that was started here, if it has not ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Watch:
    """Samples this process's memory in a thread: the peak of each kind since ``restart``."""

    def __init__(self) -> None:
        self.peaks = memory_of()
        threading.Thread(target=self._run, daemon=True).start()

    def restart(self) -> None:
        self.peaks = memory_of()

    def _run(self) -> None:
        while True:
            for name, value in memory_of().items():
                self.peaks[name] = max(self.peaks.get(name, 0), value)
            time.sleep(POLL_SECONDS)


def _serve(told: Mapping[str, Any]) -> None:
    from headwater.common.settings.sources import load
    from headwater.server.rounds.round_row import RoundRow
    from headwater.server.serve import serve_run

    watch = _Watch()
    planned_at = _note_plans()
    start = time.perf_counter()
    last = start

    def on_round(row: RoundRow) -> None:
        nonlocal last
        now = time.perf_counter()
        line = {
            "round": row.round,
            "seconds": row.seconds,
            "seconds_split": row.seconds_split,
            "slowest_client_seconds": row.slowest_client_seconds,
            "wall_seconds": now - last,
            "bytes_up": row.bytes_up,
            "bytes_down": row.bytes_down,
            "num_clients": row.num_clients,
            "weight": row.weight,
            "refused": row.refused,
            "planned_at": planned_at[row.round],
            "peaks": watch.peaks,
            "memory": memory_of(),
            "num_threads": num_threads(),
            "num_descriptors": num_descriptors(),
        }
        planned_at.clear()
        print(json.dumps(line), flush=True)
        watch.restart()
        pause = told["pause"]
        if pause is not None and row.round == pause[0]:
            time.sleep(pause[1])
        time.sleep(told["pace_seconds"])
        last = time.perf_counter()

    with contextlib.suppress(KeyboardInterrupt):  # SIGTERM, when the parent has seen enough
        serve_run(load(None, told["settings"]), None, on_round=on_round, resume=False)


def _note_plans() -> dict[int, float]:
    """Note, from now on, when the plans of each round are ready to be sent."""
    from headwater.server.flower.grid_fleet import GridFleet

    noted: dict[int, float] = {}
    train = GridFleet.train

    def noting(self: GridFleet, plans: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
        noted.update(dict.fromkeys((plan.round for plan in plans.values()), time.monotonic()))
        return train(self, plans, *rest, **options)

    GridFleet.train = noting  # type: ignore[method-assign]
    return noted


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
