"""Half an hour of rounds, in which devices come and go, and nothing may grow.

Two runs go on side by side, each with the real server and a round about each second. ``plain`` has
two real devices, which stay, and 30 light fakes; each fake is there for 5 to 60 seconds, then
leaves with a word or is cut off in the midst of whatever it does, and is back after 1 to 20
seconds. ``masked`` has three real devices under secure aggregation.

Of every process, resident memory, threads and descriptors are sampled each few seconds. Of the last
two thirds of the samples the slope is taken (Theil and Sen, with its interval of 95 %:
``benchmarks/trend.py``), and with it a projection: ``rss_in_24_hours`` over the present, at a pace
of a round a second, which is far above what a fleet does.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import serving
from benchmarks.fake_device import FakeDevice
from benchmarks.measure import (
    ROOT,
    Figures,
    arguments,
    cpu_seconds,
    memory_of,
    num_descriptors,
    num_threads,
    report,
)
from benchmarks.trend import trend
from tests.certificates import credentials_of

TASK = "benchmarks/tasks.py:Perceptron"
MINUTES = 30.0
NUM_FAKES = 30
STAY_SECONDS, AWAY_SECONDS, THINK_SECONDS = (5.0, 60.0), (1.0, 20.0), 0.2
PACE_SECONDS = 0.8
DAY_SECONDS = 24 * 3600
SETTINGS = {
    "task": TASK,
    "rounds": 10**6,
    "threads": 1,
    "plan.accumulation_steps": 2,
    "plan.micro_batch_size": 8,
    "cohort.deadline_seconds": 5.0,
    "cohort.reconnect_seconds": 2.0,
}
MASKED = {"secure.aggregation": "semi-honest", "cohort.min_clients": 3}


@dataclass(kw_only=True)
class Told:
    """What a server said of its rounds."""

    rounds: int = 0
    updates: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def listen(self, running: serving.Serving) -> None:
        for row in running.rows():
            self.rounds += 1
            self.updates += row["num_clients"]
            self.refused.update(why.partition(":")[0] for why in row["refused"].values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a process held at a moment."""

    at: float
    rss_bytes: int
    anonymous_bytes: int
    threads: int
    descriptors: int


def sample(pid: int) -> Sample:
    memory = memory_of(pid)
    return Sample(
        at=time.monotonic(),
        rss_bytes=memory["VmRSS"],
        anonymous_bytes=memory["RssAnon"],
        threads=num_threads(pid),
        descriptors=num_descriptors(pid),
    )


async def come_and_go(
    port: int, number: int, *, seconds: float, certificates: Path | None = None
) -> Figures:
    """Be ``number`` devices that come and go for so long; in TLS with a folder of certificates."""
    from headwater.common.model.parameters import build_model
    from headwater.common.task import load_task

    layout = build_model(load_task(TASK), seed=0).layout
    update, end = bytes(4 * layout.num_parameters), time.monotonic() + seconds
    counted: Counter[str] = Counter()

    async def one(name: str, dice: random.Random) -> None:
        own = None if certificates is None else credentials_of(certificates, name)
        device = FakeDevice(
            name, layout.digest, update, think_seconds=THINK_SECONDS, credentials=own
        )
        while time.monotonic() < end:
            here = asyncio.create_task(device.run(port))
            left = max(end - time.monotonic(), 0.1)
            await asyncio.wait([here], timeout=min(dice.uniform(*STAY_SECONDS), left))
            if here.done():
                here.result()
            if dice.random() < 0.5 and not here.done():
                counted["left"] += 1
                await device.leave()
                await asyncio.wait([here], timeout=5.0)
            else:
                counted["cut_off"] += 1
            here.cancel()
            await asyncio.gather(here, return_exceptions=True)
            left = max(end - time.monotonic(), 0.0)
            await asyncio.sleep(min(dice.uniform(*AWAY_SECONDS), left))
        counted["updates_acknowledged"] += len(device.acknowledged)
        counted["refused"] += device.num_refused

    await asyncio.gather(*(one(f"fake-{i}", random.Random(i)) for i in range(number)))
    return dict(counted)


@contextmanager
def fakes(port: int, number: int, *, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start the fakes in a process of their own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.soak", "--part", f"{port}/{number}/{seconds}"],
        cwd=ROOT,
        env=serving.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        serving.end(process)


def soak(seconds: float) -> Figures:
    """Run both, and return what was found."""
    with ExitStack() as stack:
        watched: dict[str, int] = {}
        told: dict[str, Told] = {}
        port = _begin(stack, "plain", {}, 2, watched, told, seconds)
        _begin(stack, "masked", MASKED, 3, watched, told, seconds)
        away = stack.enter_context(fakes(port, NUM_FAKES, seconds=seconds))
        samples, cpu = _watch(watched, told, seconds)
        lines = away.communicate(timeout=120)[0].splitlines()
        counted = json.loads(lines[-1]) if lines else {"failed": away.returncode}
    return {
        "minutes": seconds / 60,
        "fakes": counted,
        "rounds": {
            name: {
                "rounds": one.rounds,
                "updates": one.updates,
                "refused": dict(one.refused),
            }
            for name, one in told.items()
        },
        **{name: {**described(found), **cpu[name]} for name, found in samples.items()},
    }


def _begin(
    stack: ExitStack,
    name: str,
    changes: Figures,
    num_clients: int,
    watched: dict[str, int],
    told: dict[str, Told],
    seconds: float,
) -> int:
    """Start a server with its real devices."""
    folder = stack.enter_context(TemporaryDirectory(prefix="headwater-benchmark-"))
    settings = {**SETTINGS, "cohort.min_clients": num_clients, **changes, "out": folder}
    running = stack.enter_context(
        serving.server(settings, pace_seconds=PACE_SECONDS, limit_seconds=seconds + 600)
    )
    told[name] = Told()
    threading.Thread(target=told[name].listen, args=(running,), daemon=True).start()
    devices = stack.enter_context(serving.clients(running.port, TASK, number=num_clients))
    watched[f"{name}_server"] = running.process.pid
    watched.update({f"{name}_client_{i}": device.pid for i, device in enumerate(devices)})
    return running.port


def _watch(
    watched: dict[str, int], told: dict[str, Told], seconds: float
) -> tuple[dict[str, list[Sample]], dict[str, Figures]]:
    """Sample all processes until the time is over."""
    while not all(one.rounds for one in told.values()):
        time.sleep(0.5)  # guarded by the servers' own limit: their rows end with them
    samples: dict[str, list[Sample]] = {name: [] for name in watched}
    begun, before = time.monotonic(), {name: cpu_seconds(pid) for name, pid in watched.items()}
    every = min(10.0, seconds / 20)
    while (now := time.monotonic()) < begun + seconds:
        for name, pid in watched.items():
            samples[name].append(sample(pid))
        time.sleep(max(every - (time.monotonic() - now), 0.0))
    lasted = time.monotonic() - begun
    cpu = {
        name: {"cpu_share": (cpu_seconds(pid) - before[name]) / lasted}
        for name, pid in watched.items()
    }
    return samples, cpu


def described(samples: Sequence[Sample]) -> Figures:
    """Return what a process held at first and at last, and the trend behind the first third."""
    later = samples[len(samples) // 3 :]
    times = [one.at for one in later]
    rss = trend(times, [one.rss_bytes for one in later])
    anonymous = trend(times, [one.anonymous_bytes for one in later])
    threads = trend(times, [one.threads for one in later])
    descriptors = trend(times, [one.descriptors for one in later])
    now = later[-1].rss_bytes
    shown = samples[:: max(len(samples) // 15, 1)]
    return {
        "rss_megabytes": [round(one.rss_bytes / 1e6, 1) for one in shown],
        "rss_bytes": [later[0].rss_bytes, now],
        "rss_bytes_per_hour": [3600 * x for x in (rss.slope, rss.low, rss.high)],
        "anonymous_bytes_per_hour": 3600 * anonymous.slope,
        "rss_in_24_hours": [1 + DAY_SECONDS * x / now for x in (rss.slope, rss.low, rss.high)],
        "threads": [min(one.threads for one in later), max(one.threads for one in later)],
        "threads_per_hour": 3600 * threads.slope,
        "descriptors": [
            min(one.descriptors for one in later),
            max(one.descriptors for one in later),
        ],
        "descriptors_per_hour": 3600 * descriptors.slope,
    }


def main() -> None:
    flags = arguments(__doc__, minutes=MINUTES, part=())
    if flags.part:
        port, number, seconds, *folder = flags.part.split("/", 3)
        certificates = Path(folder[0]) if folder else None
        coming = come_and_go(
            int(port), int(number), seconds=float(seconds), certificates=certificates
        )
        counted = asyncio.run(coming)
        print(json.dumps(counted))
        return
    seconds = 12.0 if flags.quick else 60 * flags.minutes
    figures = soak(seconds)
    figures["target"] = "no slope whose interval leaves zero out, beyond a settling heap"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
