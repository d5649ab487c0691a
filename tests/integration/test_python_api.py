"""``headwater.serve`` and ``headwater.take_part`` in the threads of one process, and Ctrl-C."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headwater
from tests.python_tasks import Signs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROUNDS: dict[str, Any] = {"rounds": 3, "accumulation_steps": 2, "micro_batch_size": 4}
WAITING = """
import sys
import headwater
from tests.python_tasks import Signs

try:
    print("started", flush=True)
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_threads_train_the_simulated_model_bit_for_bit(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(
            lambda: headwater.serve(
                Signs(), listen=address, min_clients=2, threads=1, out=tmp_path / "out", **ROUNDS
            )
        )
        parts = [
            pool.submit(
                headwater.take_part,
                Signs(),
                server=address,
                name=str(part),
                part=part,
                num_parts=2,
                threads=1,
                state=tmp_path / "state",
            )
            for part in range(2)
        ]
        run = serving.result()
        for part in parts:
            part.result()
    simulated = headwater.simulate(Signs, clients=2, progress=False, **ROUNDS)
    one, other = (
        [tensor.tolist() for tensor in each.model.parameters()] for each in (run, simulated)
    )
    assert one == other
    assert [row.num_clients for row in run.history] == [2, 2, 2]


@pytest.mark.parametrize(
    "call",
    [
        "headwater.take_part(Signs, server='127.0.0.1:{port}', name='a', state='{folder}/state')",
        "headwater.serve(Signs, listen='127.0.0.1:{port}', out='{folder}/out')",
    ],
    ids=["take_part", "serve"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_returns_control(tmp_path: Path, call: str, number: signal.Signals) -> None:
    code = WAITING.format(call=call.format(port=free_port(), folder=tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    with process:
        lines = iter(process.stdout)
        assert next(lines) == "started\n"
        until_it_waits = next(lines)  # the client's or the server's first line
        assert "127.0.0.1" in until_it_waits
        process.send_signal(number)
        assert [*lines][-1] == "interrupted\n"
    assert process.returncode == 0
