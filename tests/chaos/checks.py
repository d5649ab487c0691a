"""What must hold when all is over, told once for every scenario.

The rows of rounds.jsonl say how many examples each device had counted in each round; the devices'
walks, which are a function of seed, name and place, say which. From those and the plain reference
comes the model that the run must have ended with.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file
from torch import Tensor

from headwater.client.app import client_app
from headwater.client.flower.state_file import read_sampler
from headwater.client.training.sampler import SamplerPosition, window
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples, load_task
from headwater.server.app import server_app
from headwater.server.rounds import checkpoint
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware
from tests.reference import Picked, mean_gradient, trajectory

SEED, RUN_ID = 0, 1
OPTIMIZER: Mapping[str, Any] = {"lr": 0.5, "momentum": 0.9}
# Rounding may move the model by so little of what one example would move it by.
SHARE_OF_ONE_EXAMPLE = 0.25

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What the rows say was counted: the examples of each round, and each device's next place."""

    rounds: list[Picked]
    places: dict[str, SamplerPosition]


def doubled(examples: Examples) -> Examples:
    """Return pairs of inputs and a label as the reference takes them, in float64."""
    pairs = (examples[position] for position in range(len(examples)))
    return [(inputs.double(), label) for inputs, label in pairs]


def counted(rows: Rows, data: Mapping[str, Examples]) -> Counted:
    """Follow the devices' walks through the rows."""
    places = dict.fromkeys(data, SamplerPosition())
    rounds: list[Picked] = []
    for row in rows:
        picked: list[tuple[Examples, Sequence[int]]] = []
        for client in row["clients"]:
            name, number = client["name"], client["num_examples"]
            examples, place = data[name], places[name]
            taken = window(
                place, quota=number, run_seed=SEED, name=name, num_examples=len(examples)
            )
            places[name] = taken.after(number)
            picked.append((examples, taken.positions))
        rounds.append(picked)
    return Counted(rounds=rounds, places=places)


def check_model(out: Path, task_spec: str, found: Counted) -> float:
    """Hold that the model is that of the examples that were counted, each once, and no other.

    Returns how far it is from the reference, in the smallest step by which one example of the last
    round that was lost, or counted twice, would have moved it.
    """
    task = load_task(task_spec)
    image = build_model(task, seed=SEED)
    points = trajectory(task, image.model, found.rounds, "SGD", **OPTIMIZER)
    image.model.load_state_dict(load_file(out / "model.safetensors"))
    model_P = torch.cat([p.detach().double().reshape(-1) for p in image.model.parameters()])
    step = _smallest_step(task, _at(image.model, points[-2]), found.rounds[-1])
    off = float((model_P - points[-1]).norm()) / step
    assert off < SHARE_OF_ONE_EXAMPLE, (
        f"after {len(found.rounds)} rounds the model is {off:.3g} examples from the reference"
    )
    return off


def _at(model: torch.nn.Module, values_P: Tensor) -> torch.nn.Module:
    model = copy.deepcopy(model).double()
    torch.nn.utils.vector_to_parameters(values_P, model.parameters())
    return model


def _smallest_step(task: Any, model: torch.nn.Module, picked: Picked) -> float:
    """Return the least distance by which one example left out, or added again, moves the model."""
    number = sum(len(positions) for _, positions in picked)
    mean_P = mean_gradient(task, model, picked)
    farther = [
        float((mean_gradient(task, model, [(examples, [position])]) - mean_P).norm())
        for examples, positions in picked
        for position in positions
    ]
    # Without it the mean moves by 1 / (number - 1) of that, with it twice by 1 / (number + 1).
    return float(OPTIMIZER["lr"]) * min(farther) / (number + 1)


def run_in_process(settings: Settings) -> None:
    """Run the same apps in this process, without sockets, disks that fill, or signals."""
    torch.set_num_threads(settings.threads or 1)
    grid = InProcessGrid(client_app(virtual_hardware), settings)
    grid.enter_run(RUN_ID)
    context = Context(
        run_id=RUN_ID,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=settings.to_run_config(),
    )
    server_app(on_round=lambda _: None)(grid, context)


def is_whole(row: Mapping[str, Any], num_devices: int) -> bool:
    """Tell whether all devices were in a round with all of their quotas."""
    if masked := row["masked_clients"]:
        asked = sum(client["planned_examples"] for client in masked)
        return len(masked) == num_devices and row["num_examples"] == asked
    clients = row["clients"]
    return len(clients) == num_devices and all(one["reason"] == "quota" for one in clients)


def check_places(out: Path, state: Path, places: Mapping[str, SamplerPosition]) -> None:
    """Hold that each device's own record says the same of what was counted as the rows do."""
    for name, place in places.items():
        own = _own_place(out, state, name)
        assert own == place, f"device {name} is at {own}, by the rows at {place}"


def _own_place(out: Path, state: Path, name: str) -> SamplerPosition:
    found = checkpoint.load(out)
    assert found is not None
    path = state / f"{name}-{found.progress.run_id}.json"
    walk = read_sampler(json.loads(path.read_text()).get("walk"))
    return walk.settle(found.progress.counted.get(name)).place


LEFT_BY_A_RUN = {
    "checkpoint.safetensors",
    "devices.json",
    "events.jsonl",
    "model.safetensors",
    "report.html",
    "rounds.jsonl",
    "server.lock",
    "settings.toml",
    "state.json",
    "tensorboard",
}
KEPT_BY_MODES = (".residual-", "-masked.")
"""In the names of what a device keeps with int8 and with masks."""
MAY_BE_LEFT = {
    "curves.png",
    "order.json",
    "session.json",  # of masks
    "shared-state",
    # Of an earlier release.
    "history.sqlite",
    "history.sqlite-shm",
    "history.sqlite-wal",
}


def check_folders(out: Path, state: Path, spool: Path, names: Sequence[str]) -> None:
    """Hold that nothing is left but what a run leaves: no half of a file, no spool."""
    found = {path.name for path in out.iterdir()} - MAY_BE_LEFT
    assert found == LEFT_BY_A_RUN, found ^ LEFT_BY_A_RUN
    found_there = [path.name for path in state.iterdir()]
    left = [name for name in found_there if not any(part in name for part in KEPT_BY_MODES)]
    assert sorted(name.partition("-")[0] for name in left) == sorted(names), left
    assert [path.name for path in spool.iterdir()] == [] if spool.exists() else True
