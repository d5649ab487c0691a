"""Sixty days of a run in some minutes: what months are made of, and nothing may grow.

A server and 20 devices (three real ones, 17 light fakes) train under TLS by a wall clock that runs
thousands of times as fast (``benchmarks/fast_clock.py``). Certificates last two weeks, logs are
rotated at a quarter of a megabyte. On days that are written down below, server and devices are
upgraded from an earlier release, killed, lost and installed anew, the clock jumps, and the server's
disk is full (with root rights).

A line a week: rounds, updates, refusals by name, renewed certificates, and what server, devices and
their folders hold. It fails where something is more in the last week than the first whole week with
the present release allows. Monotonic waits do not run faster: a round takes as long as ever.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.fast_clock import FastClock
from benchmarks.measure import ROOT, Figures, arguments, memory_of, num_descriptors, num_threads
from benchmarks.measure import report as print_report
from benchmarks.soak_weeks import LOG_BYTES, REAL, grown, table
from headwater.server.enrolment.token_registry import Registry
from tests.certificates import enrol, files, make_folder, revoke
from tests.chaos import machines
from tests.processes import free_port, rows

DAYS, SECONDS_A_DAY = 60, 8.0
QUICK_DAYS = 15
NUM_FAKES = 17
CERTIFICATE_DAYS = 14
DISK_BYTES = 24 << 20
TASK = f"{ROOT}/benchmarks/tasks.py:Perceptron"
WEEK = 7
LAUNCH = f"""
import contextlib
from headwater.server.operations import log_limits
log_limits.RowsFile.__init__.__kwdefaults__["max_bytes"] = {LOG_BYTES}
with contextlib.suppress(ImportError):  # the earlier release has it elsewhere
    from headwater.server.tracking import tensorboard_tracker as tracker
    tracker.MAX_EVENT_BYTES = {LOG_BYTES}
    tracker.delete_oldest.__kwdefaults__["max_bytes"] = {4 * LOG_BYTES}
from headwater.server.cli import main
main()
"""
# A device looks once an hour whether its certificate is due, which is a monotonic one.
LAUNCH_DEVICE = """
from headwater.client.transport import certificate
certificate.RENEWAL_POLL_SECONDS = certificate.RENEWAL_RETRY_SECONDS = 1.0
from headwater.client.cli import main
main()
"""
SETTINGS = "[cohort]\ndeadline_seconds = 5.0\nreconnect_seconds = 2.0\n"


class Months:
    """The processes and folders of the run."""

    def __init__(self, folder: Path, stack: ExitStack, *, days: int) -> None:
        self.folder, self.days, self._stack = folder, days, stack
        self.clock = FastClock(folder, speed=86_400 / SECONDS_A_DAY)
        self.port, self.out = free_port(), folder / "out"
        self._trees = {
            "earlier": machines.tree_of("earlier", folder),
            "present": ROOT,
            "next": machines.copy_version(folder / "next", "9.9.9", has_server=True),
        }
        self._certificates = make_folder(folder / "certificates")
        registry = Registry(self._certificates)
        registry.set_fact("certificate_seconds", repr(CERTIFICATE_DAYS * 86_400.0))
        registry.close()
        for name in (*REAL, *(f"fake-{number}" for number in range(NUM_FAKES))):
            lasts = CERTIFICATE_DAYS if name in REAL else 400
            enrol(self._certificates, name, days=(-1, lasts))
        (folder / "settings.toml").write_text(SETTINGS)
        self.has_disk = machines.can("mount")
        if self.has_disk:
            stack.enter_context(machines.small_disk(self.out, DISK_BYTES))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: Counter[str] = Counter()
        self.num_renewed = 0
        stack.callback(self._kill_all)

    def start_server(self, release: str = "present") -> None:
        flags: list[object] = ["--task", TASK, "--rounds", "forever", "--out", self.out]
        flags += ["--listen", f"127.0.0.1:{self.port}", "--min-clients", 3, "--threads", 1]
        flags += ["--accumulation-steps", 2, "--micro-batch-size", 8]
        flags += ["--config", self.folder / "settings.toml", *files(self._certificates, "server")]
        flags += ["--resume"] if (self.out / "checkpoint.safetensors").exists() else []
        self._start("server", ["-c", LAUNCH], flags, release)

    def start_device(self, name: str, release: str = "present") -> None:
        flags: list[object] = ["--task", TASK, "--server", f"127.0.0.1:{self.port}", "--stay"]
        flags += ["--name", name, "--part", REAL.index(name), "--num-parts", len(REAL)]
        flags += ["--state", self.state_of(name), "--threads", 1]
        flags += files(self._certificates, name)
        self._start(name, ["-c", LAUNCH_DEVICE], flags, release)

    def start_fakes(self) -> None:
        seconds = self.days * SECONDS_A_DAY
        part = f"{self.port}/{NUM_FAKES}/{seconds}/{self._certificates}"
        command = [sys.executable, "-m", "benchmarks.soak", "--part", part]
        self._run("fakes", command, ROOT, {})

    def _start(self, name: str, how: list[str], flags: list[object], release: str) -> None:
        command = [sys.executable, *how, *map(str, flags)]
        self._run(name, command, self._trees[release], self.clock.variables)

    def _run(self, name: str, command: list[str], at: Path, variables: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            own = {**os.environ, "PYTHONPATH": str(at), "OMP_NUM_THREADS": "1", **variables}
            self.processes[name] = subprocess.Popen(
                command, cwd=at, env=own, stdout=log, stderr=log, start_new_session=True
            )

    def end(self, name: str, by: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(by)
        process.wait(60)

    def restart(self, name: str, release: str, by: signal.Signals = signal.SIGTERM) -> None:
        self.end(name, by)
        self.start_server(release) if name == "server" else self.start_device(name, release)

    def reinstall(self, name: str) -> None:
        """Lose a device with all that it had, and enrol it again."""
        self.end(name, signal.SIGKILL)
        shutil.rmtree(self.state_of(name), ignore_errors=True)
        revoke(self._certificates, name)
        today = self.clock.days  # for this process has the machine's own clock
        enrol(self._certificates, name, days=(today - 1, today + CERTIFICATE_DAYS))
        self.start_device(name)

    def fill_disk(self) -> None:
        """Fill the server's disk until the server ends, and go on once there is space."""
        if not self.has_disk:
            return
        filler = machines.fill(self.out)
        status = self.processes.pop("server").wait(60)
        self.ended[f"server, disk full: status {status}"] += 1
        filler.unlink()
        self.start_server()

    def state_of(self, name: str) -> Path:
        return self.folder / "states" / name

    def last_words(self, name: str) -> str:
        """Return the last line of a process's log that names an error."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if re.match(r"[A-Z]\w+: ", line)), "no error")

    def num_renewals(self) -> int:
        """Count the renewals that devices have logged."""
        logs = [(self.folder / f"{name}.log").read_text(errors="replace") for name in REAL]
        return sum(text.count("certificate was renewed") for text in logs)

    def held(self) -> Figures:
        """Return what server and real devices hold, and their folders."""
        found: Figures = {}
        for name in ("server", *REAL):
            process = self.processes.get(name)
            if process is None or "VmRSS" not in memory_of(process.pid):
                continue  # it has ended, or is about to
            folder = self.out if name == "server" else self.state_of(name)
            found[name] = {
                "rss_mb": round(memory_of(process.pid)["VmRSS"] / 1e6, 1),
                "descriptors": num_descriptors(process.pid),
                "threads": num_threads(process.pid),
                "disk_kb": round(size_of(folder) / 1e3),
            }
        return found

    def _kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def calendar(months: Months) -> dict[int, Callable[[], object]]:
    """Return what happens on which day."""
    kill = signal.SIGKILL
    return {
        2: lambda: months.reinstall("r0"),
        4: lambda: months.restart("server", "present"),
        6: lambda: months.restart("r1", "present"),
        8: lambda: months.restart("r2", "present"),
        9: months.fill_disk,
        10: lambda: months.clock.jump(2.0),
        12: lambda: months.restart("server", "present", kill),
        17: lambda: months.clock.jump(-2.5),
        21: lambda: months.clock.jump(3600.0),
        24: lambda: months.end("r1", kill),
        29: lambda: months.start_device("r1"),
        32: lambda: months.reinstall("r2"),
        36: months.fill_disk,
        38: lambda: months.restart("r0", "next"),
        40: lambda: months.restart("server", "next"),
        45: lambda: months.clock.jump(-3600.0),
        47: lambda: months.restart("server", "present", kill),
        50: lambda: months.restart("r0", "present"),
        54: lambda: months.reinstall("r1"),
    }


def live(months: Months) -> list[Figures]:
    """Run the calendar, and return a line for each week."""
    months.start_server("earlier")
    for name in REAL:
        months.start_device(name, "earlier")
    months.start_fakes()
    due, last = calendar(months), 0
    weeks: list[Figures] = []
    counted, refused = Counter[str](), Counter[str]()
    while months.clock.days < months.days:
        day = int(months.clock.days)
        for planned in [planned for planned in due if planned <= day]:
            due.pop(planned)()
        if months.out.exists():
            for row in rows(months.out):
                if row["round"] > last:
                    last = row["round"]
                    counted.update(rounds=1, updates=row["num_clients"])
                    refused.update(why.partition(":")[0] for why in row["refused"].values())
        for name in ("server", *REAL):
            process = months.processes.get(name)
            if process is not None and process.poll() is not None:
                months.ended[f"{name}, not planned: {months.last_words(name)}"] += 1
                months.start_server() if name == "server" else months.start_device(name)
        if day // WEEK > len(weeks):
            weeks.append(week_of(months, len(weeks) + 1, counted, refused))
        time.sleep(0.5)
    weeks.append(week_of(months, len(weeks) + 1, counted, refused))
    return weeks


def week_of(months: Months, number: int, counted: Counter[str], refused: Counter[str]) -> Figures:
    """Return a line, and begin to count anew."""
    line: Figures = {"week": number, **counted, "refused": dict(refused)}
    renewed = months.num_renewals()
    line |= {"renewals": renewed - months.num_renewed, "held": months.held()}
    months.num_renewed = renewed
    counted.clear()
    refused.clear()
    print(line, file=sys.stderr, flush=True)
    return line


def main() -> None:
    flags = arguments(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was mounted is removed
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="headwater-months-")))
        months = Months(folder, stack, days=QUICK_DAYS if flags.quick else DAYS)
        weeks = live(months)
        problems = grown(weeks)
        problems += [f"week {week['week']}: no round" for week in weeks if not week.get("rounds")]
        ended = dict(months.ended)
    if not flags.json:
        print(table(weeks))
    figures: Figures = {"ended": ended, "problems": problems, "load": os.getloadavg()[0]}
    figures |= {"weeks": weeks} if flags.json else {}
    print_report(figures, as_json=flags.json, doc=__doc__)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
