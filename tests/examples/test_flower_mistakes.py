"""What people leave as it was when they convert a Flower app: each mistake ends the run by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from torch import nn

from examples.flower_app.quickstart.digits_app import task
from headwater.client.flower.gradient_sum import GradientSum
from headwater.common.errors import (
    ConversionError,
    CountsDisagree,
    GradientsChanged,
    MeanLeftIn,
    OtherParameters,
    ParametersChanged,
    ReplyChanged,
    StrategyWrapped,
    UntaggedReply,
    WeightsSent,
)
from headwater.server.flower.sum_of_gradients import SumOfGradients
from tests.flower_apps import AppGrid

Train = Callable[[Message, Context, nn.Module, task.Loader], Message]


def own_reply(message: Message, arrays: object, count: int) -> Message:
    """Reply as a Flower app does."""
    content = {
        "arrays": ArrayRecord(arrays),  # type: ignore[call-overload]
        "metrics": MetricRecord({"num-examples": count}),
    }
    return Message(RecordDict(content), reply_to=message)


def summed(net: nn.Module, loader: task.Loader) -> GradientSum:
    return task.train(net, loader)[0]


def right(message: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    return summed(net, loader).reply(message, {"train_loss": 1.0})


def mean_left_in(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    criterion, sums = nn.CrossEntropyLoss(), GradientSum(net)
    for images, labels in loader:
        sums.backward(criterion(net(images), labels), len(labels))
    return sums.reply(m)


def batches_in_the_metrics(
    m: Message, context: Context, net: nn.Module, loader: task.Loader
) -> Message:
    return summed(net, loader).reply(m, {"num-examples": len(loader)})


def batches_counted(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    criterion, sums = nn.CrossEntropyLoss(reduction="sum"), GradientSum(net)
    for images, labels in loader:
        sums.backward(criterion(net(images), labels), 1)
    return sums.reply(m)


def epochs_in_the_metrics(
    m: Message, context: Context, net: nn.Module, loader: task.Loader
) -> Message:
    criterion, sums = nn.CrossEntropyLoss(reduction="sum"), GradientSum(net)
    for _ in range(3):
        for images, labels in loader:
            sums.backward(criterion(net(images), labels), len(labels))
    return sums.reply(m, {"num-examples": sums.weight // 3})


def state_dict_sent(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    summed(net, loader)
    return own_reply(m, net.state_dict(), len(loader))


def fedavg_left_as_it_was(
    m: Message, context: Context, net: nn.Module, loader: task.Loader
) -> Message:
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)
    for images, labels in loader:
        optimizer.zero_grad()
        criterion(net(images), labels).backward()
        optimizer.step()
    return own_reply(m, net.state_dict(), len(loader))


def sums_in_an_own_reply(
    m: Message, context: Context, net: nn.Module, loader: task.Loader
) -> Message:
    return own_reply(m, summed(net, loader).tensors(), len(loader))


def local_epochs(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    criterion, sums = nn.CrossEntropyLoss(reduction="sum"), GradientSum(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        for images, labels in loader:
            sums.backward(criterion(net(images), labels), len(labels))
            optimizer.step()
    return sums.reply(m)


def uncounted(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    criterion, sums = nn.CrossEntropyLoss(reduction="sum"), GradientSum(net)
    for images, labels in loader:
        criterion(net(images), labels).backward()
    return sums.reply(m)


def head_restored(m: Message, context: Context, net: nn.Module, loader: task.Loader) -> Message:
    head: nn.Module = net[2]  # type: ignore[index]
    head.load_state_dict(nn.Linear(32, 10).state_dict())
    return summed(net, loader).reply(m)


MISTAKES: dict[str, tuple[Train, type[ConversionError], str]] = {
    "a mean": (mean_left_in, MeanLeftIn, 'reduction="sum"'),
    "batches in the metrics": (batches_in_the_metrics, CountsDisagree, "the number of batches"),
    "batches counted": (batches_counted, CountsDisagree, "these are batches"),
    "epochs": (epochs_in_the_metrics, CountsDisagree, "over the examples 3 times"),
    "a state_dict": (state_dict_sent, WeightsSent, "sums.reply(message, metrics)"),
    "FedAvg's client": (fedavg_left_as_it_was, WeightsSent, "the model's parameters"),
    "an own reply": (sums_in_an_own_reply, UntaggedReply, "sums.reply(message, metrics)"),
    "local epochs": (local_epochs, ParametersChanged, "take optimizer.step()"),
    "an uncounted backward": (uncounted, GradientsChanged, "sums.backward(loss_sum, len(labels))"),
    "a restored head": (head_restored, OtherParameters, "requires_grad_(False)"),
}


def app_of(train: Train, mods: list[object] | None = None) -> ClientApp:
    app = ClientApp(mods=mods)  # type: ignore[arg-type]

    @app.train()
    def client(message: Message, context: Context) -> Message:
        net = task.Net()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        part, num_parts = (context.node_config[key] for key in ("partition-id", "num-partitions"))
        loader, _ = task.load_data(int(part), int(num_parts), 32)
        return train(message, context, net, loader)

    return app


def run(app: ClientApp, wrap: Callable[[Strategy], Strategy] = lambda it: it) -> None:
    torch.manual_seed(3)
    net = task.Net()
    strategy = wrap(SumOfGradients(net, fraction_evaluate=0.0))
    strategy.start(AppGrid(app), ArrayRecord(net.state_dict()), num_rounds=1)


def test_the_app_without_a_mistake_runs() -> None:
    run(app_of(right))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_first_round_with_its_name_the_node_and_the_line_to_write(
    mistake: str, caplog: pytest.LogCaptureFixture
) -> None:
    train, error, text = MISTAKES[mistake]
    with pytest.raises(error) as raised:
        run(app_of(train))
    assert "node 0, round 1" in str(raised.value)
    assert text in str(raised.value)
    assert f"left out: {error.__name__}: node 2, round 1" in caplog.text


@pytest.mark.parametrize(
    "mod", [LocalDpMod(1.0, 1.0, 1.0, 1e-5), fixedclipping_mod, adaptiveclipping_mod]
)
def test_a_mod_that_clips_a_reply_as_if_it_were_a_model_is_refused(mod: object) -> None:
    """The clipping mods need the norm that Flower's wrappers send, so a round sends it here."""
    net = task.Net()
    strategy, grid = SumOfGradients(net), AppGrid(app_of(right, [mod]))
    arrays = ArrayRecord(net.state_dict())
    (message, *_) = strategy.configure_train(1, arrays, config_with_norm(), grid)
    with pytest.raises(ReplyChanged, match=r"that sums\.reply tagged.*take Flower's mods"):
        strategy.aggregate_train(1, grid.send_and_receive([message]))


def config_with_norm() -> ConfigRecord:
    return ConfigRecord({"clipping_norm": 1.0})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda it: DifferentialPrivacyServerSideFixedClipping(it, 1.0, 1.0, 3),
        lambda it: DifferentialPrivacyClientSideFixedClipping(it, 1.0, 1.0, 3),
        lambda it: DifferentialPrivacyServerSideAdaptiveClipping(it, 0.1, 3),
        lambda it: DifferentialPrivacyClientSideAdaptiveClipping(it, 0.1, 3),
    ],
    ids=["server fixed", "client fixed", "server adaptive", "client adaptive"],
)
def test_flower_s_wrappers_for_differential_privacy_are_refused_before_anything_is_sent(
    wrap: Callable[[Strategy], Strategy],
) -> None:
    app = ClientApp()  # has no train function: a message would be an error
    with pytest.raises(StrategyWrapped, match=r"DifferentialPrivacy\w+ around it.*strategy\.start"):
        run(app, wrap)


def test_a_wrapper_is_refused_in_a_loop_of_the_user_s_own_too() -> None:
    net = task.Net()
    wrapper = DifferentialPrivacyServerSideFixedClipping(SumOfGradients(net), 1.0, 1.0, 3)
    with pytest.raises(StrategyWrapped):
        wrapper.configure_train(
            1, ArrayRecord(net.state_dict()), config_with_norm(), AppGrid(app_of(right))
        )
