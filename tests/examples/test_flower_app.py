"""The plain Flower app that sums gradients, driven in this process through its own messages."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn import functional

from examples.flower_app.digits_app import client_app, server_app, task
from headwater.client.flower.gradient_sum import GradientSum
from headwater.common.errors import BatchDependentLayer, ModelMismatch, SettingsError, TaskError
from headwater.common.flower.grid import HeadwaterGrid, ensure_message_id
from headwater.common.settings import schema as settings
from headwater.server.flower.sum_of_gradients import NUM_REFUSED, SumOfGradients

EPSILON = 2.0**-23  # of float32
NUM_NODES, NUM_ROUNDS, LEARNING_RATE = 3, 4, 0.5

Spoil = Callable[[RecordDict], None]


class AppGrid(HeadwaterGrid):
    """Runs a ClientApp on a few nodes, as any app's messages are; nothing of ours is in them."""

    def __init__(self, app: ClientApp, run_config: dict[str, float | int]) -> None:
        super().__init__()
        self._app = app
        self._run_config = run_config
        self._waiting: dict[str, Message] = {}
        self.spoil: dict[int, Spoil] = {}
        self.is_reversed = False
        self.enter_run(1)

    def num_bytes(self) -> tuple[int, int]:
        return 0, 0

    def get_node_ids(self) -> Iterable[int]:
        return range(NUM_NODES)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        ordered = sorted(
            messages, key=lambda message: message.metadata.dst_node_id, reverse=self.is_reversed
        )
        for message in ordered:
            ensure_message_id(message)
            node_id = message.metadata.dst_node_id
            reply = self._app(message, self.context(node_id))
            if message.metadata.message_type == "train" and node_id in self.spoil:
                self.spoil[node_id](reply.content)
            yield reply

    def context(self, node_id: int) -> Context:
        return Context(
            run_id=1,
            node_id=node_id,
            node_config={"partition-id": node_id, "num-partitions": NUM_NODES},
            state=RecordDict(),
            run_config=dict(self._run_config),
        )


def new_grid(batch_size: int = 32) -> AppGrid:
    run_config: dict[str, float | int] = {
        "num-server-rounds": NUM_ROUNDS,
        "batch-size": batch_size,
        "learning-rate": 0.02,
    }
    return AppGrid(client_app.app, run_config)


def new_model() -> task.Net:
    torch.manual_seed(3)
    return task.Net()


def trained(
    grid: AppGrid, model: nn.Module | None = None, num_rounds: int = NUM_ROUNDS
) -> tuple[dict[str, Tensor], dict[int, MetricRecord]]:
    model = new_model() if model is None else model
    strategy = SumOfGradients(model, learning_rate=LEARNING_RATE, fraction_evaluate=0.0)
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


def with_weight(weight: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content.metric_records["metrics"]["num-examples"] = weight

    return spoil


def without_bias(content: RecordDict) -> None:
    del content.array_records["arrays"]["0.bias"]


def with_a_buffer(content: RecordDict) -> None:
    content.array_records["arrays"]["running_mean"] = Array(np.zeros(3, dtype=np.float32))


def with_a_huge_shape_in_the_header(content: RecordDict) -> None:
    array = content.array_records["arrays"]["0.weight"]
    small, huge = b"(32, 64), }" + b" " * 8, b"(1099511627776,), }"
    assert small in array.data
    array.data = array.data.replace(small, huge)


def with_no_metrics(content: RecordDict) -> None:
    del content["metrics"]


def with_a_list_metric(content: RecordDict) -> None:
    content.metric_records["metrics"]["train_loss"] = [1.0, 2.0]


BAD_REPLIES: dict[str, tuple[Spoil, str]] = {
    "another shape": (spoiled(lambda values: values[:, :-1].copy()), "CorruptUpdate"),
    "float64": (spoiled(lambda values: values.astype(np.float64)), "CorruptUpdate"),
    "a NaN": (spoiled(with_nan), "NonFiniteUpdate"),
    "a missing parameter": (without_bias, "CorruptUpdate"),
    "a buffer among the gradients": (with_a_buffer, "CorruptUpdate"),
    "a header that promises 4 TiB": (with_a_huge_shape_in_the_header, "CorruptUpdate"),
    "no metrics": (with_no_metrics, "CorruptUpdate"),
    "a list for a metric": (with_a_list_metric, "CorruptUpdate"),
    "weight 0": (with_weight(0), "CountOutOfRange"),
    "a negative weight": (with_weight(-5), "CountOutOfRange"),
    "half a weight": (with_weight(2.5), "CountOutOfRange"),
    "a huge weight": (with_weight(1e300), "CountOutOfRange"),
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
    with caplog.at_level(logging.WARNING, logger="headwater.server.flower.sum_of_gradients"):
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


def fixed_replies() -> AppGrid:
    """Return a grid whose clients always send the same gradients, of very different sizes."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        generator = torch.Generator().manual_seed(context.node_id)
        gradients = {
            name: torch.randn(parameter.shape, generator=generator) * 10.0 ** (3 * context.node_id)
            for name, parameter in new_model().named_parameters()
        }
        metrics = MetricRecord({"num-examples": 1 + context.node_id})
        content = RecordDict({"arrays": ArrayRecord(gradients), "metrics": metrics})
        return Message(content, reply_to=message)

    return AppGrid(app, {})


def test_the_model_stays_when_every_reply_is_bad() -> None:
    grid = new_grid()
    grid.spoil = dict.fromkeys(range(NUM_NODES), without_bias)
    strategy = SumOfGradients(new_model(), fraction_evaluate=0.0)
    arrays = ArrayRecord(new_model().state_dict())
    replies = grid.send_and_receive(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    assert strategy.aggregate_train(1, replies) == (None, None)


def test_a_metric_that_not_every_reply_has_is_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def extra(content: RecordDict) -> None:
        content.metric_records["metrics"]["battery"] = 0.5

    grid = new_grid()
    grid.spoil = {0: extra}
    _, metrics = trained(grid, num_rounds=1)
    assert set(metrics[1]) == {"train_loss", "num-examples", NUM_REFUSED}
    assert "battery is left out" in caplog.text


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
    grid = fixed_replies()
    arrays = ArrayRecord(model.state_dict())
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    after, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert after is not None
    state = after.to_torch_state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[n], before[n]) for n in ("frozen", "version", "constant"))
    assert not torch.equal(state["0.weight"], before["0.weight"])


def test_arrays_of_another_model_are_refused_by_name() -> None:
    strategy = SumOfGradients(new_model())
    other = ArrayRecord(nn.Linear(2, 2).state_dict())
    with pytest.raises(ModelMismatch, match="do not fit"):
        strategy.configure_train(1, other, ConfigRecord(), new_grid())


def test_a_model_with_batch_norm_is_refused_before_the_first_round() -> None:
    with pytest.raises(BatchDependentLayer):
        SumOfGradients(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_the_server_app_trains_and_saves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = new_grid()
    torch.manual_seed(3)
    server_app.app(grid, grid.context(0))
    model = task.Net()
    model.load_state_dict(torch.load("final_model.pt"))
    _, test_all = task.load_examples()
    images, labels = test_all.tensors
    with torch.no_grad():
        assert functional.cross_entropy(model(images), labels) < functional.cross_entropy(
            new_model()(images), labels
        )


def test_gradient_sum_is_the_sum_over_micro_batches() -> None:
    model, inputs = nn.Linear(4, 1), torch.randn(5, 4)
    sums = GradientSum(model)
    for part in torch.split(inputs, 2):
        model(part).sum().backward()
    assert sums.tensors()["bias"].item() == 5
    torch.testing.assert_close(sums.tensors()["weight"], inputs.sum(0, keepdim=True))


def test_gradient_sum_notices_an_optimizer_that_still_steps() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sums = GradientSum(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(TaskError, match="parameters changed"):
        sums.tensors()


def test_gradient_sum_notices_gradients_that_were_zeroed() -> None:
    model = nn.Linear(4, 1)
    sums = GradientSum(model)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(TaskError):
        sums.tensors()


def test_a_rate_that_follows_a_batch_is_refused_where_no_batch_is_planned() -> None:
    with pytest.raises(SettingsError, match="batch_scaling"):
        SumOfGradients(new_model(), schedule=settings.ScheduleSettings(batch_scaling="sqrt"))
