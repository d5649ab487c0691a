"""A large embedding adds its gradient by rows: the same bits, and no gradient of the table."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call, grad, vmap

from headwater.client.memory import embedding_rows
from headwater.client.memory.embedding_rows import add_rows_in_place
from headwater.common.model.chunked_cross_entropy import adding_in_place

WORDS = torch.tensor([[3, 3, 1], [0, 3, 6]])


@pytest.fixture(autouse=True)
def _all_tables_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_rows, "LEAST_BYTES", 0)


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
    add_rows_in_place(rows)
    adder = accumulator_of(rows.weight)
    adder.register_prehook(lambda grads: whole.extend(grads))
    with adding_in_place():
        loss_of(rows).backward()  # type: ignore[no-untyped-call]
    assert plain.weight.grad is not None
    assert rows.weight.grad is not None
    assert torch.equal(rows.weight.grad, plain.weight.grad)
    assert whole == [None]


def test_a_hook_on_the_table_changes_its_gradient() -> None:
    """Such as one that trains the rows of new words alone."""
    plain, rows = table(), table()
    add_rows_in_place(rows)
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
    add_rows_in_place(one)
    with adding_in_place():
        loss_of(one).backward()  # type: ignore[no-untyped-call]
    assert len(called) == 1


def test_the_words_may_be_given_by_name() -> None:
    one = table()
    expected = one(input=WORDS)
    add_rows_in_place(one)
    assert torch.equal(one(input=WORDS), expected)


def test_elsewhere_the_gradient_is_returned() -> None:
    one = table()
    (expected,) = torch.autograd.grad(loss_of(one), one.weight)
    add_rows_in_place(one)
    (found,) = torch.autograd.grad(loss_of(one), one.weight)
    assert torch.equal(found, expected)


def test_gradients_of_many_devices_at_once_are_the_same() -> None:
    one = table()
    weight_VD = one.weight.detach()

    def loss(weight_VD: Tensor, words: Tensor) -> Tensor:
        found: Tensor = functional_call(one, {"weight": weight_VD}, (words,))
        return found.pow(3).sum()

    expected = vmap(grad(loss), in_dims=(None, 0))(weight_VD, WORDS)
    add_rows_in_place(one)
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
    add_rows_in_place(one)
    assert "forward" not in vars(one)


def test_a_deep_copy_adds_to_its_own_gradient() -> None:
    one = table()
    add_rows_in_place(one)
    assert one.weight.grad is not None
    before = one.weight.grad.clone()
    two = copy.deepcopy(one)
    two.weight.grad = torch.zeros(7, 4)
    with adding_in_place():
        loss_of(two).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(one.weight.grad, before)
    assert two.weight.grad.any()
