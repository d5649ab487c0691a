"""Five hundred resident devices on one server for twenty rounds, and nothing may be lost.

The server is the real one. The devices are light fakes in one process of their own, which speak the
real wire over loopback, each on a TCP connection of its own; each "trains" for half a second to one
and a half, the same each time.

``plan_to_device`` is, for each plan, the time from the moment at which the round's plans are ready
in the server (before messages are made of them) until its device has the whole plan and, in front
of it, the whole model, which changes with each round. There are 500 such times a round; the first
round is told apart, as its devices have just connected. ``bare`` is the peer of the same run: a
bare grpc.aio server that pushes as many bytes to as many streams in one message each, and nothing
else.

Nothing is lost: every device took every round's plan once, heard that its update is whole, and
all of them are in each round's sum. ``model_is_exact``: device i adds 1 to coordinate i alone, and
the weights sum to a power of two, so that each coordinate of the final model is known to the bit,
and one update that was lost or counted twice would show in it.

Memory, threads and descriptors are those of the server behind rounds 3 and 20.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import serving
from benchmarks.fake_device import FakeDevice
from benchmarks.measure import ROOT, Figures, arguments, report

TASK = "benchmarks/tasks.py:Vector"
NUM_PARAMETERS = 10_000
START = 1e-3  # each parameter of the task's model
ROUNDS, FIRST, LAST = 20, 3, 20
THINK_SECONDS = 1.0
TOGETHER_SECONDS = 60.0
BARE_METHOD = "/benchmark.Push/Connect"
BARE_PUSHES, BARE_PAUSE_SECONDS = 5, 0.5


def weights(number: int) -> list[int]:
    """Return a weight of 1 or 2 for each device, which sum to a power of two."""
    total = 1 << (number - 1).bit_length()
    return [2 if i < total - number else 1 for i in range(number)]


def expected_model(number: int, rounds: int) -> list[float]:
    """Return the final model: each device has moved its coordinate down by one in each round."""
    moved = START
    for _ in range(rounds):
        (moved,) = struct.unpack("f", struct.pack("f", moved - 1.0))
    (still,) = struct.unpack("f", struct.pack("f", START))
    return [moved] * number + [still] * (NUM_PARAMETERS - number)


async def play(port: int, number: int) -> Figures:
    """Be ``number`` devices until the server says goodbye."""
    from headwater.common.model.parameters import build_model
    from headwater.common.system.heap import freeze_loaded_objects
    from headwater.common.task import load_task

    layout = build_model(load_task(TASK), seed=0).layout
    devices = []
    for i, weight in enumerate(weights(number)):
        update = struct.pack(f"{NUM_PARAMETERS}f", *(float(j == i) for j in range(NUM_PARAMETERS)))
        name = f"fake-{i}"
        spread = 0.5 + i / number
        device = FakeDevice(
            name, layout.digest, update, weight=weight, think_seconds=THINK_SECONDS * spread
        )
        devices.append(device)
    freeze_loaded_objects()  # no pause of this process may be taken for one of the server's
    await asyncio.gather(*(device.run(port) for device in devices))
    return {
        "taken": [[(plan.round, plan.at) for plan in device.taken] for device in devices],
        "acknowledged": [device.acknowledged for device in devices],
        "num_refused": sum(device.num_refused for device in devices),
        "num_reconnects": sum(device.num_reconnects for device in devices),
    }


def measure(number: int, rounds: int) -> Figures:
    """Run the rounds, and return what was found."""
    with tempfile.TemporaryDirectory(prefix="headwater-benchmark-") as folder:
        settings = {
            "task": TASK,
            "rounds": rounds,
            "threads": 1,
            "out": folder,
            "check_task": False,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": float(sum(weights(number))),
            "plan.accumulation_steps": 1,
            "plan.micro_batch_size": 2,
            "cohort.min_clients": number,
        }
        with serving.server(settings, num_parameters=NUM_PARAMETERS) as running:
            rows, told = _rounds(running, number)
        model = _model(Path(folder) / "model.safetensors")
    if len(rows) != rounds:
        raise RuntimeError(f"{len(rows)} of {rounds} rounds: see the server's errors")
    planned_at = {row["round"]: row["planned_at"] for row in rows}
    seconds: dict[int, list[float]] = {row["round"]: [] for row in rows}
    for taken in told["taken"]:
        for round_number, at in taken:
            seconds[round_number].append(at - planned_at[round_number])
    later = [one for number_, ones in seconds.items() if number_ > 1 for one in ones]
    split = {
        name: sum(row["seconds_split"][name] for row in rows[1:]) / len(rows[1:])
        for name in rows[0]["seconds_split"]
    }
    return {
        "num_parameters": NUM_PARAMETERS,
        "plan_to_device": {
            "p50_seconds": _quantile(later, 0.5),
            "p99_seconds": _quantile(later, 0.99),
            "max_seconds": max(later),
            "first_round_p99_seconds": _quantile(seconds[1], 0.99),
            "p99_of_each_round": [round(_quantile(ones, 0.99), 4) for ones in seconds.values()],
        },
        "round_split_seconds": split,
        **_losses(told, rows, number, rounds),
        "model_is_exact": model == expected_model(number, rounds),
        "server": _growth(rows, min(FIRST, rounds - 1), min(LAST, rounds)),
    }


def _rounds(running: serving.Serving, number: int) -> tuple[list[Figures], Figures]:
    command = [sys.executable, "-m", "benchmarks.load", "--part", f"{running.port}/{number}"]
    devices = subprocess.Popen(
        command,
        cwd=ROOT,
        env=serving.environment(NUM_PARAMETERS),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        rows = list(running.rows())
        told = devices.communicate(timeout=TOGETHER_SECONDS)[0]
    finally:
        serving.end(devices)
    running.process.wait(TOGETHER_SECONDS)
    found: Figures = json.loads(told.splitlines()[-1])
    return rows, found


def _losses(told: Figures, rows: Sequence[Figures], number: int, rounds: int) -> Figures:
    """Count what did not arrive, or arrived twice, on any way: all of it is to be 0."""
    everything = Counter(range(1, rounds + 1))
    taken = [Counter(number_ for number_, _ in plans) for plans in told["taken"]]
    heard = [Counter(one) for one in told["acknowledged"]]
    return {
        "plans_lost": sum((everything - one).total() for one in taken),
        "plans_twice": sum((one - everything).total() for one in taken),
        "receipts_lost": sum((everything - one).total() for one in heard),
        "receipts_twice": sum((one - everything).total() for one in heard),
        "updates_lost": sum(number - row["num_clients"] for row in rows),
        "weight_lost": sum(sum(weights(number)) - row["weight"] for row in rows),
        "num_refused": told["num_refused"] + sum(len(row["refused"]) for row in rows),
        "num_reconnects": told["num_reconnects"],
    }


def _growth(rows: Sequence[Figures], first: int, last: int) -> Figures:
    """Tell what the server held behind two rounds."""
    before, after = rows[first - 1], rows[last - 1]
    return {
        f"rss_bytes_round_{first}": before["memory"]["VmRSS"],
        f"rss_bytes_round_{last}": after["memory"]["VmRSS"],
        "rss_grown_by": after["memory"]["VmRSS"] / before["memory"]["VmRSS"] - 1,
        f"threads_round_{first}": before["num_threads"],
        f"threads_round_{last}": after["num_threads"],
        f"descriptors_round_{first}": before["num_descriptors"],
        f"descriptors_round_{last}": after["num_descriptors"],
    }


def _model(path: Path) -> list[float]:
    """Return all parameters of a saved model, in the order of the layout."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    names = sorted(tensors, key=lambda name: int(name.rpartition(".")[2]))
    return [value for name in names for value in tensors[name].tolist()]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


# The peer: the least that gRPC in Python takes to push as many bytes to as many streams.


async def _bare_server(number: int) -> None:
    """Push to all streams at once, some times; print when each push began."""
    import grpc.aio

    all_here, data = asyncio.Barrier(number + 1), bytes(4 * NUM_PARAMETERS)
    go = [asyncio.Event() for _ in range(BARE_PUSHES)]

    async def connect(_: Any, stream: Any) -> None:
        await stream.read()
        await all_here.wait()
        for event in go:
            await event.wait()
            await stream.write(data)
            await stream.read()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(connect)
    service, method = BARE_METHOD.lstrip("/").split("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await all_here.wait()
    begun = []
    for event in go:
        await asyncio.sleep(BARE_PAUSE_SECONDS)
        begun.append(asyncio.get_running_loop().time())
        event.set()
    await asyncio.sleep(BARE_PAUSE_SECONDS)
    print(json.dumps(begun), flush=True)
    await server.stop(1.0)


async def _bare_clients(port: int, number: int) -> list[list[float]]:
    import grpc.aio

    async def one() -> list[float]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            call = channel.stream_stream(BARE_METHOD)()
            await call.write(b"here")
            times = []
            for _ in range(BARE_PUSHES):
                await call.read()
                times.append(asyncio.get_running_loop().time())
                await call.write(b"more")
            return times

    return list(await asyncio.gather(*(one() for _ in range(number))))


def bare(number: int) -> Figures:
    """Measure the peer; the first push is left out."""
    code = [sys.executable, "-m", "benchmarks.load", "--part"]
    environment = serving.environment()
    server = subprocess.Popen(
        [*code, f"bare/{number}"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        done = subprocess.run(
            [*code, f"pushed/{port}/{number}"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=TOGETHER_SECONDS,
        )
        begun: list[float] = json.loads(server.stdout.readline())
    finally:
        serving.end(server)
        if server.stdout is not None:
            server.stdout.close()
    times: list[list[float]] = json.loads(done.stdout)
    seconds = [one[i] - begun[i] for one in times for i in range(1, BARE_PUSHES)]
    return {"p50_seconds": _quantile(seconds, 0.5), "p99_seconds": _quantile(seconds, 0.99)}


def _part(part: str) -> None:
    match part.split("/"):
        case ["bare", number]:
            asyncio.run(_bare_server(int(number)))
        case ["pushed", port, number]:
            print(json.dumps(asyncio.run(_bare_clients(int(port), int(number)))))
        case [port, number]:
            print(json.dumps(asyncio.run(play(int(port), int(number)))))


def main() -> None:
    flags = arguments(__doc__, part=())
    if flags.part:
        _part(flags.part)
        return
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    number, rounds = (20, 3) if flags.quick else (500, ROUNDS)
    figures: Figures = {"num_clients": number, "rounds": rounds, **measure(number, rounds)}
    figures["bare"] = bare(number)
    figures["target"] = "p99_seconds < 0.2, rss_grown_by about 0, nothing lost or twice"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
