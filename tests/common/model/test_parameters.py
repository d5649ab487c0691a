"""The model image: its layout, its digest, and the models that are refused."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headwater.common.errors import (
    BatchDependentLayer,
    ModelMismatch,
    SettingsError,
    TaskError,
    UnsupportedModel,
)
from headwater.common.model.batch_norm import (
    freeze_statistics,
    replace_batch_norm_by_group_norm,
    replay,
)
from headwater.common.model.layout import layout_of
from headwater.common.model.parameters import (
    ModelImage,
    build_model,
    state_dict,
)
from headwater.server.rounds.initial_model import load_initial
from tests.tasks import TwoLayers


class Mixed(nn.Module):
    """Tied weights, a frozen layer, buffers of several dtypes, one of them not kept."""

    def __init__(self, *, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(width, 1, dtype=torch.float64).requires_grad_(False)
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def num_trainable(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_moving_into_the_image_changes_no_value() -> None:
    torch.manual_seed(0)
    model = Mixed()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    after = ModelImage(model).model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_every_tensor_is_a_view_into_the_vector_or_into_the_frozen_part() -> None:
    image = ModelImage(Mixed())
    trained = {id(parameter) for parameter in image.trainable()}
    for tensor in (*image.model.parameters(), *image.model.buffers()):
        block = image.bytes_U8 if id(tensor) in trained else image.frozen_U8
        start = block.data_ptr()
        assert start <= tensor.data_ptr() <= start + block.nbytes - tensor.nbytes


def test_tied_parameters_are_counted_once_and_stay_tied() -> None:
    model = Mixed()
    image = ModelImage(model)
    assert image.layout.num_parameters == num_trainable(model) == 5 * 3 + 5
    assert model.head.weight is model.embed.weight


def test_frozen_parameters_and_buffers_are_no_part_of_the_image_and_are_aligned() -> None:
    layout = ModelImage(Mixed()).layout
    names = {slot.name for slot in layout.frozen}
    assert names == {"frozen.weight", "frozen.bias", "flag", "steps", "scratch"}
    assert layout.num_bytes == 4 * layout.num_parameters
    for slot in layout.frozen:
        assert slot.offset_bytes % getattr(torch, slot.dtype).itemsize == 0


def test_the_tensors_of_a_block_follow_each_other_without_gaps() -> None:
    layout = ModelImage(Mixed()).layout
    sizes = (layout.num_bytes, layout.num_frozen_bytes)
    for slots, num_bytes in zip((layout.trainable, layout.frozen), sizes, strict=True):
        end = 0
        for slot in slots:
            assert slot.offset_bytes == end
            end += slot.num_elements * getattr(torch, slot.dtype).itemsize
        assert end == num_bytes


def test_image_and_frozen_part_loaded_elsewhere_give_the_same_model_with_buffers() -> None:
    torch.manual_seed(1)
    one = ModelImage(Mixed())
    torch.manual_seed(2)
    other = ModelImage(Mixed())
    with torch.no_grad():
        one.model.get_buffer("steps").fill_(41)
    other.load(bytes(one.buffer()))
    other.frozen_buffer()[:] = bytes(one.frozen_buffer())
    assert int(other.model.get_buffer("steps")) == 41
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor)


@pytest.mark.parametrize("change", [-1, 1])
def test_an_image_of_another_length_is_refused_and_changes_nothing(change: int) -> None:
    image = ModelImage(Mixed())
    before = bytes(image.buffer())
    with pytest.raises(ModelMismatch, match="bytes"):
        image.load(bytes(len(before) + change))
    assert bytes(image.buffer()) == before


def test_the_digest_is_equal_for_equal_layouts_whatever_the_values() -> None:
    torch.manual_seed(1)
    one = ModelImage(Mixed()).layout.digest
    torch.manual_seed(2)
    assert ModelImage(Mixed()).layout.digest == one


class Named(nn.Module):
    """One tensor, under a name, of a shape and a dtype, trainable or not."""

    def __init__(self, name: str, shape: tuple[int, ...], *, is_frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1))
        self.register_parameter(name, nn.Parameter(torch.zeros(shape), not is_frozen))


@pytest.mark.parametrize(
    "other",
    [Named("b", (2, 3)), Named("a", (3, 2)), Named("a", (6,)), Named("a", (2, 3), is_frozen=True)],
)
def test_the_digest_depends_on_name_shape_and_frozenness(other: nn.Module) -> None:
    digest = ModelImage(Named("a", (2, 3))).layout.digest
    assert ModelImage(other).layout.digest != digest


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_trainable_parameter_that_is_not_float32_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedModel, match="weight is "):
        ModelImage(nn.Linear(2, 2, dtype=dtype))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2, device="meta"), "weight is on the device meta"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, device="meta")), "1.weight is on the"),
    ],
)
def test_a_tensor_without_memory_on_the_cpu_is_refused_by_name(
    model: nn.Module, words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words) as raised:
        layout_of(model)
    assert "model on the CPU" in (raised.value.remedy or "")


def test_a_complex_parameter_is_refused_with_how_to_hold_its_parts() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(UnsupportedModel, match="weight is complex64") as caught:
        ModelImage(model)
    assert "view_as_real" in caught.value.remedy


def sharing(view_of: Callable[[Tensor], Tensor], *, as_buffer: bool = False) -> nn.Module:
    """Return two layers of 4 x 4, of which the second is a view of the first one's values."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    second, values = cast(nn.Linear, model[1]), cast(nn.Linear, model[0]).weight.data
    if as_buffer:
        second.register_buffer("copy", view_of(values))
    else:
        second.weight.data = view_of(values)
    return model


@pytest.mark.parametrize("as_buffer", [False, True])
@pytest.mark.parametrize(
    "view_of", [lambda w: w, lambda w: w.t(), lambda w: w[:2], lambda w: w[1:3], lambda w: w[0, 0]]
)
def test_a_trained_parameter_in_the_memory_of_another_tensor_is_refused(
    view_of: Callable[[Tensor], Tensor], as_buffer: bool
) -> None:
    with pytest.raises(UnsupportedModel, match=r"0\.weight") as caught:
        ModelImage(sharing(view_of, as_buffer=as_buffer))
    assert "1." in caught.value.message
    assert "b.weight = a.weight" in caught.value.remedy


def test_slices_of_one_tensor_that_share_no_element_and_frozen_aliases_are_accepted() -> None:
    whole, model = torch.randn(4, 8), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, part in zip(model, (whole[:, :4], whole[:, 4:]), strict=True):
        cast(nn.Linear, layer).weight.data = part
    ModelImage(model)
    ModelImage(nn.Sequential(sharing(lambda w: w).requires_grad_(False), nn.Linear(4, 4)))


def test_a_tensor_that_no_file_can_hold_is_refused_before_the_first_round() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedModel, match="phases is complex128"):
        ModelImage(model)


def test_a_task_that_returns_no_module_is_told_so() -> None:
    class Forgetful(TwoLayers):
        def new_model(self) -> nn.Module:
            return None  # type: ignore[return-value]

    with pytest.raises(TaskError, match=r"must return a torch\.nn\.Module, found NoneType"):
        build_model(Forgetful(), seed=0)


def test_a_lazy_layer_without_shape_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"0\.weight has no shape yet"):
        ModelImage(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_without_a_trainable_parameter_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedModel, match="no trainable parameter") as caught:
        ModelImage(model)
    assert "requires_grad" in caught.value.remedy


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(norm), nn.Conv2d(8, 1, 1))


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(8), nn.SyncBatchNorm(8), nn.InstanceNorm2d(8, track_running_stats=True)],
)
def test_a_layer_that_mixes_the_batch_is_refused_by_name(norm: nn.Module) -> None:
    with pytest.raises(BatchDependentLayer, match=rf"1\.0 \({type(norm).__name__}\)"):
        ModelImage(normed(norm))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_divides_by_the_frequency_in_the_batch_is_refused(kind: Any) -> None:
    model = nn.Sequential(kind(9, 2, scale_grad_by_freq=True), nn.Linear(2, 2))
    with pytest.raises(BatchDependentLayer, match="scale_grad_by_freq in 0 ") as caught:
        ModelImage(model)
    assert "leave scale_grad_by_freq out" in caught.value.remedy
    model[0].requires_grad_(False)
    ModelImage(model)


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm([8, 1, 1])]
)
def test_a_layer_that_does_not_mix_the_batch_is_accepted(norm: nn.Module) -> None:
    ModelImage(normed(norm))


class Kept(nn.Sequential):
    """Keeps its first layer in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self[0].eval()
        return self


def test_a_batch_norm_that_the_model_keeps_in_evaluation_mode_is_accepted() -> None:
    model = Kept(nn.BatchNorm1d(2), nn.Linear(2, 2)).train()
    ModelImage(model)
    assert [module.training for module in model.modules()] == [True, False, True]


def test_a_batch_norm_in_evaluation_mode_that_training_would_switch_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).eval()
    with pytest.raises(BatchDependentLayer):
        ModelImage(model)
    assert not any(module.training for module in model.modules())


def test_frozen_statistics_stay_frozen_in_training_mode_and_in_a_copy() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    freeze_statistics(model)
    for one in (model, copy.deepcopy(model)):
        one.train()
        before = one.state_dict()["0.running_mean"].clone()
        both, first = one(torch.tensor([[1.0, 2], [5, 6]])), one(torch.tensor([[1.0, 2]]))
        assert both[:1].equal(first)
        assert one.state_dict()["0.running_mean"].equal(before)
    assert copy.deepcopy(model)[0].train() is not model[0]


def test_a_batch_norm_without_statistics_cannot_be_frozen() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))
    freeze_statistics(model)
    with pytest.raises(BatchDependentLayer, match="BatchNorm1d"):
        ModelImage(model)


def test_a_replaced_batch_norm_keeps_scale_and_shift() -> None:
    norm = nn.BatchNorm2d(8)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
        norm.bias.copy_(-torch.arange(8.0))
    model = normed(norm)
    replace_batch_norm_by_group_norm(model)
    image = ModelImage(model)
    found = image.model.get_submodule("1.0")
    assert isinstance(found, nn.GroupNorm)
    assert found.weight.tolist() == list(range(8))
    assert found.bias.tolist() == [-channel for channel in range(8)]


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (48, 24), (96, 32), (7, 7), (37, 1), (33, 11)]
)
def test_the_groups_are_the_largest_divisor_up_to_32(channels: int, groups: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(channels))
    replace_batch_norm_by_group_norm(model)
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0].num_groups == groups


def test_a_batch_norm_that_is_used_twice_becomes_one_group_norm_and_is_replayed_as_one() -> None:
    def new_model() -> nn.Sequential:
        norm = nn.BatchNorm2d(4)
        return nn.Sequential(norm, nn.ReLU(), nn.Sequential(nn.ReLU(), norm))

    model, again = new_model(), new_model()
    replaced = replace_batch_norm_by_group_norm(model)
    replay(again, replaced)
    for one in (model, again):
        assert isinstance(one[0], nn.GroupNorm)
        assert one[0] is one.get_submodule("2.1")


@pytest.mark.parametrize("channels", [2, 8, 32, 64])
def test_a_replaced_batch_norm_over_flat_features_lets_the_gradient_through(channels: int) -> None:
    """Groups of one channel would make every output zero; groups of two, plus or minus one."""
    model = nn.Sequential(nn.BatchNorm1d(channels))
    replace_batch_norm_by_group_norm(model)
    one, two = torch.arange(2.0 * channels).square().view(2, channels)
    out = model(torch.stack([one, two]))
    assert len(set(out[0].tolist())) == channels


def test_a_model_with_replaced_batch_norm_has_an_additive_loss(tmp_path: Path) -> None:
    model = normed(nn.BatchNorm2d(8))
    replace_batch_norm_by_group_norm(model)
    pair_BCHW = torch.rand(2, 3, 4, 4)
    together, alone = model(pair_BCHW)[0], model(pair_BCHW[:1])[0]
    assert torch.allclose(together, alone, rtol=0, atol=64 * 2.0**-23)


def test_the_state_dict_survives_a_safetensors_file(tmp_path: Path) -> None:
    torch.manual_seed(3)
    image = ModelImage(Mixed())
    save_file(state_dict(image), tmp_path / "model.safetensors")
    torch.manual_seed(4)
    other = ModelImage(Mixed())
    load_initial(other, tmp_path / "model.safetensors")
    assert torch.equal(other.values_P, image.values_P)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(other.model.state_dict()[name], tensor)


def test_the_state_dict_of_a_plain_torch_model_fits_the_image(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    image = build_model(TwoLayers(), seed=0)
    load_initial(image, tmp_path / "model.safetensors")
    flat_P = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(image.values_P, flat_P)


def test_a_missing_initial_model_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.safetensors"):
        load_initial(build_model(TwoLayers(), seed=0), tmp_path / "absent.safetensors")


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08" + bytes(7) + b"{" * 8])
def test_an_initial_model_of_another_format_is_a_settings_error(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SettingsError, match="cannot be read"):
        load_initial(build_model(TwoLayers(), seed=0), tmp_path / "model.safetensors")


def without_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in state.items() if name != "1.bias"}


def of_another_shape(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "1.bias": torch.zeros(2)}


def with_one_more(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**state, "2.bias": torch.zeros(2)}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (without_bias, "1.bias of shape (1) is not in the file"),
        (of_another_shape, "1.bias has shape (2) in the file, (1) in the task's model"),
        (with_one_more, "2.bias of shape (2) is not in the task's model"),
    ],
)
def test_an_initial_model_of_another_layout_is_a_mismatch_that_names_the_tensor(
    tmp_path: Path, changed: Callable[[dict[str, Tensor]], dict[str, Tensor]], named: str
) -> None:
    image = build_model(TwoLayers(), seed=0)
    save_file(changed(state_dict(image)), tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatch, match=re.escape(named)):
        load_initial(image, tmp_path / "model.safetensors")


def test_the_seed_alone_determines_the_initial_model() -> None:
    one, again, other = (build_model(TwoLayers(), seed=s).values_P for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_threads_that_build_at_once_build_the_same_model() -> None:
    """As a server and its clients in one process do."""
    task = TwoLayers()

    def weights(seed: int) -> list[float]:
        return build_model(task, seed=seed).values_P[:8].tolist()

    expected = [weights(seed) for seed in (0, 1)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(weights, [0, 1] * 100))
    assert found == expected * 100


class DrawnElsewhere(TwoLayers):
    """A fixed projection whose numbers are of numpy's and of Python's generators."""

    def new_model(self) -> nn.Module:
        model = super().new_model()
        model.projection = torch.from_numpy(np.random.randn(3))
        model.shift = random.random()  # type: ignore[assignment]
        return model


def test_a_model_draws_the_same_numbers_wherever_it_is_built() -> None:
    """On the server, on each device, and where its file is loaded."""
    np.random.seed(1)
    random.seed(1)
    first: Any = build_model(DrawnElsewhere(), seed=3).model
    drawn = np.random.rand(), random.random()
    second: Any = build_model(DrawnElsewhere(), seed=3).model
    assert torch.equal(first.projection, second.projection)
    assert first.shift == second.shift
    np.random.seed(1)
    random.seed(1)
    assert drawn == (np.random.rand(), random.random()), "the process's own numbers go on"
