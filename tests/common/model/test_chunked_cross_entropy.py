"""Chunked cross-entropy: torch's losses and gradients, without a whole vocabulary's logits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

import headwater
from headwater.common.model.chunked_cross_entropy import adding_in_place, chunked_cross_entropy
from tests.commands import python

ROOT = Path(__file__).parents[3]
IGNORED = -100
EPS = torch.finfo(torch.float64).eps
NUM_WORDS = 200  # four chunks, where a chunk has the fewest words


def chunked(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_bytes=1)


def whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight, bias).flatten(0, -2)
    return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def cut_at_64(targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return chunked(hidden, weight, bias, targets)


Loss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
Arguments = tuple[Tensor, Tensor, Tensor | None, Tensor]


def arguments(
    *shape: int, num_words: int = NUM_WORDS, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, 5, dtype=dtype, generator=random)
    weight = torch.randn(num_words, 5, dtype=dtype, generator=random)
    bias = torch.randn(num_words, dtype=dtype, generator=random)
    targets = torch.randint(num_words, shape, generator=random)
    if targets.numel() > 2:
        targets.view(-1)[::3] = IGNORED
    return hidden, weight, bias, targets


def value_and_gradients(loss: Loss, *given: Any) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in given[:3] if one is not None]
    value = loss(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None, given[3])
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def assert_equal(found: list[Tensor], expected: list[Tensor], eps: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max() if one.numel() else 0) <= eps


def bound(hidden: Tensor, weight: Tensor, eps: float) -> float:
    """Bound a sum's rounding: one eps for each of its terms, none larger than the largest logit."""
    largest = float(hidden.abs().max() if hidden.numel() else 0) * float(weight.abs().max()) + 1
    return eps * 4 * largest * (hidden.numel() + weight.shape[0]) * hidden.shape[-1]


@given(
    num_tokens=st.integers(0, 9),
    num_words=st.integers(1, 300),
    chunk_bytes=st.sampled_from([1, 5_000, 1 << 20]),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_torch_s_to_rounding_however_the_vocabulary_is_cut(
    num_tokens: int, num_words: int, chunk_bytes: int, has_bias: bool, seed: int
) -> None:
    hidden, weight, bias, targets = arguments(num_tokens, num_words=num_words, seed=seed)
    given = hidden, weight, bias if has_bias else None, targets

    def cut(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_bytes=chunk_bytes)

    found, expected = (value_and_gradients(loss, *given) for loss in (cut, whole))
    assert_equal(found, expected, bound(hidden, weight, EPS))


def test_float32_differs_from_float64_by_float32_s_rounding() -> None:
    hidden, weight, bias, targets = arguments(40, dtype=torch.float32)
    found = value_and_gradients(chunked, hidden, weight, bias, targets)
    expected = value_and_gradients(whole, hidden.double(), weight.double(), bias.double(), targets)
    eps = torch.finfo(torch.float32).eps
    assert {one.dtype for one in found} == {torch.float32}
    assert_equal([one.double() for one in found], expected, bound(hidden, weight, eps))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20], ids=["four chunks", "one chunk"])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_cap_of_the_logits_gives_torch_s_loss_and_gradients(cap: float, chunk_bytes: int) -> None:
    def cut(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(
            hidden, weight, targets, bias=bias, cap=cap, chunk_bytes=chunk_bytes
        )

    def capped(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        logits = cap * torch.tanh(functional.linear(hidden, weight, bias) / cap)
        return functional.cross_entropy(logits, targets, reduction="sum")

    given = arguments(9)
    found, expected = (value_and_gradients(loss, *given) for loss in (cut, capped))
    assert_equal(found, expected, bound(*given[:2], EPS))


def test_a_cap_that_is_not_above_0_is_refused() -> None:
    hidden, weight, bias, targets = arguments(3)
    with pytest.raises(ValueError, match=r"a cap above 0, or None, found 0"):
        chunked_cross_entropy(hidden, weight, targets, bias=bias, cap=0.0)


def test_gradients_are_those_of_finite_differences() -> None:
    *leaves, targets = (one for one in arguments(3, num_words=70))
    for leaf in leaves:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(partial(cut_at_64, targets), leaves)


def test_losses_of_single_tokens_have_the_targets_shape_and_sum_to_the_loss() -> None:
    hidden, weight, bias, targets = arguments(2, 3)
    losses = chunked_cross_entropy(hidden, weight, targets, bias=bias, reduction="none")
    assert losses.shape == targets.shape
    assert losses[targets == IGNORED].tolist() == [0.0, 0.0]
    assert torch.isclose(losses.sum(), whole(hidden, weight, bias, targets), rtol=100 * EPS)


def test_tokens_that_are_all_ignored_have_no_loss_and_no_gradient() -> None:
    hidden, weight, bias, targets = arguments(4)
    found = value_and_gradients(chunked, hidden, weight, bias, torch.full_like(targets, IGNORED))
    assert not any(one.count_nonzero() for one in found)


def test_a_tied_weight_gets_the_gradients_of_embedding_and_head() -> None:
    table, targets = arguments(1)[1], torch.tensor([3, 150, 7])

    def tied(loss: Loss) -> Tensor:
        leaf = table.clone().requires_grad_()
        hidden = functional.embedding(targets.roll(1), leaf).tanh()
        return torch.autograd.grad(loss(hidden, leaf, None, targets), leaf)[0]

    assert float((tied(chunked) - tied(whole)).abs().max()) <= bound(table, table, EPS)


def test_only_gradients_that_are_needed_are_computed() -> None:
    hidden, weight, bias, targets = arguments(4)
    chunked(hidden.requires_grad_(), weight, bias, targets).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_gradient_in_place_is_added_to_the_weight_s_own() -> None:
    hidden, weight, bias, targets = arguments(6)
    leaves = [one.clone().requires_grad_() for one in (hidden, weight, bias)]
    expected = value_and_gradients(chunked, hidden, weight, bias, targets)[1:]
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    with adding_in_place():
        cut_at_64(targets, *leaves).backward()  # type: ignore[no-untyped-call]
    found = [leaf.grad - 1 for leaf in leaves if leaf.grad is not None]
    assert_equal(found, expected, bound(hidden, weight, EPS))


def test_a_hook_on_the_weight_changes_its_gradient_in_place_too() -> None:
    hidden, weight, bias, targets = arguments(6)
    expected = value_and_gradients(chunked, hidden, weight, bias, targets)[2]
    leaf = weight.clone().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    leaf.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
    with adding_in_place():
        chunked(hidden, leaf, bias, targets).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, expected * 0.5)


def test_a_promise_of_adding_in_place_is_the_threads_own() -> None:
    """Two threads that train: each begins and ends its promise while the other's holds."""
    entered, left = threading.Event(), threading.Event()

    def train() -> None:
        with adding_in_place():
            entered.set()
            left.wait()

    hidden, weight = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    weight.grad = torch.zeros(3, 2)

    def weight_gradient() -> Tensor:
        loss = chunked_cross_entropy(hidden, weight, torch.tensor([1]), reduction="sum")
        return torch.autograd.grad(loss, [weight])[0]

    expected = weight_gradient()
    other = threading.Thread(target=train)
    other.start()
    entered.wait()
    assert torch.equal(weight_gradient(), expected)
    with adding_in_place():
        left.set()
        other.join()
    assert torch.equal(weight_gradient(), expected)
    assert not weight.grad.any()


def test_a_promise_of_adding_in_place_ends_with_its_block() -> None:
    hidden, weight, bias, targets = arguments(6)
    leaf = weight.clone().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    with adding_in_place():
        pass
    (found,) = torch.autograd.grad(chunked(hidden, leaf, bias, targets), leaf)
    assert found.count_nonzero()
    assert not leaf.grad.count_nonzero()


def test_the_backward_pass_may_run_twice() -> None:
    hidden, weight, bias, targets = arguments(6)
    loss = chunked(hidden.requires_grad_(), weight, bias, targets)
    first, second = (torch.autograd.grad(loss, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_words_that_cannot_occur_leave_loss_and_gradients_finite() -> None:
    hidden, weight, bias, targets = arguments(6)
    bias[: NUM_WORDS // 2] = -torch.inf  # whole chunks
    targets[targets != IGNORED] = NUM_WORDS - 1
    found, expected = (
        value_and_gradients(loss, hidden, weight, bias, targets) for loss in (chunked, whole)
    )
    assert all(torch.isfinite(one).all() for one in found)
    assert_equal(found, expected, bound(hidden, weight, EPS))


def test_a_nan_makes_the_loss_a_nan() -> None:
    hidden, weight, bias, targets = arguments(6)
    hidden[1, 0] = torch.nan
    assert torch.isnan(chunked(hidden, weight, bias, targets))


def test_under_autocast_products_round_to_bfloat16_and_sums_do_not() -> None:
    hidden, weight, bias, targets = arguments(40, dtype=torch.float32)
    exact = value_and_gradients(whole, hidden, weight, bias, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *gradients = value_and_gradients(chunked, hidden, weight, bias, targets)
    # Two factors and their product are rounded; a loss moves by two logits.
    unit = 2.0**-9
    logit = 3 * unit * float((hidden.abs() @ weight.abs().t()).max())
    assert abs(float(loss - exact[0])) <= 2 * logit * len(targets)
    assert {one.dtype for one in (loss, *gradients)} == {torch.float32}
    for found, expected in zip(gradients, exact[1:], strict=True):
        assert float((found - expected).norm()) <= (2 * logit + 4 * unit) * float(expected.norm())


def test_frozen_weights_may_be_bfloat16_beside_a_float32_hidden_state() -> None:
    hidden, weight, _, targets = arguments(6, dtype=torch.float32)
    frozen = weight.bfloat16()
    found = chunked(hidden.requires_grad_(), frozen, None, targets)
    expected = whole(hidden, frozen.float(), None, targets)
    assert found.dtype == torch.float32
    assert torch.isclose(found, expected, rtol=1e-5)
    found.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "in_dims",
    [(0, None, None, 0), (0, 0, None, 0), (0, 0, 0, 0), (None, 0, None, None), (0, None, 0, None)],
)
def test_vmap_and_grad_give_what_torch_s_own_give(in_dims: tuple[int | None, ...]) -> None:
    batched = arguments(3, 7)
    batched[3][1] = IGNORED  # an example without a target
    weights = torch.stack([batched[1], batched[1] + 1, 2 * batched[1]])
    biases = torch.stack([batched[2]] * 3)
    each = (batched[0], weights, biases, batched[3])
    given = [one if dim == 0 else one[0] for one, dim in zip(each, in_dims, strict=True)]
    limit = bound(batched[0], weights, EPS)
    losses = [vmap(loss, in_dims=in_dims)(*given) for loss in (chunked, whole)]
    assert_equal(losses[:1], losses[1:], limit)
    for wanted in ((0,), (0, 1, 2)):
        found, expected = (
            vmap(grad(loss, argnums=wanted), in_dims=in_dims)(*given) for loss in (chunked, whole)
        )
        assert_equal(list(found), list(expected), limit)


def test_a_gradient_of_several_examples_in_a_vmap_of_vmaps_is_torch_s() -> None:
    hidden, weight, bias, targets = arguments(2, 3, 7)

    def of_rows(loss: Loss) -> Tensor:
        def row(weight: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
            losses: Tensor = vmap(loss, in_dims=(0, None, None, 0))(hidden, weight, bias, targets)
            return losses.sum()

        gradients: Tensor = vmap(grad(row), in_dims=(None, 0, 0))(weight, hidden, targets)
        return gradients

    assert_equal([of_rows(chunked)], [of_rows(whole)], bound(hidden, weight, EPS))


def test_a_second_derivative_is_refused_by_name() -> None:
    hidden, weight, bias, targets = arguments(4)
    hidden.requires_grad_()
    (first,) = torch.autograd.grad(
        chunked(hidden, weight, bias, targets), hidden, create_graph=True
    )
    with pytest.raises(RuntimeError, match="chunked_cross_entropy has no second derivatives"):
        first.sum().backward()  # type: ignore[no-untyped-call]


def test_a_mean_is_refused_with_its_reason() -> None:
    hidden, weight, _, targets = arguments(4)
    with pytest.raises(ValueError, match="means of micro-batches cannot be added up"):
        chunked_cross_entropy(hidden, weight, targets, reduction="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.zeros(9, 4)}, r"expected hidden \[..., D\] and weight \[V, D\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"of shape \(4,\), found"),
        ({"targets": torch.zeros(4)}, "an int64 target for each token"),
        ({"bias": torch.zeros(2)}, "expected a bias of shape"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor], message: str) -> None:
    hidden, weight, _, targets = arguments(4)
    given: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": targets, **changed}
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**given)


@pytest.mark.parametrize("target", [-1, NUM_WORDS])
def test_a_target_outside_of_the_vocabulary_is_named(target: int) -> None:
    hidden, weight, _, targets = arguments(4)
    targets[1] = target
    with pytest.raises(IndexError, match=f"expected targets of 0 to 199, .* found {target}"):
        chunked_cross_entropy(hidden, weight, targets)


def test_it_is_a_public_name() -> None:
    assert headwater.chunked_cross_entropy is chunked_cross_entropy


MEASURED = """
import sys, torch
from torch.nn.functional import cross_entropy, linear
from benchmarks.measure import memory_of, reset_peak
from headwater.common.model.chunked_cross_entropy import adding_in_place, chunked_cross_entropy
torch.set_num_threads(1)
def run(num_tokens):
    states, targets = hidden[:num_tokens], torch.randint(60_000, (num_tokens,))
    if sys.argv[1] == "chunked":
        with adding_in_place():
            chunked_cross_entropy(states, weight, targets, chunk_bytes=4 << 20).backward()
    else:
        cross_entropy(linear(states, weight), targets, reduction="sum").backward()
hidden = torch.randn(256, 256, requires_grad=True)
weight = torch.randn(60_000, 256, requires_grad=True)
weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
run(8)
reset_peak()
before = memory_of()["VmRSS"]
run(256)
print(memory_of()["VmHWM"] - before)
"""


@pytest.mark.slow
def test_its_peak_memory_has_neither_the_logits_nor_a_second_gradient_of_the_weight() -> None:
    def peak(way: str) -> int:
        return int(python("-c", MEASURED, way).stdout)

    logits_bytes, weight_bytes = 4 * 256 * 60_000, 4 * 60_000 * 256
    assert peak("whole") > 2 * logits_bytes
    assert peak("chunked") < weight_bytes == logits_bytes
