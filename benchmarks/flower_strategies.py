"""Flower's own strategies on simulated devices: FedAvg, FedProx and FedAdam, run by Flower.

Strategy, sampling, averaging and rounds are Flower's (``flwr.serverapp.strategy``). A device does
E epochs of plain SGD over its examples, in batches (McMahan et al. 2017, algorithm 1), with
the proximal term that FedProx sends. Devices, data, batches, initial model and test are those of
the runs beside it.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx
from torch import Tensor

from headwater.client.trainer.trainer import Trainer
from headwater.client.training.sampler import permutation
from headwater.common.data.batches import batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings.schema import Settings
from headwater.common.task import Task, loss_sum
from headwater.server.rounds.evaluation import open_test_examples
from headwater.simulation.compare.trajectory import Trajectory
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.identities import identities_of

TEST_MICRO_BATCH = 256
PROXIMAL_MU = 0.1
SERVER_RATE = 0.01
"""Of FedAdam: the rate of Adam on the server, as exact steps have it. Flower's default is 0.1."""
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowerAlgorithm:
    """A strategy of Flower and the epochs of its devices."""

    name: str
    strategy: type[FedAvg]
    epochs: int
    arguments: tuple[tuple[str, float], ...] = ()


FLOWER = (
    FlowerAlgorithm(name="Flower FedAvg E=1", strategy=FedAvg, epochs=1),
    FlowerAlgorithm(name="Flower FedAvg E=5", strategy=FedAvg, epochs=5),
    FlowerAlgorithm(
        name="Flower FedProx E=5",
        strategy=FedProx,
        epochs=5,
        arguments=(("proximal_mu", PROXIMAL_MU),),
    ),
    FlowerAlgorithm(
        name="Flower FedAdam E=1",
        strategy=FedAdam,
        epochs=1,
        arguments=(("eta", SERVER_RATE),),
    ),
)


class FlowerRun:
    """A run of a strategy, as a ClientApp and what it comes to."""

    def __init__(
        self, settings: Settings, algorithm: FlowerAlgorithm, *, rate: float, batch_size: int
    ) -> None:
        """Load the task; devices, partition, cohort, seed and rounds are those of the settings."""
        assert settings.task is not None
        self._settings, self._algorithm, self._rate = settings, algorithm, rate
        self._batch_size = batch_size
        self._trainer = Trainer(settings.task, batch_norm=None, check_task=False)
        self._task: Task = self._trainer.task
        self._image: ModelImage = build_model(self._task, seed=settings.seed, batch_norm=None)
        self._identities = identities_of(settings)
        self._data: dict[int, tuple[Tensor, ...]] = {}
        self._num_examples = 0.0
        self._spent: list[dict[Any, float]] = []
        self._values: list[float] = []

    def run(self, metric: str) -> Trajectory:
        """Run all rounds; return the metric by what was spent (no seconds: Flower has no clock)."""
        torch.set_num_threads(self._settings.threads or 1)
        logging.getLogger("flwr").setLevel(logging.ERROR)
        random.seed(self._settings.seed)  # by which Flower samples the cohorts
        settings, image = self._settings, self._image
        test_examples = open_test_examples(self._task, image.model)
        assert test_examples is not None
        cohort = settings.cohort.size or settings.simulation.clients

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if number == 0:
                return None
            image.model.load_state_dict(arrays.to_torch_state_dict())
            total = evaluate_sums(self._task, image.model, test_examples, TEST_MICRO_BATCH)
            is_loss = metric == "test_loss"
            name = metric.removeprefix("test_")
            found = total.loss_sum if is_loss else total.metric_sums[name]
            # A model that diverged has a finite loss for no test example.
            self._values.append(float(found / total.weight) if total.weight else math.nan)
            num_bytes = 2 * FLOAT_BYTES * image.values_P.numel() * cohort * number
            self._spent.append(
                {
                    "rounds": float(number),
                    "bytes": float(num_bytes),
                    "examples": self._num_examples,
                    "seconds": 0.0,
                }
            )
            return None

        app = ClientApp()
        app.train()(self._train)
        grid = InProcessGrid(app, settings)
        grid.enter_run(secrets.randbits(62))
        strategy = self._algorithm.strategy(
            fraction_train=cohort / settings.simulation.clients,
            fraction_evaluate=0.0,
            **dict(self._algorithm.arguments),  # type: ignore[arg-type] # floats by name
        )
        initial = ArrayRecord(image.model.state_dict())
        strategy.start(grid, initial, num_rounds=settings.num_rounds or 0, evaluate_fn=evaluate)
        return Trajectory(
            spent=tuple(self._spent),
            values=tuple(self._values),
            total=self._spent[-1],
            is_smaller_better=metric.endswith("loss"),
        )

    def _train(self, message: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        config = message.content.config_records["config"]
        number, mu = int(config["server-round"]), float(config.get("proximal-mu", 0.0))  # type: ignore[arg-type] # Flower puts them there
        (arrays,) = message.content.array_records.values()
        model, data = self._image.model, self._examples(part)
        model.load_state_dict(arrays.to_torch_state_dict())
        model.train()
        parameters = [*model.parameters()]
        starts = [parameter.detach().clone() for parameter in parameters] if mu else []
        optimizer = torch.optim.SGD(parameters, lr=self._rate)
        num_examples, epochs = len(data[0]), self._algorithm.epochs
        for epoch in range(epochs):
            walk = torch.as_tensor(
                permutation(self._settings.seed, number * epochs + epoch, str(part), num_examples)
            )
            for positions in torch.split(walk, self._batch_size):
                optimizer.zero_grad()
                batch = tuple(column[positions] for column in data)
                loss, weight, _ = loss_sum(self._task, model, batch)
                (loss / weight).backward()  # type: ignore[no-untyped-call]
                if mu:  # the gradient of mu/2 times the squared distance from the start
                    _pull(parameters, starts, mu)
                optimizer.step()
        self._num_examples += num_examples * epochs
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": num_examples}),
            }
        )
        return Message(content, reply_to=message)

    def _examples(self, part: int) -> tuple[Tensor, ...]:
        """Return all examples of a device as one batch, from which its batches are cut."""
        if part not in self._data:
            examples = self._trainer.examples(self._identities.of(part))
            self._data[part] = tuple(batch_of(self._task, examples, range(len(examples))))
        return self._data[part]


@torch.no_grad()
def _pull(parameters: list[torch.nn.Parameter], starts: list[Tensor], mu: float) -> None:
    for parameter, start in zip(parameters, starts, strict=True):
        assert parameter.grad is not None
        parameter.grad.add_(parameter - start, alpha=mu)
