"""Large layers add their gradients in place, and no gradient of the whole weight is made.

An embedding adds rows, with the same bits; a linear layer's product adds up to the same sum.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call, grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.client.memory import in_place_gradients
from headwater.client.memory.activation_checkpointing import Recomputed, switch_on
from headwater.client.memory.in_place_gradients import add_in_place
from headwater.common.model.chunked_cross_entropy import adding_in_place

WORDS = torch.tensor([[3, 3, 1], [0, 3, 6]])


@pytest.fixture(autouse=True)
def _all_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_gradients, "LEAST_TABLE_BYTES", 0)


def table(padding: int | None = None) -> nn.Embedding:
    torch.manual_seed(2)
    one = nn.Embedding(7, 4, padding_idx=padding)
    one.weight.grad = torch.randn(7, 4)  # of the micro-batches before
    return one


def accumulator_of(weight: Tensor) -> Node:
    """The node of the graph that adds a leaf's gradient; it lives as long as it is held."""
    view = weight.expand_as(weight)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def loss_of(module: nn.Module) -> Tensor:
    found: Tensor = module(WORDS).pow(3).sum()
    return found


@pytest.mark.parametrize("padding", [None, 3, 5])
def test_the_sum_has_the_same_bits_and_no_gradient_of_the_whole_table(padding: int | None) -> None:
    plain, rows = table(padding), table(padding)
    whole: list[Tensor | None] = []
    loss_of(plain).backward()  # type: ignore[no-untyped-call]
    add_in_place(rows)
    adder = accumulator_of(rows.weight)
    adder.register_prehook(lambda grads: whole.extend(grads))
    with adding_in_place():
        loss_of(rows).backward()  # type: ignore[no-untyped-call]
    assert plain.weight.grad is not None
    assert rows.weight.grad is not None
    assert torch.equal(rows.weight.grad, plain.weight.grad)
    assert whole == [None]


class LargestMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the elements of the largest tensor that an operation returns."""

    num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and func is not torch.ops.aten.detach.default:
            is_new = not func._schema.is_mutable and not func.is_view
            self.num_elements = max(self.num_elements, found.numel() if is_new else 0)
        return found


@pytest.mark.parametrize("extent", [Recomputed.ALL, Recomputed.CHEAP])
def test_a_table_whose_block_is_computed_again_has_no_whole_gradient(extent: Recomputed) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    for one in (plain, model):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
    loss_of(plain).backward()  # type: ignore[no-untyped-call]
    add_in_place(model)
    assert switch_on(model, dict.fromkeys(range(2), extent))
    loss = loss_of(model)
    with adding_in_place(), LargestMade() as made:  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
    assert made.num_elements < 1000
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_a_hook_on_the_table_changes_its_gradient() -> None:
    """Such as one that trains the rows of new words alone."""
    plain, rows = table(), table()
    add_in_place(rows)
    for one in (plain, rows):
        one.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
        with adding_in_place():
            loss_of(one).backward()  # type: ignore[no-untyped-call]
    assert rows.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(rows.weight.grad, plain.weight.grad)


def test_a_hook_after_the_addition_is_called() -> None:
    one = table()
    called: list[Tensor] = []
    one.weight.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    add_in_place(one)
    with adding_in_place():
        loss_of(one).backward()  # type: ignore[no-untyped-call]
    assert len(called) == 1


def test_the_words_may_be_given_by_name() -> None:
    one = table()
    expected = one(input=WORDS)
    add_in_place(one)
    assert torch.equal(one(input=WORDS), expected)


def test_elsewhere_the_gradient_is_returned() -> None:
    one = table()
    (expected,) = torch.autograd.grad(loss_of(one), one.weight)
    add_in_place(one)
    (found,) = torch.autograd.grad(loss_of(one), one.weight)
    assert torch.equal(found, expected)


def test_gradients_of_many_devices_at_once_are_the_same() -> None:
    one = table()
    weight_VD = one.weight.detach()

    def loss(weight_VD: Tensor, words: Tensor) -> Tensor:
        found: Tensor = functional_call(one, {"weight": weight_VD}, (words,))
        return found.pow(3).sum()

    expected = vmap(grad(loss), in_dims=(None, 0))(weight_VD, WORDS)
    add_in_place(one)
    assert torch.equal(vmap(grad(loss), in_dims=(None, 0))(weight_VD, WORDS), expected)


@pytest.mark.parametrize(
    "one",
    [
        nn.Embedding(7, 4, max_norm=1.0),
        nn.Embedding(7, 4, scale_grad_by_freq=True),
        nn.Embedding(7, 4, sparse=True),
        nn.Linear(7, 4),
    ],
)
def test_other_tables_are_left_as_they_are(one: nn.Module) -> None:
    add_in_place(one)
    assert "forward" not in vars(one)


def test_a_deep_copy_adds_to_its_own_gradient() -> None:
    one = table()
    add_in_place(one)
    assert one.weight.grad is not None
    before = one.weight.grad.clone()
    two = copy.deepcopy(one)
    two.weight.grad = torch.zeros(7, 4)
    with adding_in_place():
        loss_of(two).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(one.weight.grad, before)
    assert two.weight.grad.any()


def linear(*, has_bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(3)
    one = nn.Linear(3, 5, bias=has_bias, dtype=dtype)
    for parameter in one.parameters():
        parameter.grad = torch.randn_like(parameter)
    return one


@pytest.fixture
def _all_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_gradients, "LEAST_LINEAR_BYTES", 0)


@pytest.mark.usefixtures("_all_weights_are_large")
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (0, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_linear_layer_adds_the_gradient_that_torch_adds(
    shape: tuple[int, ...], has_bias: bool, is_leaf: bool
) -> None:
    plain, mine = linear(has_bias=has_bias), linear(has_bias=has_bias)
    add_in_place(mine)
    torch.manual_seed(4)
    data = torch.randn(shape, dtype=torch.float64)
    of_inputs: list[Tensor | None] = []
    whole: list[Tensor | None] = []
    adder = accumulator_of(mine.weight)
    adder.register_prehook(lambda grads: whole.extend(grads))
    for one in (plain, mine):
        inputs = data.clone().requires_grad_(not is_leaf)
        with adding_in_place():
            one(inputs).pow(3).sum().backward()
        of_inputs.append(inputs.grad)
    assert whole == [None]
    for expected, found in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)
    if not is_leaf:
        torch.testing.assert_close(*of_inputs, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_all_weights_are_large")
def test_a_linear_layer_that_is_used_twice_and_computed_again_adds_both_parts() -> None:
    torch.manual_seed(5)
    shared = nn.Linear(4, 4, dtype=torch.float64)
    plain = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh())
    mine = copy.deepcopy(plain)
    for one in (plain, mine):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
    add_in_place(mine)
    assert switch_on(mine)
    inputs = torch.randn(3, 4, dtype=torch.float64)
    for one in (plain, mine):
        with adding_in_place():
            one(inputs).pow(2).sum().backward()
    for expected, found in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_all_weights_are_large")
def test_second_derivatives_autocast_and_devices_at_once_are_as_without() -> None:
    plain, mine = linear(dtype=torch.float32), linear(dtype=torch.float32)
    add_in_place(mine)
    inputs = torch.randn(4, 3, requires_grad=True)

    def penalty(one: nn.Linear) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(one(inputs).pow(3).sum(), inputs, create_graph=True)
        return torch.autograd.grad(slope.pow(2).sum(), one.weight)

    def cast(one: nn.Linear) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = one(inputs)
        return found

    def loss(weight_ED: Tensor, row_D: Tensor) -> Tensor:
        parameters = {"weight": weight_ED, "bias": mine.bias.detach()}
        found: Tensor = functional_call(mine, parameters, (row_D,))
        return found.pow(3).sum()

    torch.testing.assert_close(penalty(mine), penalty(plain))
    assert cast(mine).dtype is torch.bfloat16
    with adding_in_place():
        cast(mine).float().sum().backward()  # type: ignore[no-untyped-call]
        cast(plain).float().sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)
    rows = inputs.detach()
    each = vmap(grad(loss), in_dims=(None, 0))(mine.weight.detach(), rows)
    one_by_one = torch.stack([grad(loss)(mine.weight.detach(), row) for row in rows])
    torch.testing.assert_close(each, one_by_one)


@pytest.mark.usefixtures("_all_weights_are_large")
def test_a_hook_on_a_linear_layer_s_weight_changes_its_gradient() -> None:
    plain, mine = linear(), linear()
    add_in_place(mine)
    inputs = torch.ones(2, 3, dtype=torch.float64)
    for one in (plain, mine):
        one.weight.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
        with adding_in_place():
            one(inputs).sum().backward()
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)


@pytest.mark.usefixtures("_all_weights_are_large")
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (2, 0, 4, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_what_follows_a_linear_layer_may_be_in_place(
    shape: tuple[int, ...], has_bias: bool
) -> None:
    """As ReLU(inplace=True), or a residual that is added to what the layer returned."""
    plain, mine = linear(has_bias=has_bias), linear(has_bias=has_bias)
    add_in_place(mine)
    torch.manual_seed(6)
    inputs = torch.randn(shape, dtype=torch.float64)
    for one in (plain, mine):
        found = one(inputs).relu_()
        with adding_in_place():
            found.pow(2).sum().backward()
    for expected, parameter in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_all_weights_are_large")
def test_gradients_that_a_hook_asks_for_are_not_added() -> None:
    """Such as those by which a deep equilibrium model solves for its gradient."""

    def equilibrium(one: nn.Linear, inputs: Tensor) -> Tensor:
        state = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
        again = torch.tanh(one(torch.cat([inputs, state], 1)))

        def solved(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(3):
                found = grad + torch.autograd.grad(again, state, found, retain_graph=True)[0]
            return found

        out = torch.tanh(one(torch.cat([inputs, state.detach()], 1)))
        out.register_hook(solved)  # type: ignore[no-untyped-call]
        return out

    torch.manual_seed(7)
    plain = nn.Linear(8, 5, dtype=torch.float64)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    mine, inputs = copy.deepcopy(plain), torch.randn(4, 3, dtype=torch.float64)
    for parameter in mine.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_in_place(mine)
    for one in (plain, mine):
        with adding_in_place():
            equilibrium(one, inputs).pow(2).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_all_weights_are_large")
def test_a_compiler_sees_the_layer_as_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile makes of it, computed again in a block, would add another gradient."""
    one = linear()
    add_in_place(one)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    assert "Product" in type(one(inputs).grad_fn).__name__
    monkeypatch.setattr("torch.compiler._is_compiling_flag", True)
    assert "Addmm" in type(one(inputs).grad_fn).__name__
