"""Devices that train on their next plan while their update is sent, over links that take long."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.client.training.sampler import permutation
from headwater.common.model.trained_model import MODEL
from headwater.server.asynchronous.staleness import TIMES_OF_FRESH, times_of
from tests.chaos.proxy import Proxy
from tests.faults import FaultPlan, Way, Weather
from tests.processes import Process, Processes, port_of, rows, until

pytestmark = pytest.mark.slow

WIDTH, NUM_EXAMPLES, RATE = 20_000, 48, 0.01
TASK = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Wide:
    def new_model(self):
        return nn.Linear({WIDTH}, 1)

    def train_examples(self, *, data, part, num_parts):
        return TensorDataset(*examples(part))

    def loss_sum(self, model, batch):
        inputs, targets = batch
        return ((model(inputs) - targets) ** 2).sum(), len(targets)


def examples(part):
    random = torch.Generator().manual_seed(part)
    inputs = torch.randn({NUM_EXAMPLES}, {WIDTH}, generator=random) / {WIDTH} ** 0.5
    return inputs, torch.randn({NUM_EXAMPLES}, 1, generator=random)
"""
# A window is half of a device's examples; an update has 80 kB, and takes 0.8 s.
PLAN = ("--accumulation-steps", 3, "--micro-batch-size", 8)
SETTINGS = (*PLAN, "--asynchronous", "--optimizer", "SGD", "--learning-rate", RATE)
SLOW = FaultPlan(weather=Weather(bytes_per_second=100_000))
BEGINS = "trains on the next plan while the update before is sent"


def write_wide_task(folder: Path) -> str:
    path = folder / "wide.py"
    path.write_text(TASK)
    return f"{path}:Wide"


@contextmanager
def fleet(
    folder: Path,
    *settings: object,
    num_rounds: int,
    num_devices: int = 2,
    faults: FaultPlan = SLOW,
) -> Iterator[tuple[Processes, Process, list[Process], Proxy]]:
    """A server, and devices behind a link of 100 kB/s each."""
    task = write_wide_task(folder)
    with Processes(folder) as processes:
        server = processes.server(
            *("--rounds", num_rounds, "--buffer", num_devices, "--min-clients", num_devices),
            *(*SETTINGS, *settings, "--verbose"),
            task=task,
        )
        with Proxy(port_of(server), faults) as proxy:
            devices = [
                processes.client(proxy.port, part, "--verbose", task=task)
                for part in range(num_devices)
            ]
            yield processes, server, devices, proxy


def window_of(name: str, number: int) -> list[int]:
    """Return the examples of a device's window, counted from 0: the half of an epoch."""
    order: list[int] = permutation(0, number // 2, name, NUM_EXAMPLES).tolist()
    half = NUM_EXAMPLES // 2
    return order[half:] if number % 2 else order[:half]


def replayed(found: list[dict[str, Any]], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take the rows' steps in float64 with plain PyTorch; each device's windows in their order."""
    models = [{name: one.double() for name, one in start.items()}]
    num_windows: dict[str, int] = defaultdict(int)
    for row in found:
        total = {name: torch.zeros_like(one) for name, one in models[-1].items()}
        weight = 0.0
        for name in sorted(client["name"] for client in row["clients"]):
            version = row["model_versions"][name]
            inputs, targets = examples(int(name))
            at = window_of(name, num_windows[name])
            num_windows[name] += 1
            model = {key: one.clone().requires_grad_() for key, one in models[version].items()}
            output = inputs[at].double() @ model["weight"].T + model["bias"]
            ((output - targets[at].double()) ** 2).sum().backward()
            times = times_of(row["round"] - 1 - version, 0.5) / TIMES_OF_FRESH
            weight += times * len(at)
            for key, one in model.items():
                assert one.grad is not None
                total[key] += times * one.grad
        step = {key: RATE * one / weight for key, one in total.items()}
        models.append({key: one - step[key] for key, one in models[-1].items()})
    return models[-1]


def examples(part: int) -> tuple[Tensor, Tensor]:
    found: dict[str, Any] = {}
    exec(TASK, found)
    inputs, targets = found["examples"](part)
    return inputs, targets


def write_start(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write the model that a run starts with."""
    random = torch.Generator().manual_seed(7)
    start = {"weight": torch.randn(1, WIDTH, generator=random), "bias": torch.zeros(1)}
    save_file(start, path := folder / "start.safetensors")
    return path, start


def assert_is_model_of_rows(folder: Path, start: dict[str, Tensor]) -> None:
    """Hold that the run's model is that of plain PyTorch in float64, given its rows."""
    found, expected = load_file(folder / "out" / MODEL), replayed(rows(folder / "out"), start)
    for name, one in expected.items():
        # Each gradient sums 48 terms in float32, and so do the steps.
        error = (found[name].double() - one).abs().max().item()
        assert error <= 48 * len(rows(folder / "out")) * 2**-23, (name, error)


def test_windows_begin_before_uploads_end_and_the_model_is_that_of_the_rows(
    tmp_path: Path,
) -> None:
    path, start = write_start(tmp_path)
    settings = ("--overlap", "--initial-model", path)
    with fleet(tmp_path, *settings, num_rounds=6) as (_, server, devices, _proxy):
        for process in (server, *devices):
            process.succeed()
    for device in devices:
        assert device.text().count(BEGINS) >= 4, device.text()
    found = rows(tmp_path / "out")
    assert all(row["refused"] == {} for row in found)
    assert [row["staleness_max"] for row in found] == [0, 1, 1, 1, 1, 1]
    assert all(row["num_examples"] == NUM_EXAMPLES for row in found)
    assert_is_model_of_rows(tmp_path, start)
    # A second update arrives between two steps too, and counts in one of them.
    num_bytes = 4 * (WIDTH + 1) * len(found) * len(devices)
    assert num_bytes < sum(row["bytes_up"] for row in found) < 1.1 * num_bytes
    for device in devices:  # that of the update, and not of the plan that is at work
        assert "round 1: sent K 3, 24 examples" in device.text()


def test_a_device_that_is_killed_in_the_overlap_counts_each_example_once(tmp_path: Path) -> None:
    path, start = write_start(tmp_path)
    settings = ("--overlap", "--initial-model", path)
    with fleet(tmp_path, *settings, num_rounds=6) as (processes, server, devices, proxy):
        killed, other = devices
        until(lambda: killed.text().count(BEGINS) >= 2, what=killed.text)
        killed.kill(signal.SIGKILL)
        killed.wait()
        server.wait_for("0 disconnected")  # else its name is taken
        task = f"{tmp_path / 'wide.py'}:Wide"
        again = processes.client(proxy.port, 0, "--verbose", task=task)
        for process in (server, again, other):
            process.succeed()
    assert all(row["num_clients"] == 2 for row in rows(tmp_path / "out"))
    assert_is_model_of_rows(tmp_path, start)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_link_that_breaks_in_the_overlap_loses_and_repeats_nothing(
    way: Way, tmp_path: Path
) -> None:
    """The first device's connection ends in an update, or in a model, while a window is summed."""
    path, start = write_start(tmp_path)
    settings = ("--overlap", "--initial-model", path)
    faults = SLOW.cut(after_bytes=200_000, way=way)
    with fleet(tmp_path, *settings, num_rounds=7, faults=faults) as (_, server, devices, proxy):
        for process in (server, *devices):
            process.succeed()
        assert proxy.has_struck
    assert all(row["refused"] == {} for row in rows(tmp_path / "out"))
    assert all(row["num_clients"] == 2 for row in rows(tmp_path / "out"))
    assert_is_model_of_rows(tmp_path, start)


def test_a_server_that_is_killed_in_the_overlap_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    path, start = write_start(tmp_path)
    settings = ("--overlap", "--initial-model", path)
    with fleet(tmp_path, *settings, num_rounds=6) as (processes, server, devices, proxy):
        until(lambda: len(rows(tmp_path / "out")) >= 3, what=server.text)
        server.kill(signal.SIGKILL)
        server.wait()
        task = f"{tmp_path / 'wide.py'}:Wide"
        listen = ("--listen", f"127.0.0.1:{proxy.target[1]}")
        more = ("--rounds", 6, "--buffer", 2, "--min-clients", 2, "--resume", *listen)
        server = processes.server(*more, *SETTINGS, *settings, task=task)
        for process in (server, *devices):
            process.succeed()
    assert [row["round"] for row in rows(tmp_path / "out")] == [1, 2, 3, 4, 5, 6]
    assert_is_model_of_rows(tmp_path, start)


def test_compressed_updates_are_sent_in_the_overlap_and_keep_their_residuals(
    tmp_path: Path,
) -> None:
    path, _ = write_start(tmp_path)
    settings = ("--overlap", "--initial-model", path, "--compress", "int4")
    with fleet(tmp_path, *settings, num_rounds=6) as (_, server, devices, _proxy):
        for process in (server, *devices):
            process.succeed()
    found = rows(tmp_path / "out")
    assert [row["staleness_max"] for row in found] == [0, 1, 1, 1, 1, 1]
    # Where an update is sent before the next plan arrives, as on a busy machine, it has no need to.
    assert all(device.text().count(BEGINS) >= 2 for device in devices)
    # The last counted one, and those of the two rounds that were pending at the end.
    assert len([*(tmp_path / "state").glob("0-*.residual-?")]) == 3
