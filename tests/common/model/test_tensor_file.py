"""Tensor files: safetensors reads back exactly the tensors that were written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from headwater.common.model.tensor_file import DTYPE_NAMES, write_tensors


def made(dtype: torch.dtype, shape: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    number = int(torch.tensor(shape).prod()) * dtype.itemsize
    raw = torch.randint(0, 2, (number,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.text(min_size=1, max_size=9),
        st.builds(
            made, st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 4), max_size=3)
        ),
        max_size=6,
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=9), st.text(max_size=9), min_size=1),
)
def test_safetensors_reads_back_the_written_tensors(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None
) -> None:
    tensors.pop("__metadata__", None)
    path = tmp_path / "file.safetensors"
    write_tensors(path, tensors, metadata)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        raw = (t.reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(*raw)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or None) == metadata


def test_a_tensor_that_is_not_contiguous_is_written_in_order(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    write_tensors(tmp_path / "file", {"a": tensor})
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)


def test_a_type_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights: a safetensors file cannot hold"):
        write_tensors(tmp_path / "file", {"weights": torch.zeros(2, dtype=torch.complex128)})
