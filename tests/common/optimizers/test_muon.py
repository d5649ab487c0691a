"""Muon's steps are those of plain PyTorch: its own Muon for matrices, AdamW for all others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from headwater.common.optimizers.muon import Muon, orthogonal

RATE, NUM_STEPS = 0.01, 5


class Words(nn.Module):
    """An embedding, matrices, biases and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.wide, self.tall = nn.Linear(8, 16), nn.Linear(16, 4)
        self.filter = nn.Conv1d(1, 3, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tall(torch.tanh(self.wide(self.table(tokens))))
        out: torch.Tensor = self.filter(hidden.unsqueeze(1))
        return out


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters after some steps of these optimizers."""
    random = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        model(torch.randint(0, 20, (6,), generator=random)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    return {name: one.detach() for name, one in model.named_parameters()}


def words() -> Words:
    torch.manual_seed(0)
    return Words()


def test_vectors_and_embeddings_step_as_by_adamw_to_the_bit() -> None:
    ours, plain = words(), words()
    for model in (ours, plain):
        for name in ("wide", "tall", "filter"):
            getattr(model, name).weight.requires_grad_(False)  # all others have the same gradients
    mine = Muon(Muon.parameter_groups(ours.parameters(), ours), lr=RATE)
    theirs = torch.optim.AdamW(plain.parameters(), lr=RATE)
    left, right = trained(ours, mine), trained(plain, theirs)
    assert all(torch.equal(left[name], right[name]) for name in right)
    assert not torch.equal(left["table.weight"], words().table.weight)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("shape", [(16, 8), (8, 16), (8, 8)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_steps_as_by_the_muon_of_torch(shape: tuple[int, int], nesterov: bool) -> None:
    torch.manual_seed(0)
    mine, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    given: dict[str, Any] = {"lr": RATE, "nesterov": nesterov, "weight_decay": 0.1}
    ours = Muon([mine], **given)
    plain = torch.optim.Muon([theirs], **given, adjust_lr_fn="match_rms_adamw")
    for _ in range(NUM_STEPS):
        mine.grad = torch.randn(shape)
        theirs.grad = mine.grad.clone()
        ours.step()
        plain.step()  # type: ignore[no-untyped-call]
    # Theirs iterates in bfloat16, which has two to three digits.
    moved = (theirs.detach() - 1).norm()
    assert (mine.detach() - theirs.detach()).norm() < 0.02 * moved


def test_a_convolution_steps_as_the_matrix_of_its_rows() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(6, 3, 2)
    filters, rows = nn.Parameter(torch.ones(6, 3, 2)), nn.Parameter(torch.ones(6, 6))
    filters.grad, rows.grad = gradient, gradient.flatten(1)
    for one in (filters, rows):
        Muon([one], lr=RATE).step()
    assert torch.equal(filters.flatten(1), rows)


def test_every_direction_has_the_same_length_but_for_the_iteration() -> None:
    torch.manual_seed(0)
    lengths = torch.linalg.svdvals(orthogonal(torch.randn(12, 30)))
    assert lengths.min() > 0.6
    assert lengths.max() < 1.25
    assert torch.equal(orthogonal(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_a_gradient_that_is_none_moves_nothing_and_gradients_stay() -> None:
    model = words()
    start = copy.deepcopy(model.state_dict())
    optimizer = Muon(Muon.parameter_groups(model.parameters(), model), lr=RATE)
    model.wide.weight.grad = gradient = torch.ones(16, 8)
    optimizer.step()
    assert model.wide.weight.grad is gradient
    moved = [name for name, one in model.state_dict().items() if not torch.equal(one, start[name])]
    assert moved == ["wide.weight"]


def test_a_closure_gives_the_gradients_and_the_loss() -> None:
    model, other = words(), words()
    tokens = torch.arange(6)

    def loss_of(one: Words) -> float:
        one.zero_grad()
        loss = one(tokens).square().sum()
        loss.backward()
        return float(loss.detach())

    by_closure = Muon(model.parameters(), lr=RATE)
    assert by_closure.step(lambda: loss_of(model)) == loss_of(other)
    Muon(other.parameters(), lr=RATE).step()
    assert torch.equal(model.wide.weight, other.wide.weight)


def test_a_momentum_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum"):
        Muon([nn.Parameter(torch.ones(2, 2))], momentum=1.0)
