"""Frozen weights in four bits: the paper's values, and linear layers as with the decoded weight."""

from __future__ import annotations

import copy
import io
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap

from headwater.common.errors import UnsupportedModel
from headwater.common.frozen.nf4_codes import BLOCK, CODEBOOK, decoded, encoded
from headwater.common.frozen.nf4_weights import Nf4Weight, store
from headwater.common.model.bfloat16_weights import Bfloat16Weight, stored_frozen
from headwater.common.model.chunked_cross_entropy import chunked_cross_entropy
from headwater.common.model.layout import layout_of
from headwater.common.model.parameters import ModelImage

# The highest ratio of a number to its block's largest that another value would round better.
HALF_GAP = max(right - left for left, right in pairwise(CODEBOOK)) / 2


class TurnedLinear(nn.Module):
    """A linear layer as GPT-2 has it in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 33))
        self.bias = nn.Parameter(torch.randn(33))

    def forward(self, values: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, values.view(-1, values.size(-1)), self.weight)
        return flat.view(*values.shape[:-1], self.weight.shape[1])


TurnedLinear.__name__ = "Conv1D"
LAYERS = {
    "with bias": lambda: nn.Linear(100, 33),
    "without bias": lambda: nn.Linear(100, 33, bias=False),
    "turned": TurnedLinear,
}


def pair(kind: str = "with bias") -> tuple[nn.Module, nn.Module]:
    """Return a layer with a weight in four bits, and a plain one with the decoded weight."""
    torch.manual_seed(0)
    stored = LAYERS[kind]()
    stored.requires_grad_(False)
    plain = copy.deepcopy(stored)
    store(stored)
    with stored_frozen(plain, "nf4"):
        pass
    assert {type(one) for one in plain.parameters()} == {nn.Parameter}
    return stored, plain


def test_the_values_are_those_of_the_paper_s_construction() -> None:
    """Section 3 and the code of its authors: quantiles between 1 - offset and a half."""
    offset = (1 - 1 / 32 + 1 - 1 / 30) / 2
    share, half = torch.linspace(offset, 0.5, 9)[:-1], torch.linspace(offset, 0.5, 8)[:-1]
    values = [NormalDist().inv_cdf(float(one)) for one in share]
    values += [-NormalDist().inv_cdf(float(one)) for one in half] + [0.0]
    expected = torch.tensor(sorted(values)) / max(values)
    assert torch.allclose(torch.tensor(CODEBOOK), expected, atol=1e-6)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 200),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_a_weight_returns_within_half_a_gap_of_its_block_s_largest(
    rows: int, columns: int, exponent: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random) * 10.0**exponent
    memory = encoded(weight)
    found = decoded(memory, (rows, columns))
    flat, error = (torch.split(one.reshape(-1), BLOCK) for one in (weight, found - weight))
    for block, off in zip(flat, error, strict=True):
        assert float(off.abs().max() / block.abs().max()) <= HALF_GAP * (1 + 1e-5)
    assert torch.equal(encoded(found), memory)
    assert len(memory) * 4 == 36 * -(-rows * columns // BLOCK)  # 4.5 bits a number
    some = slice(rows // 2, rows)
    assert torch.equal(decoded(memory, (rows, columns), some), found[some])


def test_blocks_of_zeros_stay_zeros_and_those_of_one_number_are_exact() -> None:
    weight = torch.zeros(3, BLOCK)
    weight[1] = -0.3
    assert torch.equal(decoded(encoded(weight), (3, BLOCK)), weight)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("shape", [(4, 100), (2, 3, 100)])
@pytest.mark.parametrize("autocast", [False, True])
def test_both_passes_are_those_of_the_decoded_weight_to_the_bit(
    kind: str, shape: tuple[int, ...], autocast: bool
) -> None:
    values, found = torch.randn(shape), []
    for layer in pair(kind):
        inputs = values.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = layer(inputs)
        outputs.float().square().sum().backward()
        found.append((outputs, inputs.grad))
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_a_bias_that_trains_has_the_gradient_of_the_plain_layer() -> None:
    found = []
    for layer in pair():
        layer.get_parameter("bias").requires_grad_(True)
        layer(torch.ones(2, 3, 100)).square().sum().backward()
        found.append(layer.get_parameter("bias").grad)
    one, other = found
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


def test_a_layer_takes_the_dtype_of_its_inputs() -> None:
    layer = nn.Linear(100, 33, dtype=torch.bfloat16).requires_grad_(False)
    store(layer)
    assert layer(torch.ones(2, 100, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", ["with bias", "turned"])
def test_a_layer_that_was_built_in_bfloat16_computes_in_float32(kind: str) -> None:
    """As Qwen's and GPT-2's do, whose layers have biases."""
    stored = LAYERS[kind]().to(torch.bfloat16).requires_grad_(False)
    plain = copy.deepcopy(stored)
    store(stored)
    with stored_frozen(plain, "nf4"):
        pass
    values = torch.randn(2, 5, 100)
    expected = plain.float()(values)
    # The plain layer's weight was rounded to bfloat16 again.
    assert stored(values).dtype == torch.float32
    assert torch.allclose(stored(values), expected, rtol=2**-7, atol=0.05)


def test_autograd_keeps_the_codes_and_no_decoded_weight() -> None:
    stored, _ = pair()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stored(torch.ones(2, 100, requires_grad=True))
    weight = stored.get_parameter("weight")
    assert [tensor.data_ptr() for tensor in kept] == [weight.data_ptr()]
    assert weight.nbytes == 36 * -(-33 * 100 // BLOCK)


def test_torch_func_gives_each_example_its_own_gradient() -> None:
    values = torch.randn(5, 2, 100)
    found, expected = (
        vmap(grad(lambda one, layer=layer: layer(one).square().sum()))(values) for layer in pair()
    )
    assert torch.equal(found, expected)


def test_a_frozen_head_gives_the_chunked_loss_of_its_decoded_weight() -> None:
    losses: list[Tensor] = []
    gradients: list[Any] = []
    values, targets = torch.randn(6, 100), torch.arange(6)
    for layer in pair():
        hidden = values.clone().requires_grad_()
        weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
        loss = chunked_cross_entropy(hidden, weight, targets, bias=bias, chunk_bytes=1)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss)
        gradients.append(hidden.grad)
    assert torch.equal(*losses)
    assert torch.equal(*gradients)


def test_torch_func_takes_the_chunked_loss_of_a_frozen_head() -> None:
    values, targets = torch.randn(3, 5, 100), torch.randint(33, (3, 5))
    gradients = []
    for layer in pair():
        weight = layer.get_parameter("weight")

        def loss(hidden: Tensor, wanted: Tensor, weight: Tensor = weight) -> Tensor:
            return chunked_cross_entropy(hidden, weight, wanted, chunk_bytes=1)

        gradients.append(vmap(grad(loss))(values, targets))
    assert torch.equal(*gradients)


def test_a_weight_looks_like_the_float32_weight_that_it_decodes_to() -> None:
    stored, plain = pair()
    weight, expected = stored.get_parameter("weight"), plain.get_parameter("weight")
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype, weight.numel()) == ((33, 100), torch.float32, 3300)
    assert torch.equal(weight @ torch.eye(100), expected)
    assert torch.equal(weight.T[3], expected.T[3])
    file = io.BytesIO()
    torch.save(stored.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], expected)


def test_a_copy_is_stored_too_takes_a_state_dict_and_may_become_float64() -> None:
    stored, plain = pair()
    copied = copy.deepcopy(stored)
    nn.init.zeros_(plain.get_parameter("weight")[0])
    copied.load_state_dict(plain.state_dict())
    weight = copied.get_parameter("weight")
    assert isinstance(weight, Nf4Weight)
    assert torch.equal(weight * 1, plain.get_parameter("weight"))
    assert not torch.equal(weight * 1, stored.get_parameter("weight") * 1)
    assert copied.double()(torch.ones(1, 100).double()).dtype is torch.float64


@pytest.mark.parametrize("is_training", [False, True])
def test_attention_takes_weights_in_four_bits_and_in_bfloat16_together(is_training: bool) -> None:
    stored = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    plain = copy.deepcopy(stored.requires_grad_(False).train(is_training))
    store(stored)
    with stored_frozen(plain, "nf4"):
        pass
    assert isinstance(stored.get_parameter("self_attn.out_proj.weight"), Nf4Weight)
    assert isinstance(stored.get_parameter("self_attn.in_proj_weight"), Bfloat16Weight)
    values = torch.randn(2, 5, 64)
    with torch.no_grad():
        found, expected = stored(values), plain(values)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """An embedding that is the last layer's weight too, linear layers, a convolution and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 64)
        self.first = nn.Linear(64, 64)
        self.mix = nn.Conv1d(64, 64, 3)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 20)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)
        self.trained = nn.Linear(64, 64)


def test_linear_layers_take_four_bits_embeddings_and_convolutions_bfloat16() -> None:
    model = Mixed()
    store(model)
    kinds = {name: type(one) for name, one in model.named_parameters() if one.ndim > 1}
    assert kinds == {
        "embed.weight": Bfloat16Weight,
        "first.weight": Nf4Weight,
        "mix.weight": Bfloat16Weight,
        "trained.weight": nn.Parameter,
    }
    assert model.head.weight is model.embed.weight
    assert model.norm.weight.dtype is torch.float32
    sizes = {slot.name: slot.num_bytes for slot in layout_of(model).frozen}
    assert sizes["first.weight"] == 64 * 36
    before = model.first.weight * 1
    ModelImage(model)
    assert isinstance(model.first.weight, Nf4Weight)
    assert torch.equal(model.first.weight * 1, before)


def test_what_cannot_be_stored_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="nf4 is set, and no linear layer"):
        store(nn.Sequential(nn.Linear(2, 2), nn.Embedding(2, 2).requires_grad_(False)))
    layer = nn.Linear(2, 2).requires_grad_(False)
    broken = nn.Sequential(layer)
    layer.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match=r"0\.weight has a number that is not finite"):
        store(broken)
    layer.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModel, match=r"0\.weight is int8"):
        store(broken)


def test_a_change_of_a_stored_weight_is_refused_and_never_lost() -> None:
    weight = pair()[0].get_parameter("weight")
    with pytest.raises(UnsupportedModel, match="mul_ would change a frozen weight"):
        weight.mul_(2)
    with pytest.raises(UnsupportedModel, match="__setitem__ would change"):
        weight[0] = 0.0
    with pytest.raises(UnsupportedModel, match="add_ would change"):
        weight.data += 1.0
