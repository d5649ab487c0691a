"""Rounds per second and the server's memory while hostile devices try to stop the rounds.

A real server and three light devices, each over real sockets. Beside them, from the end of the
first round on, in turn, nobody; a device that says hello, is silent, leaves and comes again under
another name; and one that announces replies that nobody asked for, each with a head of a megabyte.
``rate_ratio`` is the rate beside an attack over that without, ``peak_ratio`` the same of the
server's resident memory (VmHWM).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from benchmarks import serving
from benchmarks.fake_device import FakeDevice
from benchmarks.measure import ROOT, Figures, arguments, report
from headwater.common.model.parameters import build_model
from headwater.common.task import load_task
from headwater.common.transport.limits import (
    CHANNEL_OPTIONS,
    MAX_REPLY_HEAD_BYTES,
    PROTOCOL_VERSION,
    STREAM_METHOD,
)
from headwater.common.transport.wire_pb2 import ClientFrame, Hello, Reply

TASK = "benchmarks/tasks.py:Vector"
NUM_PARAMETERS = 1_000
NUM_HONEST = 3
THINK_SECONDS = 0.02
SILENT_SECONDS = 0.05
ROUNDS, TURNS = 200, 3


async def be_honest(port: int, layout_digest: str) -> None:
    """Play the honest devices until the server says goodbye."""
    update = bytes(4 * NUM_PARAMETERS)
    devices = [
        FakeDevice(f"honest-{i}", layout_digest, update, think_seconds=THINK_SECONDS)
        for i in range(NUM_HONEST)
    ]
    await asyncio.gather(*(device.run(port) for device in devices))


async def say_hello(port: int, layout_digest: str) -> None:
    """Say hello, be silent, leave, and come again under another name."""
    for number in itertools.count():
        await _visit(port, f"silent-{number}", layout_digest, _be_silent)


async def announce(port: int, layout_digest: str) -> None:
    """Announce replies that nobody asked for; come again when the server ends the stream."""
    while True:
        await _visit(port, "announcer", layout_digest, _announce)


async def _visit(
    port: int, name: str, layout_digest: str, do: Callable[[Any], Awaitable[None]]
) -> None:
    hello = Hello(protocol_version=PROTOCOL_VERSION, name=name, layout_digest=layout_digest)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(STREAM_METHOD)()
            await call.write(ClientFrame(hello=hello).SerializeToString())
            await do(call)


async def _be_silent(_: Any) -> None:
    await asyncio.sleep(SILENT_SECONDS)


async def _announce(call: Any) -> None:
    reply = Reply(message_id="u" * (MAX_REPLY_HEAD_BYTES - 100))
    frame = ClientFrame(reply=reply).SerializeToString()
    while True:
        await call.write(frame)


PARTS = {"honest": be_honest, "hello_and_silence": say_hello, "unasked_heads": announce}
ATTACKS = ("hello_and_silence", "unasked_heads")


def play(part: str, port: int) -> subprocess.Popen[bytes]:
    """Start a process that plays a part at a server's port, when its input says so."""
    command = [sys.executable, "-m", "benchmarks.hostile_devices", "--part", f"{part}/{port}"]
    chosen = serving.environment(NUM_PARAMETERS)
    return subprocess.Popen(
        command, cwd=ROOT, env=chosen, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def begin(playing: subprocess.Popen[bytes]) -> None:
    """Let a process that ``play`` started connect to the server."""
    assert playing.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        playing.stdin.write(b"begin\n")
        playing.stdin.close()


def one_run(attack: str | None, *, rounds: int) -> tuple[float, int]:
    """Serve a run beside an attack; return its rounds per second and the server's peak memory.

    Raises:
        RuntimeError: the server ended before all rounds.
    """
    settings = {
        "task": TASK,
        "rounds": rounds,
        "threads": 1,
        "plan.accumulation_steps": 1,
        "plan.micro_batch_size": 1,
        "cohort.min_clients": NUM_HONEST,
    }
    with serving.server(settings, num_parameters=NUM_PARAMETERS) as running:
        honest = play("honest", running.port)
        attacking = None if attack is None else play(attack, running.port)
        rows: list[Figures] = []
        try:
            begin(honest)
            for row in running.rows():
                if not rows and attacking is not None:
                    # Not before: an address whose connections were refused has to wait, and here
                    # all have the same.
                    begin(attacking)
                rows.append(row)
        finally:
            for process in (honest, attacking):
                if process is not None:
                    serving.end(process)
    if len(rows) != rounds:
        raise RuntimeError(f"{len(rows)} of {rounds} rounds beside {attack}")
    # The first round waits for newcomers, and no attack has begun.
    rate = (rounds - 1) / sum(row["wall_seconds"] for row in rows[1:])
    return rate, max(row["memory"]["VmHWM"] for row in rows)


def measure(*, rounds: int, turns: int) -> Figures:
    """Run each case by turns; return medians of rates and peaks, and their ratios to no attack."""
    cases = (None, *ATTACKS)
    found = [{case: one_run(case, rounds=rounds) for case in cases} for _ in range(turns)]
    figures: Figures = {}
    for case in cases:
        rates = [turn[case][0] for turn in found]
        peaks = [turn[case][1] for turn in found]
        ratios = [turn[case][0] / turn[None][0] for turn in found]
        figures[case or "nobody"] = {
            "rounds_per_second": statistics.median(rates),
            "peak_megabytes": statistics.median(peaks) / 1e6,
            "rate_ratio": statistics.median(ratios),
            "peak_ratio": statistics.median(turn[case][1] / turn[None][1] for turn in found),
        }
    return figures


def main() -> None:
    flags = arguments(__doc__, part=())
    if flags.part:
        part, port = flags.part.split("/")
        layout = build_model(load_task(TASK), seed=0).layout
        with contextlib.suppress(KeyboardInterrupt):
            if sys.stdin.readline():  # otherwise the parent has ended
                asyncio.run(PARTS[part](int(port), layout.digest))
        return
    sizes = {"rounds": 40, "turns": 1} if flags.quick else {"rounds": ROUNDS, "turns": TURNS}
    report(measure(**sizes), as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
