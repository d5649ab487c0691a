"""Seconds of a round beyond the training itself: real server, 1 and 10 real devices, loopback.

``round_seconds_beyond_training`` is a round as the server times it (plan, send, wait, fold, step)
less what its slowest device says that training took: sending the model and the plan, waking the
device, the upload with its SHA-256, folding, dividing, the optimizer's step. ``with_files`` is
the time between two rounds' ends, less the same: journal, TensorBoard events and the checkpoint's
fsync besides. The model is that of examples/digits.py, without its test set.

``echo`` is the peer of the same run: a bare grpc.aio stream in another process that is sent a
model's bytes and answers with as many, and nothing else; with 10, all at once. It takes its turn
before and after each series of rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import serving
from benchmarks.measure import ROOT, Figures, arguments, report

TASK = "benchmarks/tasks.py:Perceptron"
NUM_PARAMETERS = 9_610
METHOD = "/benchmark.Echo/Connect"
WARMUP_ROUNDS = 5


def rounds(number: int, *, num_rounds: int) -> Figures:
    """Run rounds with ``number`` devices, each of one micro-batch of one example."""
    with tempfile.TemporaryDirectory(prefix="headwater-benchmark-") as folder:
        settings = {
            "task": TASK,
            "rounds": num_rounds + WARMUP_ROUNDS,
            "threads": 1,
            "out": folder,
            "plan.accumulation_steps": 1,
            "plan.micro_batch_size": 1,
            "cohort.min_clients": number,
        }
        with (
            serving.server(settings) as running,
            serving.clients(running.port, TASK, number=number),
        ):
            rows = list(running.rows())[WARMUP_ROUNDS:]
    if len(rows) != num_rounds:
        raise RuntimeError(f"{len(rows)} of {num_rounds} rounds: see the server's errors")
    slowest = [row["slowest_client_seconds"] for row in rows]
    beyond = [row["seconds"] - own for row, own in zip(rows, slowest, strict=True)]
    whole = [row["wall_seconds"] - own for row, own in zip(rows, slowest, strict=True)]
    split = {
        f"{name}_seconds": statistics.median(row["seconds_split"][name] for row in rows)
        for name in rows[0]["seconds_split"]
    }
    return {
        "round_seconds_beyond_training": statistics.median(beyond),
        "round_seconds_beyond_training_p90": _p90(beyond),
        "with_files_seconds": statistics.median(whole),
        "slowest_client_seconds": statistics.median(slowest),
        "split": split,
    }


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.9)]


async def _echo_server() -> None:
    """Answer each message with itself."""
    import grpc

    async def connect(_: Any, stream: Any) -> None:
        while (data := await stream.read()) is not grpc.aio.EOF:
            await stream.write(data)

    handler = grpc.stream_stream_rpc_method_handler(connect)
    service, method = METHOD.lstrip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def _time_echoes(port: int, number: int, turns: int) -> list[float]:
    """Send the bytes over ``number`` connections at once and wait for all answers."""
    import grpc.aio

    data = bytes(4 * NUM_PARAMETERS)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(number)]
    calls = [channel.stream_stream(METHOD)() for channel in channels]

    async def one(call: Any) -> None:
        await call.write(data)
        await call.read()

    seconds = []
    for _ in range(turns):
        start = time.perf_counter()
        await asyncio.gather(*(one(call) for call in calls))
        seconds.append(time.perf_counter() - start)
    for channel in channels:
        await channel.close()
    return seconds[len(seconds) // 10 :]


def echoes(number: int, *, turns: int) -> list[float]:
    """Time the bare echo in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.round_trip", "--part", "echo"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        return asyncio.run(_time_echoes(port, number, turns))
    finally:
        serving.end(process)


def main() -> None:
    flags = arguments(__doc__, part=("echo",))
    if flags.part == "echo":
        asyncio.run(_echo_server())
        return
    num_rounds, turns, series = (5, 20, 1) if flags.quick else (60, 200, 3)
    figures: Figures = {}
    for number in (1,) if flags.quick else (1, 10):
        found, bare = [], []
        for _ in range(series):
            bare += echoes(number, turns=turns)
            found.append(rounds(number, num_rounds=num_rounds))
            bare += echoes(number, turns=turns)
        middle = sorted(found, key=lambda f: float(f["round_seconds_beyond_training"]))[series // 2]
        echo_seconds = statistics.median(bare)
        figures[f"clients_{number}"] = {
            **middle,
            "series": [f["round_seconds_beyond_training"] for f in found],
            "echo_seconds": echo_seconds,
            "ratio_to_echo": middle["round_seconds_beyond_training"] / echo_seconds,
        }
    figures["rounds_per_series"] = num_rounds
    figures["target"] = "round_seconds_beyond_training < 0.020"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
