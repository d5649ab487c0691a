"""``headwater.serve`` and ``headwater.take_part`` in the threads of one process, and Ctrl-C."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import headwater
from tests.processes import Processes, free_port
from tests.python_tasks import Signs

pytestmark = pytest.mark.slow

ROUNDS: dict[str, Any] = {"rounds": 3, "accumulation_steps": 2, "micro_batch_size": 4}


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


@pytest.mark.parametrize("side", ["take_part", "serve"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_returns_control(tmp_path: Path, side: str, number: signal.Signals) -> None:
    address = f"127.0.0.1:{free_port()}"
    with Processes(tmp_path / "logs") as processes:
        waiting = processes.start(
            *("tests.integration.waiting_api", side, address, tmp_path), errors=tmp_path / "errors"
        )
        waiting.wait_for(re.escape(address))  # the client's or the server's first line
        waiting.kill(number)
        assert waiting.wait() == 0, waiting.text()
        assert waiting.text().splitlines()[-1] == "interrupted"
