"""Bytes on the wire per update against the model's 4P, up and down, for three sizes of model.

A real server and a real device talk through a TCP proxy in this script, which counts what goes each
way: everything that TLS would encrypt, with HTTP/2, gRPC and protobuf around it, and the first
greeting shared out over the rounds. TCP's and IP's own headers are not counted, nor TLS (it is
off). Up is the update of P float32 and its report; down is the model and the plan.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from benchmarks import serving
from benchmarks.measure import Figures, arguments, report

TASK = "benchmarks/tasks.py:Vector"
SIZES = {"P_10k": 10_000, "P_1M": 1_000_000, "P_10M": 10_000_000}


class Proxy:
    """Passes TCP connections on to a port and counts the bytes each way."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.up_bytes = 0
        self.down_bytes = 0
        self._target = target
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True).start()
        self._ready.wait()

    async def _run(self) -> None:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _pass(self, reader: Any, writer: Any) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(
            self._pump(reader, to_writer, is_up=True), self._pump(to_reader, writer, is_up=False)
        )

    async def _pump(self, reader: Any, writer: Any, *, is_up: bool) -> None:
        try:
            while data := await reader.read(1 << 18):
                if is_up:
                    self.up_bytes += len(data)
                else:
                    self.down_bytes += len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # the other side has gone; what it sent is counted
        finally:
            writer.close()


def measure(num_parameters: int, *, rounds: int, accumulation_steps: int) -> Figures:
    """Run a few rounds with one device behind the proxy."""
    settings = {
        "task": TASK,
        "rounds": rounds,
        "threads": 1,
        "plan.accumulation_steps": accumulation_steps,
        "plan.micro_batch_size": 1,
    }
    with serving.server(settings, num_parameters=num_parameters) as running:
        proxy = Proxy(running.port)
        with serving.clients(proxy.port, TASK, number=1, num_parameters=num_parameters):
            rows = list(running.rows())
    assert len(rows) == rounds
    whole = 4 * num_parameters * rounds
    return {
        "up_bytes_per_update": proxy.up_bytes / rounds,
        "down_bytes_per_update": proxy.down_bytes / rounds,
        "up_ratio": proxy.up_bytes / whole,
        "down_ratio": proxy.down_bytes / whole,
        "up_ratio_by_own_count": sum(row["bytes_up"] for row in rows) / whole,
        "down_ratio_by_own_count": sum(row["bytes_down"] for row in rows) / whole,
    }


def main() -> None:
    flags = arguments(__doc__)
    rounds, steps = (2, 1) if flags.quick else (10, 4)
    sizes = {"P_10k": SIZES["P_10k"]} if flags.quick else SIZES
    figures: Figures = {
        name: measure(size, rounds=rounds, accumulation_steps=steps) for name, size in sizes.items()
    }
    figures["rounds"] = rounds
    figures["accumulation_steps"] = steps
    figures["target"] = "up_ratio <= 1.01 and down_ratio <= 1.01 for P >= 1M"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
