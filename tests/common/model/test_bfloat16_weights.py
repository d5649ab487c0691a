"""Frozen weights in bfloat16: they compute as rounded float32 weights, and are never widened long.

The model uses its frozen weights in every way that the module knows: embedding, linear layers,
attention, a convolution, products with a view, an index, and operations that are no products.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from headwater.client.memory.peak_model import PeakMeter, resident_bytes
from headwater.common.errors import UnsupportedModel
from headwater.common.model.bfloat16_weights import (
    Bfloat16Weight,
    lent_room,
    store_in_bfloat16,
    stored_frozen,
)
from headwater.common.model.chunked_cross_entropy import chunked_cross_entropy
from headwater.common.model.frozen_part import digest_of
from headwater.common.model.parameters import ModelImage, build_model, state_dict
from headwater.common.system.heap import ROOMS, release_freed_memory
from tests.adapted import Adapted, AdaptedNet

WORDS, WIDTH, MIB = 20, 8, 1 << 20
TOKENS_BT = torch.arange(10).view(2, 5)


class Net(nn.Module):
    """A trained layer among frozen ones; the embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden = self.trained(self.embed(tokens_BT))
        hidden = hidden + self.first(self.norm(hidden))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = hidden + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        added = torch.addmm(self.first.bias, hidden.flatten(0, 1), self.first.weight.t())
        hidden = hidden * self.first.weight[0] + added.view(hidden.shape)
        logits: Tensor = self.head(hidden) + hidden @ self.embed.weight.T
        return logits + self.embed.weight[tokens_BT].sum(-1, keepdim=True)


def pair() -> tuple[Net, Net]:
    """Return a model with stored weights, and a plain one with rounded weights."""
    torch.manual_seed(0)
    stored, rounded = Net(), Net()
    rounded.load_state_dict(stored.state_dict())
    store_in_bfloat16(stored)
    with stored_frozen(rounded, "bfloat16"):
        pass
    assert {type(one) for one in rounded.parameters()} == {nn.Parameter}
    assert {one.dtype for one in rounded.parameters()} == {torch.float32}
    return stored, rounded


def outputs_and_gradients(model: Net) -> list[Tensor]:
    logits = model(TOKENS_BT)
    logits.float().square().sum().backward()
    return [logits, *(one.grad for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_and_gradients_are_those_of_rounded_float32_weights(autocast: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        stored, rounded = (outputs_and_gradients(model) for model in pair())
    assert len(stored) == len(rounded) == 3
    for one, other in zip(stored, rounded, strict=True):
        assert one.dtype == other.dtype
        eps = torch.finfo(torch.bfloat16).eps if autocast else 1e-6
        assert bool((one - other).norm() <= eps * other.norm())


def test_weights_take_two_bytes_and_stay_tied_and_vectors_stay_as_they_are() -> None:
    stored, _ = pair()
    assert isinstance(stored.embed.weight, nn.Parameter)
    assert stored.head.weight is stored.embed.weight
    assert stored.mix.weight.dtype is stored.embed.weight.dtype is torch.bfloat16
    assert stored.norm.weight.dtype is stored.first.bias.dtype is torch.float32
    assert stored.trained.weight.dtype is torch.float32
    assert {type(one) for one in stored.state_dict().values()} == {Tensor}


def test_a_copy_is_stored_in_the_same_way_and_may_become_float64() -> None:
    copied = copy.deepcopy(pair()[0])
    assert isinstance(copied.embed.weight, Bfloat16Weight)
    assert copied.head.weight is copied.embed.weight
    assert copied.double()(TOKENS_BT).dtype is torch.float64


def test_what_the_forward_pass_widens_is_not_kept_for_the_backward_pass() -> None:
    layer = nn.Linear(64, 32).requires_grad_(False)
    store_in_bfloat16(layer)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.ones(2, 64, requires_grad=True))
    assert [tensor.dtype for tensor in kept] == [torch.bfloat16]
    assert kept[0].data_ptr() == layer.weight.data_ptr()


def test_one_weight_s_room_is_lent_to_the_next_and_released_with_freed_memory() -> None:
    release_freed_memory()
    assert not ROOMS
    with lent_room(30) as large, lent_room(10) as other:  # of another thread, say
        assert other.data_ptr() != large.data_ptr()
    with lent_room(20) as small:
        assert len(small) == 20
    assert [room.numel() for room in ROOMS] == [20], "the one that came back first was too small"
    with lent_room(30) as larger:
        address = larger.data_ptr()
    with lent_room(30) as again:
        assert again.data_ptr() == address
    release_freed_memory()
    assert not ROOMS


def test_a_room_is_in_float32_whatever_the_caller_s_default_is() -> None:
    release_freed_memory()
    layer = nn.Linear(4, 3).requires_grad_(False)
    store_in_bfloat16(layer)
    values = torch.randn(2, 4)
    expected = layer(values)
    release_freed_memory()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(layer(values), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [room.dtype for room in ROOMS] == [torch.float32]


def test_products_of_two_threads_do_not_share_a_room() -> None:
    torch.manual_seed(0)
    plain = [nn.Linear(300, 200, bias=False).requires_grad_(False) for _ in range(2)]
    for layer in plain:
        layer.weight.copy_(layer.weight.bfloat16())
    stored = copy.deepcopy(plain)
    store_in_bfloat16(nn.ModuleList(stored))
    values = torch.randn(50, 300)
    expected = [layer(values) for layer in plain]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda at: stored[at % 2](values), range(200)))
    assert all(torch.equal(one, expected[at % 2]) for at, one in enumerate(found))


def test_a_frozen_head_in_bfloat16_gives_the_chunked_loss_of_its_rounded_self() -> None:
    head = nn.Linear(WIDTH, WORDS, bias=False).requires_grad_(False)
    store_in_bfloat16(head)
    hidden = torch.randn(6, WIDTH, requires_grad=True)
    targets = torch.arange(6)
    loss = chunked_cross_entropy(hidden, head.weight, targets)
    expected = functional.cross_entropy(
        hidden @ head.weight.detach().float().T, targets, reduction="sum"
    )
    assert torch.allclose(loss, expected, rtol=1e-6)
    found = torch.autograd.grad(loss, hidden)[0]
    assert torch.allclose(found, torch.autograd.grad(expected, hidden)[0], atol=1e-6)


def test_torch_func_gives_each_example_its_own_gradient() -> None:
    stored, rounded = pair()

    def gradients(model: Net) -> Any:
        trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def loss(values: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
            logits: Tensor = functional_call(model, values, (tokens_T[None],))
            return logits.square().sum()

        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return vmap(grad(loss), in_dims=(None, 0))(trained, TOKENS_BT)

    found, expected = gradients(stored), gradients(rounded)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-5) for name in expected)


def test_a_model_without_a_frozen_weight_is_refused_by_the_setting_s_name() -> None:
    with pytest.raises(UnsupportedModel, match="--frozen-dtype bfloat16"):
        store_in_bfloat16(nn.Linear(2, 2))


def test_the_frozen_part_has_the_digest_of_the_same_weights_built_in_bfloat16() -> None:
    image = build_model(Adapted(), seed=3, frozen_dtype="bfloat16")
    torch.manual_seed(3)
    built = AdaptedNet()
    for name in ("up.weight", "body.base.weight"):
        parameter = built.get_parameter(name)
        parameter.data = parameter.data.bfloat16()
    assert image.frozen_digest == digest_of(image.layout, built)
    whole = build_model(Adapted(), seed=3)
    rounded = {"up.weight", "body.base.weight"}
    saved = 2 * sum(slot.num_elements for slot in whole.layout.frozen if slot.name in rounded)
    assert image.layout.num_frozen_bytes == whole.layout.num_frozen_bytes - saved
    assert {type(one) for one in state_dict(image).values()} == {Tensor}


def test_a_model_that_moves_into_its_image_is_never_there_twice() -> None:
    size = 1024
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(40)), nn.Linear(size, 1))
    model[:-1].requires_grad_(False)
    release_freed_memory()
    before, meter = resident_bytes(), PeakMeter()
    image = ModelImage(model)
    assert image.layout.num_frozen_bytes > 160 * MIB
    assert meter.peak_bytes() - before < 80 * MIB
