"""The frozen part: its digest, its file, and what changes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from headwater.common.errors import BuffersChanged
from headwater.common.model import frozen_part
from headwater.common.model.frozen_part import digest_of, fingerprint_of
from headwater.common.model.layout import layout_of
from headwater.common.model.parameters import ModelImage
from tests.adapted import AdaptedNet


def image(seed: int = 0) -> ModelImage:
    torch.manual_seed(seed)
    return ModelImage(AdaptedNet())


def test_equal_frozen_parts_have_equal_digests_whatever_was_trained() -> None:
    one, other = image(), image()
    other.values_P.add_(1)
    assert one.frozen_digest == other.frozen_digest
    assert one.digest != other.digest


def test_a_model_that_trains_as_a_whole_has_no_frozen_part() -> None:
    found = ModelImage(nn.Linear(2, 2))
    assert found.frozen_digest == ""
    assert found.layout.num_frozen_bytes == 0


@pytest.mark.parametrize("name", ["up.weight", "down.weight", "shift"])
def test_one_changed_bit_gives_another_digest(name: str) -> None:
    one, other = image(), image()
    slot = next(slot for slot in other.layout.frozen if slot.name == name)
    other.frozen_buffer()[slot.offset_bytes + slot.num_bytes - 1] ^= 1
    assert one.frozen_digest != other.frozen_digest


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shift", lambda shift: shift.view(2, 4)),
        ("shift", lambda shift: shift.view(torch.int32)),
        ("other", lambda shift: shift),
    ],
    ids=["shape", "dtype", "name"],
)
def test_equal_bytes_under_another_shape_dtype_or_name_have_another_digest(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = AdaptedNet()
    shift = model.get_buffer("shift")
    del model.shift
    model.register_buffer(name, change(shift))
    assert digest_of(layout_of(model), model) != image().frozen_digest


def test_the_digest_of_a_model_in_no_block_is_the_same() -> None:
    torch.manual_seed(0)
    model = AdaptedNet()
    assert digest_of(layout_of(model), model) == image().frozen_digest


def test_a_file_has_the_tensors_by_name_and_dtype_and_maps_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    saved, path = image(), tmp_path / "frozen.safetensors"
    frozen_part.write(path, saved.layout, saved.frozen_U8)
    tensors = load_file(path)
    state = saved.model.state_dict()
    assert tensors.keys() == {slot.name for slot in saved.layout.frozen}
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert tensors["down.weight"].dtype == torch.bfloat16
    frozen_U8 = frozen_part.read(path, saved.layout)
    assert fingerprint_of(saved.layout, frozen_U8).digest == saved.frozen_digest


def test_a_model_computes_with_an_adopted_part_and_writes_no_file(tmp_path: Path) -> None:
    saved, other, path = image(), image(seed=1), tmp_path / "frozen.safetensors"
    frozen_part.write(path, saved.layout, saved.frozen_U8)
    before = path.read_bytes()
    other.load(bytes(saved.buffer()))
    frozen_U8 = frozen_part.read(path, other.layout)
    other.adopt_frozen(frozen_U8, fingerprint_of(other.layout, frozen_U8))
    tokens = torch.arange(11)
    assert torch.equal(other.model(tokens), saved.model(tokens))
    other.frozen_U8.zero_()
    assert not other.model.get_parameter("up.weight").any()
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 7, 100])
def test_a_file_that_was_cut_off_is_a_value_error(size: int, tmp_path: Path) -> None:
    saved, path = image(), tmp_path / "frozen.safetensors"
    frozen_part.write(path, saved.layout, saved.frozen_U8)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="bytes"):
        frozen_part.read(path, saved.layout)


@pytest.mark.parametrize(
    ("name", "words"),
    [("down.weight", "the frozen parameter down.weight"), ("shift", "the buffer shift")],
)
def test_a_change_that_autograd_does_not_count_is_found_by_name(name: str, words: str) -> None:
    changed = image()
    changed.check_frozen()
    assert changed.frozen_digest
    changed.model.state_dict()[name].data.view(-1)[0] += 1
    with pytest.raises(BuffersChanged, match=words):
        changed.check_frozen()
    assert changed.frozen_digest != image().frozen_digest
