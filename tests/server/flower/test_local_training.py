"""``ModelDifference`` and ``SumOfGradients(local_training=True)``: FedAvg by adding differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.flower.gradient_sum import GradientSum
from headwater.client.flower.model_difference import ModelDifference
from headwater.common.errors import (
    CountsDisagree,
    EmptyUpdate,
    NonFiniteUpdate,
    OtherParameters,
    OtherReplies,
)
from headwater.server.flower.sum_of_gradients import SumOfGradients
from tests.flower_apps import AppGrid, train_message

NUM_EPOCHS, RATE, NUM_ROUNDS = 3, 0.25, 3
SIZES = (5, 9, 12)  # of three clients
MODELS, DIFFERENCES, GRADIENTS = 0, 1, 2


def new_model() -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(4, 3)


def batches_of(client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a client's examples in batches of four, epoch after epoch."""
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(SIZES[client], 4, generator=generator)
    labels = torch.randint(0, 3, (SIZES[client],), generator=generator)
    for _ in range(NUM_EPOCHS):
        yield from zip(torch.split(inputs, 4), torch.split(labels, 4), strict=True)


def train(message: Message, context: Context) -> Message:
    """Train as a Flower app does, and reply in the way that the run's settings say."""
    kind, client = context.run_config["kind"], int(context.node_config["partition-id"])
    model = new_model()
    (arrays,) = message.content.array_records.values()
    model.load_state_dict(arrays.to_torch_state_dict())
    if kind == GRADIENTS:
        sums = GradientSum(model)
        for inputs, labels in batches_of(client):
            loss = functional.cross_entropy(model(inputs), labels, reduction="sum")
            sums.backward(loss, len(labels))
        return sums.reply(message)
    difference = ModelDifference(model) if kind == DIFFERENCES else None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, labels in batches_of(client):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if difference is not None:
            difference.count(len(labels))
    if difference is not None:
        return difference.reply(message)
    metrics = MetricRecord({"num-examples": SIZES[client]})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


def grid(kind: int) -> AppGrid:
    app = ClientApp()
    app.train()(train)
    return AppGrid(app, {"kind": kind}, len(SIZES))


def ended(strategy: FedAvg, kind: int) -> dict[str, Tensor]:
    start = ArrayRecord(new_model().state_dict())
    result = strategy.start(grid(kind), start, num_rounds=NUM_ROUNDS)
    return dict(result.arrays.to_torch_state_dict())


def locally(**how: Any) -> SumOfGradients:
    return SumOfGradients(new_model(), local_training=True, fraction_evaluate=0.0, **how)


def test_differences_at_the_default_rate_are_flower_s_fedavg() -> None:
    found = ended(locally(), DIFFERENCES)
    expected = ended(FedAvg(fraction_evaluate=0.0), MODELS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_another_server_optimizer_takes_the_difference_as_a_gradient() -> None:
    found = ended(locally(optimizer="adam"), DIFFERENCES)
    start = new_model().state_dict()
    for name, tensor in found.items():  # steps of Adam at 0.01, and not of FedAvg
        assert 0 < float((tensor - start[name]).abs().max()) <= NUM_ROUNDS * 0.01 * (1 + 1e-3)


@pytest.mark.parametrize("kind", [DIFFERENCES, GRADIENTS])
def test_a_reply_of_the_other_kind_ends_the_run_by_name(kind: int) -> None:
    strategy = locally() if kind == GRADIENTS else SumOfGradients(new_model(), fraction_evaluate=0)
    with pytest.raises(OtherReplies, match="use ModelDifference in the client with"):
        ended(strategy, kind)


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    model = new_model()
    message = train_message(model)
    difference = ModelDifference(model)
    with pytest.raises(EmptyUpdate, match=r"difference\.count"):
        difference.reply(message)
    with pytest.raises(CountsDisagree):
        difference.count(0)
    difference.count(4)
    with torch.no_grad():
        model.weight.fill_(torch.inf)
    with pytest.raises(NonFiniteUpdate):
        difference.reply(message)


def test_training_that_began_elsewhere_is_refused() -> None:
    model = new_model()
    message = train_message(model)
    with torch.no_grad():
        model.bias.add_(1.0)
    difference = ModelDifference(model)
    difference.count(4)
    with pytest.raises(OtherParameters):
        difference.reply(message)
