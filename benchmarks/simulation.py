"""Client-rounds per second of simulated rounds, beside Flower's Ray engine, pfl and bare PyTorch.

The work is the same for all: digits (1,797 images of scikit-learn), an MLP 64-128-10, 15 examples a
client in three micro-batches of 5, all clients in each round. ``rate`` is the clients over the
median seconds of a round, once the rounds run; ``first_seconds`` is from the start of the process
to the end of the first round; ``peak_mib`` is VmHWM. Each runs in a process of its own, with one
thread of torch; one behind the other, so that they do not take each other's cores.

* ``bare_loop``: client after client, three times ``loss.backward()``, nothing checked or reported.
  The limit of ``one-by-one``.
* ``bare_fused``: one pass over all clients' examples, and nothing else. The limit of ``fused``.
* ``bare_vectors``: ``vmap(grad)``, a vector for each client. The limit of ``vectorised``.
* ``flower_ray``: Flower's simulation with a strategy of Flower's and a client that trains so.
* ``pfl``: Apple's simulator, federated averaging with a local step for each micro-batch.

The last two are left out if they are not installed (the extras ``ray`` and ``simulators``).
``curve`` is the rate of ``fused`` for 100 to 10,000 clients.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.measure import Figures, arguments, child, memory_of, report

EACH, MICRO_BATCH = 15, 5
WAYS = ("fused", "vectorised", "one-by-one")
BARE = ("bare_fused", "bare_vectors", "bare_loop")
PEERS = {"flower_ray": "ray", "pfl": "pfl"}
VECTORS_AT_ONCE = 100
LEARNING_RATE = 0.1


class Digits15:
    """Each client owns 15 digits, drawn by its number."""

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        images, labels = self._all
        random = np.random.default_rng([3, part])
        rows = torch.from_numpy(random.choice(len(labels), EACH, replace=False))
        return TensorDataset(images[rows], labels[rows])

    def loss_sum(
        self, model: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, int, dict[str, Tensor]]:
        images, labels = batch
        logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {"accuracy": (logits.argmax(1) == labels).sum()}

    @cached_property
    def _all(self) -> tuple[Tensor, Tensor]:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)


def ours(way: str, number: int, rounds: int) -> None:
    """Run rounds of the whole system."""
    from common.settings import load
    from simulation.engines import run_engine
    from simulation.profiles import with_fleet

    chosen = {
        "task": f"{__file__}:Digits15",
        "rounds": rounds,
        "threads": 1,
        "simulation.clients": number,
        "simulation.compute": way,
        "plan.accumulation_steps": EACH // MICRO_BATCH,
        "plan.micro_batch_size": MICRO_BATCH,
        "optimizer.learning_rate": LEARNING_RATE,
    }
    settings = with_fleet(load(None, chosen))
    run_engine(settings, on_round=lambda _: _tick(), resume=False)


ENDS: list[float] = []


def _tick() -> None:
    ENDS.append(time.perf_counter())


def bare(kind: str, number: int, rounds: int) -> None:
    """Run rounds of what PyTorch alone does."""
    task = Digits15()
    model = task.new_model()
    clients = [
        task.train_examples(data=None, part=part, num_parts=number).tensors
        for part in range(number)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    gradients = {
        "bare_fused": _fused,
        "bare_vectors": _vectors,
        "bare_loop": _loop,
    }[kind](model, clients)
    for _ in range(rounds):
        gradients()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= number * EACH
        optimizer.step()
        _tick()


def _fused(model: nn.Module, clients: list[Any]) -> Callable[[], None]:
    images, labels = (torch.cat(column) for column in zip(*clients, strict=True))

    def gradients() -> None:
        model.zero_grad()
        loss = functional.cross_entropy(model(images), labels, reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]

    return gradients


def _loop(model: nn.Module, clients: list[Any]) -> Callable[[], None]:
    def gradients() -> None:
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for images, labels in clients:
            model.zero_grad(set_to_none=False)
            for start in range(0, EACH, MICRO_BATCH):
                logits = model(images[start : start + MICRO_BATCH])
                target = labels[start : start + MICRO_BATCH]
                loss = functional.cross_entropy(logits, target, reduction="sum")
                loss.backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total

    return gradients


def _vectors(model: nn.Module, clients: list[Any]) -> Callable[[], None]:
    images, labels = (torch.stack(column) for column in zip(*clients, strict=True))
    trained = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (inputs,))
        return functional.cross_entropy(logits, targets, reduction="sum")

    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def gradients() -> None:
        sums = {name: torch.zeros_like(value) for name, value in trained.items()}
        held = {name: value.detach() for name, value in trained.items()}
        for start in range(0, len(labels), VECTORS_AT_ONCE):
            end = start + VECTORS_AT_ONCE
            for name, rows in of_each(held, images[start:end], labels[start:end]).items():
                sums[name] += rows.sum(0)
        for name, parameter in trained.items():
            parameter.grad = sums[name]

    return gradients


def flower_ray(number: int, rounds: int) -> None:
    """Run Flower's own simulation of its FedAvg; its clients take a step a micro-batch."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        task, model = Digits15(), _resident_model()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        part = int(context.node_config["partition-id"])
        images, labels = task.train_examples(data=None, part=part, num_parts=number).tensors
        _local_steps(model, images, labels)
        arrays = ArrayRecord(model.state_dict())
        metrics = MetricRecord({"num-examples": EACH})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
            found = super().aggregate_train(*args, **kwargs)
            _tick()
            return found

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=number)
        initial = ArrayRecord(Digits15().new_model().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=number, backend_config=resources)


_MODELS: list[nn.Module] = []


def _resident_model() -> nn.Module:
    if not _MODELS:
        _MODELS.append(Digits15().new_model())
    return _MODELS[0]


def _local_steps(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for start in range(0, EACH, MICRO_BATCH):
        optimizer.zero_grad()
        logits = model(images[start : start + MICRO_BATCH])
        loss = functional.cross_entropy(logits, labels[start : start + MICRO_BATCH])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def pfl(number: int, rounds: int) -> None:
    """Run Apple's simulator; users' data are made once, as ours are."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    task = Digits15()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.new_model()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.net(images)
            return logits

        def loss(self, images: Tensor, labels: Tensor, is_eval: bool = False) -> Tensor:
            return functional.cross_entropy(self(images), labels)

        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            _tick()
            return False, Metrics()

    users = {
        str(part): Dataset(
            raw_data=list(task.train_examples(data=None, part=part, num_parts=number).tensors)
        )
        for part in range(number)
    }
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    model = Model()
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=number,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=None),
        PyTorchModel(model, torch.optim.SGD, central),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=MICRO_BATCH
        ),
        NNEvalHyperParams(local_batch_size=MICRO_BATCH),
        callbacks=[Clock()],
    )


def _run(kind: str, number: int, rounds: int) -> Figures:
    torch.set_num_threads(1)
    if kind in WAYS:
        ours(kind, number, rounds)
    elif kind in BARE:
        bare(kind, number, rounds)
    else:
        {"flower_ray": flower_ray, "pfl": pfl}[kind](number, rounds)
    seconds = [after - before for before, after in pairwise(ENDS)]
    return {
        "rate": number / statistics.median(seconds),
        "first_seconds": ENDS[0] - BEGUN,
        "peak_mib": memory_of()["VmHWM"] / 2**20,
    }


BEGUN = time.perf_counter()


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _measure(kind: str, number: int, rounds: int) -> Figures:
    return child("benchmarks.simulation", "--case", f"{kind}:{number}:{rounds}")


def main() -> None:
    """Run each in a process of its own and report."""
    chosen = arguments(__doc__, case=())
    if chosen.case is not None:
        kind, number, rounds = chosen.case.split(":")
        print(json.dumps(_run(kind, int(number), int(rounds))))
        return
    numbers, rounds = ((20,), 3) if chosen.quick else ((100, 1000), 11)
    figures: Figures = {}
    for number in numbers:
        found = {
            kind: _measure(kind, number, rounds)
            for kind in (*BARE, *WAYS, *PEERS)
            if kind not in PEERS or (not chosen.quick and _has(PEERS[kind]))
        }
        limits = dict(zip(WAYS, BARE, strict=True))
        found["of_limit"] = {way: found[way]["rate"] / found[limits[way]]["rate"] for way in WAYS}
        found["fused_over"] = {
            peer: found["fused"]["rate"] / found[peer]["rate"] for peer in PEERS if peer in found
        }
        figures[f"clients_{number}"] = found
    if not chosen.quick:
        curve = {
            str(number): _measure("fused", number, 6)["rate"]
            for number in (100, 300, 1000, 3000, 10_000)
        }
        figures["curve"] = curve
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
