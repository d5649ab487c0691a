"""A training loop that sums gradients: what it counts, and what it refuses."""

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.flower.gradient_sum import GradientSum
from headwater.common.errors import (
    CountsDisagree,
    EmptyUpdate,
    GradientsChanged,
    MeanLeftIn,
    OtherParameters,
    ParametersChanged,
)
from headwater.common.flower.gradient_reply import read_tag
from tests.flower_apps import train_message


class Loop:
    """A model, its sums, and five examples in batches of 2, 2 and 1."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.message = train_message(self.model)
        self.inputs, self.labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        self.sums = GradientSum(self.model)

    def batches(self, size: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(torch.split(self.inputs, size), torch.split(self.labels, size), strict=True)

    def loss_sum(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.model(inputs), labels, reduction="sum")

    def run(self, size: int = 2, factor: float = 1.0) -> None:
        for inputs, labels in self.batches(size):
            self.sums.backward(factor * self.loss_sum(inputs, labels), len(labels))


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_the_sum_is_that_of_all_examples_at_once(loop: Loop) -> None:
    loop.run()
    whole = Loop()
    whole.run(size=5)
    assert loop.sums.weight == whole.sums.weight == 5
    for name, tensor in loop.sums.tensors().items():
        torch.testing.assert_close(tensor, whole.sums.tensors()[name])


def test_a_reply_has_the_sums_and_their_weight_layout_and_passes_in_its_tag(loop: Loop) -> None:
    loop.run()
    content = loop.sums.reply(loop.message, {"train_loss": 0.5}).content
    tag = read_tag(content, "a client")
    assert tag is not None
    assert (tag.weight, tag.num_passes, tag.is_reduction_seen) == (5, 3, True)
    sent = content.array_records["arrays"].to_torch_state_dict()
    assert all(torch.equal(sent[name], it) for name, it in loop.sums.tensors().items())
    assert dict(content.metric_records["metrics"]) == {"train_loss": 0.5}


def test_the_weight_may_be_tokens(loop: Loop) -> None:
    loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), torch.tensor(17))  # type: ignore[arg-type]
    assert loop.sums.weight == 17


def test_a_mean_left_in_is_refused_in_the_first_batch_with_the_line_to_write(loop: Loop) -> None:
    loss = functional.cross_entropy(loop.model(loop.inputs), loop.labels)
    with pytest.raises(MeanLeftIn, match=r"n = 5 .* about 5 times.*To fix it.*reduction=.sum."):
        loop.sums.backward(loss, len(loop.labels))


@pytest.mark.parametrize(("power", "verb"), [(-1, "divided"), (1, "multiplied")])
@pytest.mark.parametrize("size", [3, 5])
def test_a_factor_that_follows_the_batch_is_refused(
    loop: Loop, power: int, verb: str, size: int
) -> None:
    for inputs, labels in loop.batches(size):
        loop.sums.backward(loop.loss_sum(inputs, labels) * len(labels) ** power, len(labels))
    with pytest.raises(MeanLeftIn, match=f"{verb} by the n of its batch"):
        loop.sums.tensors()


def test_a_half_in_batches_of_two_may_be_half_a_squared_error(loop: Loop) -> None:
    loop.sums.backward(0.5 * (loop.model(loop.inputs[:2]) ** 2).sum(), 2)
    loop.sums.tensors()


def test_a_loss_divided_by_the_number_of_batches_is_refused(loop: Loop) -> None:
    loop.run(factor=1 / 3)
    with pytest.raises(MeanLeftIn, match="the number of batches, 3"):
        loop.sums.tensors()


def test_a_constant_factor_is_the_user_s_own(loop: Loop) -> None:
    loop.run(factor=0.5)
    loop.sums.tensors()


@pytest.mark.parametrize("n", [-1, 2.0, None])
def test_n_must_be_a_count(loop: Loop, n: object) -> None:
    with pytest.raises(CountsDisagree, match="whole number"):
        loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), n)  # type: ignore[arg-type]


def test_a_batch_whose_targets_are_all_ignored_adds_its_gradient_and_no_weight(loop: Loop) -> None:
    before = loop.sums.weight
    loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels) * 0.5, 0)
    assert loop.sums.weight == before
    assert any(tensor.any() for tensor in loop.sums.tensors().values())


def test_batches_counted_instead_of_examples_are_refused(loop: Loop) -> None:
    for inputs, labels in loop.batches():
        loop.sums.backward(loop.loss_sum(inputs, labels), 1)
    with pytest.raises(CountsDisagree, match="1 in each of 3 calls"):
        loop.sums.reply(loop.message)


class LastStep(nn.Module):
    """One class for a sequence [steps, features], or for each of [steps, batch, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.top = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, steps: Tensor) -> dict[str, Tensor]:
        return {"logits": self.top(self.cell(steps)[0][-1])}


@pytest.mark.parametrize("shape", [(7, 4), (7, 1, 4)])
def test_one_sequence_at_a_time_counts_as_one_example(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = LastStep()
    message = train_message(model)
    sums = GradientSum(model)
    for label in (0, 1, 2):
        logits = model(torch.randn(shape))["logits"]
        target = torch.full(logits.shape[:-1], label)
        sums.backward(functional.cross_entropy(logits, target, reduction="sum"), 1)
    assert sums.reply(message).content


def test_steps_that_are_counted_as_one_example_are_refused_with_what_to_count() -> None:
    """A class for each step looks like a class for each example of a batch."""
    model = nn.Linear(4, 3)
    message = train_message(model)
    sums = GradientSum(model)
    loss = functional.cross_entropy(
        model(torch.randn(7, 4)), torch.zeros(7).long(), reduction="sum"
    )
    sums.backward(loss, 1)
    with pytest.raises(CountsDisagree, match=r"up to 7 rows .* steps of one sequence, count"):
        sums.reply(message)


def test_batches_of_one_example_count_as_such_beside_larger_batches_of_a_test(loop: Loop) -> None:
    loop.run(size=1)
    with torch.no_grad():
        loop.model(loop.inputs)
    assert loop.sums.reply(loop.message).content


def test_an_optimizer_that_still_steps_is_refused_in_the_next_batch(loop: Loop) -> None:
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), 5)
    optimizer.step()
    with pytest.raises(ParametersChanged, match=r"To fix it: take optimizer\.step"):
        loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), 5)


def test_one_step_after_the_last_batch_is_refused_too(loop: Loop) -> None:
    optimizer = torch.optim.Adam(loop.model.parameters())
    loop.run()
    optimizer.step()
    with pytest.raises(ParametersChanged):
        loop.sums.reply(loop.message)


@pytest.mark.parametrize("what", ["backward", "zeroed", "replaced", "clipped"])
def test_gradients_that_something_else_wrote_are_refused(loop: Loop, what: str) -> None:
    loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), 5)
    if what == "backward":
        loop.loss_sum(loop.inputs, loop.labels).backward()  # type: ignore[no-untyped-call]
    elif what == "clipped":
        nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    else:
        loop.model.zero_grad(set_to_none=what == "replaced")
    with pytest.raises(GradientsChanged):
        loop.sums.backward(loop.loss_sum(loop.inputs, loop.labels), 5)


def test_a_head_restored_before_the_sums_is_refused_by_name(loop: Loop) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    message = train_message(net)
    net[1].load_state_dict(nn.Linear(3, 3).state_dict())
    sums = GradientSum(net)
    sums.backward(functional.cross_entropy(net(loop.inputs), loop.labels, reduction="sum"), 5)
    with pytest.raises(OtherParameters, match=r"values of 1\.bias, 1\.weight"):
        sums.reply(message)


def test_a_head_that_is_frozen_may_be_the_client_s_own(loop: Loop) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).requires_grad_(False))
    message = train_message(net)
    net[1].load_state_dict(nn.Linear(3, 3).state_dict())
    sums = GradientSum(net)
    sums.backward(functional.cross_entropy(net(loop.inputs), loop.labels, reduction="sum"), 5)
    assert set(sums.reply(message).content.array_records["arrays"]) == {"0.weight", "0.bias"}


def test_parameters_written_past_autograd_are_refused(loop: Loop) -> None:
    loop.run()
    loop.model.weight.data.add_(1)
    with pytest.raises(OtherParameters, match="weight"):
        loop.sums.reply(loop.message)


def test_a_message_of_another_model_is_refused(loop: Loop) -> None:
    loop.run()
    with pytest.raises(OtherParameters, match="found none"):
        loop.sums.reply(train_message(nn.Sequential(nn.Linear(4, 3))))


def test_a_client_without_examples_has_nothing_to_send(loop: Loop) -> None:
    with pytest.raises(EmptyUpdate, match="never called"):
        loop.sums.reply(loop.message)


def test_a_loss_that_the_graph_does_not_explain_is_said_once(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flwr.headwater"):
        for inputs, _ in loop.batches():
            loop.sums.backward(torch.linalg.norm(loop.model(inputs)), len(inputs))
    assert caplog.text.count("cannot see") == 1
    tag = read_tag(loop.sums.reply(loop.message).content, "a client")
    assert tag is not None
    assert not tag.is_reduction_seen


def test_a_model_may_be_used_again_in_the_next_round(loop: Loop) -> None:
    loop.run()
    first = loop.sums.reply(loop.message).content.array_records["arrays"].to_torch_state_dict()
    assert not loop.model._forward_hooks
    loop.sums = GradientSum(loop.model)
    loop.run()
    again = loop.sums.tensors()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_one_object_serves_many_rounds_and_each_reply_has_that_round_s_gradients() -> None:
    loop = Loop()
    for number in range(3):
        with torch.no_grad():  # as an app writes what the server sent, in place
            for parameter in loop.model.parameters():
                parameter.fill_(0.1 * number)
        message = train_message(loop.model)
        loop.run()
        content = loop.sums.reply(message).content
        tag = read_tag(content, "a client")
        assert tag is not None
        assert (tag.weight, tag.num_passes) == (5, 3)
        plain = copy.deepcopy(loop.model)
        plain.zero_grad(set_to_none=True)
        functional.cross_entropy(plain(loop.inputs), loop.labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
        sent = content.array_records["arrays"].to_torch_state_dict()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(sent[name], parameter.grad, rtol=0, atol=1e-5)


def test_parameters_loaded_in_the_middle_of_a_sum_are_refused_with_where_to_load_them() -> None:
    loop = Loop()
    loop.run()
    loop.model.load_state_dict({name: 2 * t for name, t in loop.model.state_dict().items()})
    with pytest.raises(ParametersChanged) as caught:
        loop.run()
    assert "after reply()" in caught.value.remedy
