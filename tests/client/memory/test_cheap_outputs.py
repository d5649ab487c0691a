"""Cheap outputs are dropped and computed again: the same bits, and less is kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from headwater.client.memory.activation_checkpointing import Recomputed, switch_off, switch_on
from headwater.client.memory.footprint import footprint
from headwater.common.errors import TaskError
from tests.client.memory.test_activation_checkpointing import MODELS, are_equal, gradients, made

ROWS, WIDTH = 64, 32


class Gated(nn.Module):
    """The perceptron of a Llama, behind its norm written out in operations."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.gate, self.up = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64)
        self.down = nn.Linear(64, WIDTH)

    def normed(self, x_BI: Tensor) -> Tensor:
        wide = x_BI.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scale * wide.to(x_BI.dtype)

    def forward(self, x_BI: Tensor) -> Tensor:
        normed = self.normed(x_BI)
        out: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x_BI + out


class ChangedInside(nn.Module):
    """Changes a cheap output in place, within its block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BI: Tensor) -> Tensor:
        inner = functional.gelu(self.up(x_BI))
        inner += 1.0
        out: Tensor = self.down(inner)
        return out


class Conjugated(nn.Module):
    """Conjugates a cheap output: a view of the same memory, with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(WIDTH // 2, WIDTH // 2, dtype=torch.complex64))

    def forward(self, x_BI: Tensor) -> Tensor:
        turned = torch.view_as_complex(x_BI.reshape(*x_BI.shape[:-1], -1, 2)) * self.turn
        out: Tensor = (turned.conj() @ self.mix) * turned.conj()
        return torch.view_as_real(out).flatten(-2)


class Rotated(nn.Module):
    """Rotates as Llama does: a complex product, of which the real view is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BI: Tensor) -> Tensor:
        turned = torch.view_as_complex(x_BI.reshape(*x_BI.shape[:-1], -1, 2)) * self.turn
        out: Tensor = self.down(torch.view_as_real(turned).flatten(-2).to(torch.float64).float())
        return out


class Sparse(nn.Module):
    """Multiplies with a sparse matrix, as a graph's layer does; it has no memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BI: Tensor) -> Tensor:
        links = torch.eye(len(x_BI)).to_sparse()
        out: Tensor = torch.sparse.mm(links, functional.gelu(self.up(x_BI)))
        return out


class Mapped(nn.Module):
    """Maps a function over the rows with ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BI: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(lambda x_I: self.down(functional.gelu(self.up(x_I))))(x_BI)
        return out


class ChangedWhenSaved(nn.Module):
    """Changes in place what the backward pass needs, which torch refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BI: Tensor) -> Tensor:
        inner = torch.sigmoid(self.up(x_BI))
        out: Tensor = self.down(inner)
        inner.mul_(2.0)
        return out + torch.sigmoid(inner)


class ChangedBehind(nn.Module):
    """Changes a block's input once the block has run; its norm saves the input for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Gated()])

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden = self.input(x_BI)
        out: Tensor = self.blocks[0](hidden)
        hidden += 1.0
        return out


def all_cheap(model: nn.Module) -> None:
    assert switch_on(model, dict.fromkeys(range(100), Recomputed.CHEAP))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(name)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        kept = gradients(model, inputs)
        all_cheap(model)
        assert are_equal(gradients(model, inputs), kept)
        switch_off(model)
        assert are_equal(gradients(model, inputs), kept)
    assert kept


@pytest.mark.parametrize("extent", [Recomputed.CHEAP, Recomputed.ALL])
@pytest.mark.parametrize("block", [Gated, ChangedInside, Conjugated, Rotated, Sparse, Mapped])
def test_the_gradient_of_a_block_is_the_same_to_the_bit(
    block: type[nn.Module], extent: Recomputed
) -> None:
    torch.manual_seed(3)
    model, inputs = nn.Sequential(block(), block()), torch.randn(ROWS, WIDTH)
    kept = gradients(model, inputs)
    assert footprint(model, lambda: model(inputs)) is not None
    assert switch_on(model, dict.fromkeys(range(100), extent))
    assert are_equal(gradients(model, inputs), kept)


@pytest.mark.parametrize("extent", [Recomputed.CHEAP, Recomputed.ALL])
def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_torch_does(
    extent: Recomputed,
) -> None:
    torch.manual_seed(3)
    model, inputs = nn.Sequential(ChangedWhenSaved(), Gated()), torch.randn(ROWS, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, inputs)
    assert switch_on(model, dict.fromkeys(range(100), extent))
    with pytest.raises(TaskError, match="changed in place after the operation"):
        gradients(model, inputs)


def saved_bytes(model: nn.Module, inputs: Tensor) -> int:
    """The bytes that autograd saves in a plain forward pass, without the parameters."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).square().sum()
    assert loss.requires_grad
    own = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(size for at, size in storages.items() if at not in own)


def held_bytes(model: nn.Module, inputs: Tensor) -> int:
    """The bytes of the tensors that Python holds for the backward pass, with hooks of ours."""
    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is Tensor}
    hidden = model(inputs)
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) is Tensor and id(t) not in before]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert hidden.requires_grad
    return sum(size for at, size in storages.items() if at not in own)


def test_a_gated_perceptron_keeps_neither_norm_nor_activation_nor_product() -> None:
    model = nn.Sequential(Gated(), Gated())
    inputs = torch.randn(ROWS, WIDTH, requires_grad=True)
    # The norm without and with its scale, silu's output, and its product with the other layer.
    dropped = 4 * ROWS * (2 * WIDTH + 2 * 64)
    found = footprint(model, lambda: model(inputs))
    assert found is not None
    assert found.cheap == {0: dropped, 1: dropped}
    plain = saved_bytes(model, inputs)
    all_cheap(model)
    assert held_bytes(model, inputs) < plain - 1.8 * dropped


def test_a_changed_input_is_an_error_and_no_wrong_gradient() -> None:
    model, inputs = ChangedBehind(), torch.randn(ROWS, WIDTH)
    all_cheap(model)
    with pytest.raises(TaskError, match="changed in place"):
        model(inputs).sum().backward()


def test_a_second_backward_pass_computes_again() -> None:
    torch.manual_seed(3)
    model, inputs = nn.Sequential(Gated(), Gated()), torch.randn(ROWS, WIDTH)
    once = [g.clone() for g in gradients(model, inputs)]
    all_cheap(model)
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(inputs).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(b, 2 * a) for a, b in zip(once, twice, strict=True))
