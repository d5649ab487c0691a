"""A model whose frozen weights have no room as they are built is built without their values."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from headwater.client.memory.peak_model import resident_bytes
from headwater.client.memory.process_limits import MemoryLimit
from headwater.client.trainer.trainer import built_or_sent
from headwater.common.errors import OutOfMemory
from headwater.common.frozen import nf4_weights
from headwater.common.model.bfloat16_weights import store_in_bfloat16
from headwater.common.model.layout import is_stand_in, memory_of
from headwater.common.model.parameters import ModelImage
from headwater.common.system.heap import release_freed_memory

pytestmark = pytest.mark.usefixtures("collected")

MIB = 2**20
WIDTH, LAYER = 2048, 16  # MiB of a layer in float32; 2.25 in four bits
NUM_LAYERS = 16


@pytest.fixture
def collected() -> Iterator[None]:
    """Free what a test has built: other tests measure this process."""
    yield
    gc.collect()
    release_freed_memory()


class Adapted(nn.Module):
    """Frozen layers beside one that trains, and a table that ``new_model`` computes."""

    num_layers = NUM_LAYERS

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.num_layers))
        self.base = nn.Sequential(*layers).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 2)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.register_buffer("table", torch.arange(float(MIB)))

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.base(values)))
        return found


def weight_of(model: nn.Module, layer: int) -> Tensor:
    return model.get_parameter(f"base.{layer}.weight")


class Small(Adapted):
    num_layers = 2


class Narrow(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.base.to(torch.bfloat16)


class Scaled(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.scale = weight_of(self, 0).abs().max().item()


class Doubled(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.other = weight_of(self, 0) * 2


class WithOwnTensor(Adapted):
    def __init__(self) -> None:
        super().__init__()
        self.outside = [torch.empty(MIB).fill_(3.0)]


def room_for(num_mib: int) -> Callable[[], MemoryLimit]:
    gc.collect()
    release_freed_memory()
    limit = MemoryLimit(num_bytes=resident_bytes() + num_mib * MIB, source="cgroup's memory.max")
    return lambda: limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "store", "num_mib"),
    [
        pytest.param(Adapted, nf4_weights.store, 64, id="four bits"),
        pytest.param(Narrow, nf4_weights.store, 64, id="bfloat16 in four bits"),
        pytest.param(Adapted, store_in_bfloat16, 180, id="bfloat16"),
    ],
)
def test_frozen_weights_take_no_memory_until_they_are_sent(
    kind: type[Adapted],
    store: Callable[[nn.Module], None],
    num_mib: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    limit, before = room_for(num_mib), resident_bytes()
    model = cast(Adapted, built_or_sent(limit, kind, store))
    assert all(is_stand_in(memory_of(one)) for one in model.base.parameters())
    image = ModelImage(model)
    assert image.frozen_digest  # it reads all of them
    release_freed_memory()
    held = resident_bytes() - before
    assert held < 2 * LAYER * MIB  # the table, and what trains; in four bits 36 are sent beside it
    assert "the server sends its frozen part" in caplog.text.lower()

    torch.manual_seed(0)
    whole = kind()
    store(whole)
    real = ModelImage(whole)
    assert image.layout.digest == real.layout.digest
    assert torch.equal(dict(model.named_buffers())["table"], torch.arange(float(MIB)))
    assert torch.equal(model.norm.weight, torch.ones(WIDTH))
    image.frozen_buffer()[:] = real.frozen_U8.numpy().data
    image.load(real.buffer())
    values = torch.randn(3, WIDTH)
    assert torch.equal(model(values), whole(values))


def test_a_model_that_has_room_is_as_the_task_builds_it() -> None:
    torch.manual_seed(3)
    plain = Small()
    torch.manual_seed(3)
    model = built_or_sent(room_for(40 * LAYER), Small, nf4_weights.store)
    nf4_weights.store(plain)
    assert torch.equal(ModelImage(model).frozen_U8, ModelImage(plain).frozen_U8)


def test_a_large_weight_that_trains_begins_at_zero() -> None:
    def half_frozen() -> Adapted:
        model = Adapted()
        weight_of(model, 0).requires_grad_(True)
        return model

    model = cast(Adapted, built_or_sent(room_for(6 * LAYER), half_frozen, nf4_weights.store))
    assert not is_stand_in(weight_of(model, 0))
    assert not weight_of(model, 0).any()
    assert is_stand_in(memory_of(weight_of(model, 1)))


@pytest.mark.parametrize(
    ("kind", "num_mib"),
    [
        pytest.param(Adapted, 20, id="no room in four bits either"),
        pytest.param(Scaled, 64, id="a value is read"),
        pytest.param(Doubled, 64, id="something is computed from the values"),
        pytest.param(WithOwnTensor, 64, id="a tensor is no part of the model"),
    ],
)
def test_a_model_that_needs_its_values_or_more_room_is_refused(
    kind: type[Adapted], num_mib: int
) -> None:
    with pytest.raises(OutOfMemory, match=r"beside .* that the process holds"):
        built_or_sent(room_for(num_mib), kind, nf4_weights.store)


def test_frozen_weights_that_would_fit_in_four_bits_are_refused_with_that_remedy() -> None:
    with pytest.raises(OutOfMemory) as caught:
        built_or_sent(room_for(64), Adapted, lambda model: None)
    assert "--frozen-dtype nf4" in caught.value.remedy
    with pytest.raises(OutOfMemory) as caught:
        built_or_sent(room_for(20), Adapted, nf4_weights.store)
    assert "--frozen-dtype" not in caught.value.remedy


def test_a_model_without_frozen_weights_is_refused() -> None:
    def trained() -> nn.Module:
        return Adapted().requires_grad_(True)

    with pytest.raises(OutOfMemory):
        built_or_sent(room_for(64), trained, lambda model: None)
