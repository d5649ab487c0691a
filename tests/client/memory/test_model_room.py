"""A model that does not fit is refused while it is built, before it is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from headwater.client.memory.model_room import built_within
from headwater.client.memory.peak_model import PeakMeter, resident_bytes
from headwater.client.memory.process_limits import MemoryLimit
from headwater.common.errors import OutOfMemory, UnsupportedModel
from headwater.common.system.heap import release_freed_memory

pytestmark = pytest.mark.usefixtures("collected")

MIB = 2**20
LAYER = 16  # MiB of a layer of 2048 x 2048


@pytest.fixture
def collected() -> Iterator[None]:
    """Free at the end what the errors' tracebacks hold: other tests measure this process."""
    yield
    gc.collect()
    release_freed_memory()


def layers(number: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(number)))


def room_for(num_mib: int) -> Callable[[], MemoryLimit]:
    gc.collect()
    release_freed_memory()
    limit = MemoryLimit(num_bytes=resident_bytes() + num_mib * MIB, source="cgroup's memory.max")
    return lambda: limit


def test_a_model_beyond_the_limit_is_refused_with_all_its_bytes_and_never_allocated() -> None:
    limit, before, meter = room_for(5 * LAYER), resident_bytes(), PeakMeter()
    with pytest.raises(OutOfMemory) as caught:
        built_within(limit, lambda: layers(40))
    assert meter.peak_bytes() - before < 10 * LAYER * MIB
    assert "takes 671 MB, and its gradient 671 MB more" in str(caught.value)
    assert "cgroup's memory.max" in str(caught.value)


def test_a_lazy_layer_is_refused_by_the_name_of_its_parameter() -> None:
    with pytest.raises(UnsupportedModel, match=r"0\.weight has no shape yet"):
        built_within(room_for(5 * LAYER), lambda: nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_may_use_sparse_and_nested_tensors_while_it_is_built() -> None:
    """They have no single block of memory to be counted."""

    def graph() -> nn.Module:
        links = torch.eye(4).to_sparse().clone() + torch.zeros(4, 4, layout=torch.sparse_coo)
        row, *_ = torch.nested.nested_tensor([links.coalesce().mul_(2.0).to_dense()[0]]).clone()
        model = nn.Linear(4, 1, bias=False)
        model.weight = nn.Parameter(row.unsqueeze(0))
        return model

    built = built_within(room_for(5 * LAYER), graph)
    assert next(built.parameters()).tolist() == [[2.0, 0.0, 0.0, 0.0]]


def test_a_model_that_leaves_no_room_for_its_gradient_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"134 MB, and its gradient 134 MB more"):
        built_within(room_for(9 * LAYER), lambda: layers(8))


def test_a_frozen_layer_needs_no_room_for_a_gradient() -> None:
    def frozen() -> nn.Module:
        model = layers(8)
        for number in range(6):
            model[number].requires_grad_(False)  # type: ignore[index]
        return model

    built_within(room_for(13 * LAYER), frozen)
    with pytest.raises(OutOfMemory):
        built_within(room_for(13 * LAYER), lambda: layers(8))


def test_weights_that_are_made_together_and_written_later_count_together() -> None:
    class LateWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.empty(LAYER * MIB // 4) for _ in range(10))

    with pytest.raises(OutOfMemory, match="takes 168 MB"):
        built_within(room_for(5 * LAYER), LateWeights)


def test_a_model_that_computes_with_its_weights_is_refused_with_the_bytes_so_far() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(10)
            self.scale = next(self.parameters()).sum().item()
            self.last = self.layers[9].weight.sum().item()  # type: ignore[index]

    with pytest.raises(OutOfMemory, match=r"at least 168 MB"):
        built_within(room_for(5 * LAYER), Scaled)


def test_an_exception_of_the_task_passes() -> None:
    def broken() -> nn.Module:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        built_within(room_for(1000), broken)


def test_a_model_that_fits_has_the_same_bits_as_one_that_nobody_counted() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(encoder, nn.LSTM(16, 16), nn.Conv2d(3, 4, 3))

    plain: dict[str, Tensor] = build().state_dict()
    counted = built_within(room_for(1000), build).state_dict()
    assert plain.keys() == counted.keys()
    assert all(torch.equal(plain[name], counted[name]) for name in plain)
