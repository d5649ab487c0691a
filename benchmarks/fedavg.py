"""Flower's FedAvg on the virtual clock of the simulator: local epochs of SGD, and a deadline.

Strategy, averaging and rounds are Flower's own (``flwr.serverapp.strategy.FedAvg``). A device does
one epoch, or several, over its examples by plain SGD, in micro-batches as large as the operator
sets or as fit in its memory (McMahan et al. 2017, algorithm 1), on the machine that
``simulation.fleet.virtual_hardware`` gives it. A device that would end after the deadline is late:
its update is lost, as it would be in Flower, and is not computed here. The round then lasts until
the deadline.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import permutation, split
from headwater.common.data.batches import batch_of
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.model.parameters import ModelImage, build_model
from headwater.common.settings.schema import Settings
from headwater.common.task import Examples, Task, loss_sum
from headwater.server.rounds.evaluation import open_test_examples
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

LATE = 1000  # above Flower's own error codes
TEST_MICRO_BATCH = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round, in virtual seconds."""

    accuracy: float
    seconds: float
    busy_seconds: tuple[float, ...]
    """How long each device worked, on an update that counted or one that was lost."""
    num_lost: int


class Federation:
    """The devices of a fleet, as a ClientApp that trains by local SGD."""

    def __init__(
        self,
        settings: Settings,
        *,
        learning_rate: float,
        deadline_seconds: float | None,
        num_epochs: int = 1,
    ) -> None:
        """Load the task; the fleet and its number of devices are those of the settings."""
        self._num_epochs = num_epochs
        assert settings.task is not None
        self.trainer = Trainer(settings.task, batch_norm=None, check_task=False)
        self.task: Task = self.trainer.task
        self.image: ModelImage = build_model(self.task, seed=settings.seed, batch_norm=None)
        self.finishes: list[float] = []
        self._settings = settings
        self._learning_rate = learning_rate
        self._deadline_seconds = deadline_seconds

    def app(self) -> ClientApp:
        """Return the ClientApp."""
        app = ClientApp()
        app.train()(self._train)
        return app

    def take_round(self, accuracy: float) -> Round:
        """Close a round: return what it came to, and begin to count anew."""
        finishes, deadline = tuple(self.finishes), self._deadline_seconds
        self.finishes.clear()
        num_lost = sum(deadline is not None and seconds > deadline for seconds in finishes)
        last = max(finishes)
        return Round(
            accuracy=accuracy,
            seconds=last if deadline is None else min(last, deadline),
            busy_seconds=tuple(s if deadline is None else min(s, deadline) for s in finishes),
            num_lost=num_lost,
        )

    def _train(self, message: Message, context: Context) -> Message:
        part = int(context.node_config["partition-id"])
        num_parts = int(context.node_config["num-partitions"])
        identity = device(self._settings, part, num_parts)
        examples = self.trainer.examples(identity)
        number = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type] # Flower puts it there
        seconds, batches = self.epoch(identity, len(examples), number)
        self.finishes.append(seconds)
        if self._deadline_seconds is not None and seconds > self._deadline_seconds:
            return Message(Error(code=LATE, reason=f"{seconds:.1f} s"), reply_to=message)
        (arrays,) = message.content.array_records.values()
        self._descend(arrays, examples, batches)
        content = RecordDict(
            {
                "arrays": ArrayRecord(self.image.model.state_dict()),
                "metrics": MetricRecord({"num-examples": len(examples)}),
            }
        )
        return Message(content, reply_to=message)

    def epoch(
        self, identity: Identity, num_examples: int, number: int
    ) -> tuple[float, list[tuple[int, ...]]]:
        """Return how long a device takes for its epochs, and their micro-batches."""
        machine = virtual_hardware(identity, self._settings, self.image.layout)
        largest = self._settings.plan.set_micro_batch_size
        fitting = machine.memory.fitting(largest)
        size = largest if fitting is None else max(min(largest, int(fitting)), 1)
        epochs = range(number * self._num_epochs, (number + 1) * self._num_epochs)
        walks = [
            permutation(self._settings.seed, epoch, identity.name, num_examples) for epoch in epochs
        ]
        batches = [batch for walk in walks for batch in split(walk.tolist(), size)]
        start = machine.clock.seconds()
        for batch in batches:
            machine.clock.worked(len(batch))
        return machine.clock.seconds() - start, batches

    def _descend(
        self, arrays: ArrayRecord, examples: Examples, batches: Iterable[tuple[int, ...]]
    ) -> None:
        """Take a step of SGD on the mean loss of each micro-batch."""
        model = self.image.model
        model.load_state_dict(arrays.to_torch_state_dict())
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self._learning_rate)
        for positions in batches:
            optimizer.zero_grad()
            loss, weight, _ = loss_sum(self.task, model, batch_of(self.task, examples, positions))
            (loss / weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def device(settings: Settings, part: int, num_parts: int) -> Identity:
    """Return a device with its part of the data, as a run of ours divides it."""
    rule = settings.partition.rule(seed=settings.seed)
    return Identity(name=str(part), data=None, part=part, num_parts=num_parts, rule=rule)


def epoch_seconds(settings: Settings) -> list[float]:
    """Return how long each device of the fleet takes for a round of FedAvg, the fastest first."""
    federation = Federation(settings, learning_rate=1.0, deadline_seconds=None)
    num_parts = settings.simulation.clients
    seconds = []
    for part in range(num_parts):
        identity = device(settings, part, num_parts)
        examples = federation.trainer.examples(identity)
        seconds.append(federation.epoch(identity, len(examples), 1)[0])
    return sorted(seconds)


def run_fedavg(
    settings: Settings,
    *,
    learning_rate: float,
    deadline_seconds: float | None,
    on_round: Callable[[Round], None],
    num_epochs: int = 1,
    invited: float = 1.0,
) -> None:
    """Run FedAvg for ``settings.rounds``, from the model that a run of ours starts from.

    ``invited`` is the part of the devices that Flower samples for each round.
    """
    torch.set_num_threads(settings.threads or 1)
    federation = Federation(
        settings,
        learning_rate=learning_rate,
        deadline_seconds=deadline_seconds,
        num_epochs=num_epochs,
    )
    task, image, num_rounds = federation.task, federation.image, settings.num_rounds
    assert num_rounds is not None
    test_examples = open_test_examples(task, image.model)
    assert test_examples is not None

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number == 0:
            return None
        image.model.load_state_dict(arrays.to_torch_state_dict())
        total = evaluate_sums(task, image.model, test_examples, TEST_MICRO_BATCH)
        on_round(federation.take_round(total.metric_sums["accuracy"] / total.weight))
        return None

    grid = InProcessGrid(federation.app(), settings)
    grid.enter_run(secrets.randbits(62))
    FedAvg(fraction_train=invited, fraction_evaluate=0.0).start(
        grid,
        ArrayRecord(image.model.state_dict()),
        num_rounds=num_rounds,
        evaluate_fn=evaluate,
    )
