"""The strategy, driven in this process by Flower's messages and the quickstart's clients."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional

from examples.flower_app.quickstart.digits_app import client_app, task
from headwater.client.flower.gradient_sum import GradientSum
from headwater.common.errors import (
    BatchDependentLayer,
    ConversionError,
    MeanLeftIn,
    ModelMismatch,
    SettingsError,
    StrategyWrapped,
)
from headwater.common.flower.gradient_reply import TAG
from headwater.common.flower.grid import CLIENT_APP_FAILED, ensure_message_id
from headwater.common.settings import schema as settings
from headwater.server.flower.sum_of_gradients import NUM_REFUSED, SumOfGradients
from tests.flower_apps import AppGrid, Spoil, metrics_of, tagged

EPSILON = 2.0**-23  # of float32
NUM_NODES, NUM_ROUNDS, LEARNING_RATE = 3, 4, 0.5
LOGGER = "flwr.headwater"


def new_grid(batch_size: int = 32) -> AppGrid:
    return AppGrid(client_app.app, {"batch-size": batch_size}, NUM_NODES)


def new_model() -> task.Net:
    torch.manual_seed(3)
    return task.Net()


def trained(
    grid: AppGrid, model: nn.Module | None = None, num_rounds: int = NUM_ROUNDS
) -> tuple[dict[str, Tensor], dict[int, MetricRecord]]:
    model = new_model() if model is None else model
    strategy = SumOfGradients(
        model, optimizer="sgd", learning_rate=LEARNING_RATE, fraction_evaluate=0.0
    )
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=num_rounds)
    return dict(result.arrays.to_torch_state_dict()), result.train_metrics_clientapp


def one_big_batch(rows: slice) -> tuple[dict[str, Tensor], float]:
    """Train in float64 on all rows at once; return the model and a bound on float32's error."""
    images, labels = (tensor[rows] for tensor in task.load_examples()[0].tensors)
    model = new_model().double()
    # Each of the n + 64 + 32 terms behind a coordinate's gradient rounds by EPSILON relative to the
    # largest; the parameter itself rounds once more per step.
    num_terms, bound = len(labels) + 64 + 32, 0.0
    for _ in range(NUM_ROUNDS):
        model.zero_grad()
        functional.cross_entropy(model(images.double()), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                mean = parameter.grad / len(labels)
                parameter.sub_(LEARNING_RATE * mean)
                largest = float(mean.abs().max())
                bound = max(bound, LEARNING_RATE * num_terms * EPSILON * largest)
    return dict(model.state_dict()), NUM_ROUNDS * (bound + EPSILON)


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def spoiled(change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    """Put a changed first weight matrix into a reply."""

    def spoil(content: RecordDict) -> None:
        arrays = content.array_records["arrays"]
        arrays["0.weight"] = Array(change(arrays["0.weight"].numpy().copy()))

    return spoil


def with_nan(values: np.ndarray) -> np.ndarray:
    values[0, 0] = np.nan
    return values


def with_tag(**fields: float | str) -> Spoil:
    def spoil(content: RecordDict) -> None:
        for key, value in fields.items():
            content.config_records[TAG][key.replace("_", "-")] = value

    return spoil


def without_bias(content: RecordDict) -> None:
    del content.array_records["arrays"]["0.bias"]


def without_tag(content: RecordDict) -> None:
    del content[TAG]


def with_a_buffer(content: RecordDict) -> None:
    content.array_records["arrays"]["running_mean"] = Array(np.zeros(3, dtype=np.float32))


def with_a_huge_shape_in_the_header(content: RecordDict) -> None:
    array = content.array_records["arrays"]["0.weight"]
    small, huge = b"(32, 64), }" + b" " * 8, b"(1099511627776,), }"
    assert small in array.data
    array.data = array.data.replace(small, huge)


def with_no_metrics(content: RecordDict) -> None:
    del content["metrics"]


def with_metric(key: str, value: float | list[float]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        metrics_of(content)[key] = value

    return spoil


BAD_REPLIES: dict[str, tuple[Spoil, str]] = {
    "another shape": (spoiled(lambda values: values[:, :-1].copy()), "CorruptUpdate"),
    "float64": (spoiled(lambda values: values.astype(np.float64)), "CorruptUpdate"),
    "a NaN": (tagged(spoiled(with_nan)), "NonFiniteUpdate"),
    "a missing parameter": (without_bias, "ModelMismatch"),
    "a buffer among the gradients": (with_a_buffer, "ModelMismatch"),
    "a header that promises 4 TiB": (with_a_huge_shape_in_the_header, "CorruptUpdate"),
    "no metrics": (with_no_metrics, "CorruptUpdate"),
    "a list for a metric": (with_metric("train_loss", [1.0, 2.0]), "CorruptUpdate"),
    "an infinite metric": (with_metric("train_loss", float("inf")), "CorruptUpdate"),
    "no tag": (without_tag, "UntaggedReply"),
    "arrays that changed": (spoiled(lambda values: values / 32), "ReplyChanged"),
    "another count": (with_metric("num-examples", 15), "CountsDisagree"),
    "another version": (with_tag(version=2), "ProtocolMismatch"),
    "another layout": (with_tag(layout="0" * 64), "ModelMismatch"),
    "a negative weight": (with_tag(weight=-5), "CountOutOfRange"),
    "half a weight": (with_tag(weight=2.5), "CountOutOfRange"),
    "a huge weight": (with_tag(weight=2**53 + 1), "CountOutOfRange"),
    "no passes": (with_tag(num_passes=0), "CountOutOfRange"),
    "text for a checksum": (with_tag(checksum="1"), "CorruptUpdate"),
}


@pytest.mark.parametrize("batch_size", [7, 32, 1000])
def test_rounds_of_the_app_equal_one_big_batch_within_float32_rounding(batch_size: int) -> None:
    federated, _ = trained(new_grid(batch_size))
    expected, bound = one_big_batch(slice(None))
    moved = distance(dict(new_model().double().state_dict()), expected)
    assert distance(federated, expected) <= bound < moved / 20


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_logged_counted_and_left_out(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, error = BAD_REPLIES[kind]
    grid = new_grid()
    grid.spoil = {2: spoil}
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        federated, metrics = trained(grid, num_rounds=1)
    honest = new_grid()
    honest.spoil = {2: without_bias}
    expected, _ = trained(honest, num_rounds=1)
    num_rows = len(task.load_examples()[0])
    num_left_out = len(range(2, num_rows, NUM_NODES))
    assert f"left out: {error}: node 2, round 1" in caplog.text
    assert distance(federated, expected) == 0
    assert metrics[1][NUM_REFUSED] == 1
    assert metrics[1]["num-examples"] == num_rows - num_left_out


def test_the_order_of_replies_does_not_change_a_bit() -> None:
    forwards, backwards = fixed_replies(), fixed_replies()
    backwards.is_reversed = True
    assert distance(trained(forwards)[0], trained(backwards)[0]) == 0


def fixed_replies(*, has_frozen: bool = False) -> AppGrid:
    """Return a grid whose clients always send the same gradients, of very different sizes.

    With ``has_frozen`` their model has a frozen part, whether or not it is in the arrays.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        generator = torch.Generator().manual_seed(context.node_id)
        arrays = message.content.array_records["arrays"]
        model = NetWithBuffers() if has_frozen else task.Net()
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        sums = GradientSum(model)
        loss = [
            (torch.randn(it.shape, generator=generator) * 10.0 ** (3 * context.node_id) * it).sum()
            for it in model.parameters()
            if it.requires_grad
        ]
        sums.backward(torch.stack(loss).sum(), 1 + context.node_id)
        return sums.reply(message)

    return AppGrid(app, num_nodes=NUM_NODES)


REASONS = {
    "a SuperNode's": "<class 'headwater.common.errors.MeanLeftIn'>:<'a mean. To fix it: sum'>",
    "Ray's": "ray::run()\n  File 'task.py'\nheadwater.common.errors.MeanLeftIn: a mean. To fix it: "
    "sum\n\nThe above exception\nException ClientAppException occurred.",
}


@pytest.mark.parametrize("engine", REASONS)
def test_an_error_of_ours_on_a_client_keeps_its_name_and_its_remedy(engine: str) -> None:
    with pytest.raises(MeanLeftIn) as raised:
        one_failing_round(REASONS[engine])
    assert str(raised.value) == "node 0, round 1: the client failed: a mean. To fix it: sum"


def test_another_error_on_every_client_leaves_the_model_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert one_failing_round("<class 'ZeroDivisionError'>:<'division by zero'>") == (None, None)
    assert "left out: UpdateRefused: node 0, round 1: the client failed: <class" in caplog.text


def one_failing_round(reason: str) -> tuple[ArrayRecord | None, MetricRecord | None]:
    """Run a round in which every client fails, as Flower says it."""
    strategy, grid = SumOfGradients(new_model()), new_grid()
    arrays = ArrayRecord(new_model().state_dict())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    for message in messages:
        ensure_message_id(message)
    error = Error(code=CLIENT_APP_FAILED, reason=reason)
    ordered = sorted(messages, key=lambda message: message.metadata.dst_node_id)
    return strategy.aggregate_train(1, [Message(error, reply_to=it) for it in ordered])


def test_an_app_whose_replies_are_all_wrong_ends_in_its_first_round_by_name() -> None:
    grid = new_grid()
    grid.spoil = dict.fromkeys(range(NUM_NODES), without_tag)
    with pytest.raises(ConversionError, match=r"node 0, round 1.*To fix it: .*sums\.reply"):
        trained(grid)


def test_the_model_stays_when_every_reply_of_a_later_round_is_bad() -> None:
    grid = new_grid()
    model = new_model()
    strategy = SumOfGradients(model, fraction_evaluate=0.0)
    first, _ = one_round(strategy, grid, 1, ArrayRecord(model.state_dict()))
    assert first is not None
    grid.spoil = dict.fromkeys(range(NUM_NODES), without_tag)
    assert one_round(strategy, grid, 2, first) == (None, None)


def one_round(
    strategy: SumOfGradients, grid: AppGrid, number: int, arrays: ArrayRecord
) -> tuple[ArrayRecord | None, MetricRecord | None]:
    messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
    return strategy.aggregate_train(number, grid.send_and_receive(messages))


def test_a_metric_that_not_every_reply_has_is_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = new_grid()
    grid.spoil = {0: with_metric("battery", 0.5)}
    _, metrics = trained(grid, num_rounds=1)
    assert set(metrics[1]) == {"train_loss", "num-examples", NUM_REFUSED}
    assert "battery is left out" in caplog.text


def test_a_client_that_could_not_see_whether_its_loss_is_a_sum_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    grid = new_grid()
    grid.spoil = dict.fromkeys(range(NUM_NODES), with_tag(is_reduction_seen=False))
    assert trained(grid, num_rounds=2)[1][2][NUM_REFUSED] == 0
    assert caplog.text.count("a mean left in would go unnoticed") == 1


def test_the_true_count_may_stand_among_the_metrics() -> None:
    grid = new_grid()
    grid.spoil = {
        0: lambda content: with_metric("num-examples", weight_of(content))(content),
    }
    assert trained(grid, num_rounds=1)[1][1][NUM_REFUSED] == 0


def weight_of(content: RecordDict) -> int:
    weight = content.config_records[TAG]["weight"]
    assert isinstance(weight, int)
    return weight


class NetWithBuffers(task.Net):
    """The same net, with a frozen parameter, a whole number and a constant beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("version", torch.tensor(7))
        self.register_buffer("constant", torch.full((2, 2), 0.25))


def test_frozen_parameters_and_buffers_pass_through_unchanged() -> None:
    model = NetWithBuffers()
    strategy = SumOfGradients(model, optimizer="adamw", learning_rate=0.1)
    before = copy.deepcopy(model.state_dict())
    grid = fixed_replies(has_frozen=True)
    arrays = ArrayRecord(model.state_dict())
    after, _ = one_round(strategy, grid, 1, arrays)
    assert after is not None
    state = after.to_torch_state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[n], before[n]) for n in ("frozen", "version", "constant"))
    assert not torch.equal(state["0.weight"], before["0.weight"])


def test_a_run_that_starts_from_the_trained_parameters_sends_them_alone() -> None:
    model = NetWithBuffers()
    strategy = SumOfGradients(model, optimizer="adamw", learning_rate=0.1)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    whole = SumOfGradients(copy.deepcopy(model), optimizer="adamw", learning_rate=0.1)
    start = ArrayRecord(model.state_dict())
    alone, _ = one_round(strategy, fixed_replies(has_frozen=True), 1, ArrayRecord(trained))
    expected, _ = one_round(whole, fixed_replies(has_frozen=True), 1, start)
    assert alone is not None
    assert expected is not None
    assert alone.keys() == trained.keys()
    state = expected.to_torch_state_dict()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in alone.to_torch_state_dict().items()
    )


def test_arrays_of_another_model_are_refused_by_name() -> None:
    strategy = SumOfGradients(new_model())
    other = ArrayRecord(nn.Linear(2, 2).state_dict())
    with pytest.raises(
        ModelMismatch, match=r"has shape \(2, 2\) in the arrays|is not in the arrays"
    ):
        strategy.configure_train(1, other, ConfigRecord(), new_grid())


def test_a_model_with_batch_norm_is_refused_before_the_first_round() -> None:
    with pytest.raises(BatchDependentLayer):
        SumOfGradients(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_a_rate_that_follows_a_batch_is_refused_where_no_batch_is_planned() -> None:
    with pytest.raises(SettingsError, match="batch_scaling"):
        SumOfGradients(new_model(), schedule=settings.ScheduleSettings(batch_scaling="sqrt"))


def test_adam_is_the_default_and_the_start_says_that_fedavg_s_rate_does_not_carry_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        SumOfGradients(new_model()).summary()
    assert "one step of adam a round, at the learning rate 0.01" in caplog.text
    assert "FedAvg's clients does not carry over" in caplog.text
    assert "Try adam at 0.01" in caplog.text


def test_a_rate_in_the_clients_config_is_said_to_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy, config = SumOfGradients(new_model()), ConfigRecord({"lr": 0.1})
    arrays = ArrayRecord(new_model().state_dict())
    for number in (1, 2):
        strategy.configure_train(number, arrays, config, new_grid())
    assert caplog.text.count("lr = 0.1, which changes nothing") == 1


def test_arrays_that_something_changed_between_rounds_are_refused() -> None:
    grid, model = new_grid(), new_model()
    strategy = SumOfGradients(model)
    first, _ = one_round(strategy, grid, 1, ArrayRecord(model.state_dict()))
    assert first is not None
    noisy = {name: it + 0.01 for name, it in first.to_torch_state_dict().items()}
    with pytest.raises(StrategyWrapped, match="round 2: expected the arrays"):
        one_round(strategy, grid, 2, ArrayRecord(noisy))


def test_arrays_that_were_copied_between_rounds_or_start_a_new_run_are_taken() -> None:
    grid, model = new_grid(), new_model()
    strategy = SumOfGradients(model)
    first, _ = one_round(strategy, grid, 1, ArrayRecord(model.state_dict()))
    assert first is not None
    second, _ = one_round(strategy, grid, 2, ArrayRecord(first.to_torch_state_dict()))
    assert second is not None
    third, _ = one_round(strategy, grid, 1, ArrayRecord(new_model().state_dict()))
    assert third is not None


class Spare(nn.Module):
    """A network with a layer that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)


def test_a_layer_that_no_loss_uses_stays_as_in_plain_pytorch() -> None:
    torch.manual_seed(0)
    start, inputs = Spare(), torch.randn(6, 3)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = Spare()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        sums, own = GradientSum(model), inputs[2 * context.node_id :][:2]
        sums.backward(model.used(own).square().sum(), 2)
        return sums.reply(message)

    strategy = SumOfGradients(
        copy.deepcopy(start), optimizer="adamw", learning_rate=0.1, fraction_evaluate=0.0
    )
    result = strategy.start(AppGrid(app), ArrayRecord(start.state_dict()), num_rounds=3)
    found = result.arrays.to_torch_state_dict()

    optimizer = torch.optim.AdamW(start.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (start.used(inputs).square().sum() / 6).backward()
        optimizer.step()
    for name, expected in start.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)
    assert torch.equal(found["spare.weight"], start.spare.weight)


def test_an_optimizer_that_keeps_other_weights_is_refused(tmp_path: Path) -> None:
    """Flower's strategies have no moment at which the kept weights could be put in."""
    path = tmp_path / "averaged.py"
    path.write_text(
        "import torch\n"
        "class Averaged(torch.optim.SGD):\n"
        "    def train(self): pass\n"
        "    def eval(self): pass\n"
    )
    with pytest.raises(SettingsError, match="keeps others") as refused:
        SumOfGradients(nn.Linear(2, 1), optimizer=f"{path}:Averaged", learning_rate=0.1)
    assert "headwater-server" in refused.value.remedy
