"""Writes tensors as a safetensors file: directly from their memory, under the given name.

``safetensors.torch.save_file`` 0.8 needs no more memory (both write 400 MB without a second copy),
but it writes to a temporary file with a random name and renames that. A process that is killed
meanwhile leaves it in the folder: three kills in a test left three files of 400 MB. It also orders
the metadata differently in each process, so equal models would not give equal bytes. It reads these
files: eight bytes of length, a header in JSON, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).

A model's tensors have the names of the user's network. ``torch.compile`` and ``nn.DataParallel``
put a module around another, and ``_orig_mod.`` or ``module.`` into the names; a file has them
without. A ``state_dict`` may hold what is no tensor: the ``get_extra_state`` of a module, a packed
weight. A safetensors file cannot have it, and a run does not change it: the task builds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# The names of safetensors, for every type of dense tensor in a state_dict.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ALIGNED_BYTES = 8

# By the names of torch's classes: to import the compiler's takes 74 MB.
INNER = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file; a tensor is copied only if it is not contiguous.

    Tensors with wider elements come first, so that each is aligned, then by name: equal tensors
    give equal bytes.

    Raises:
        OSError: the disk is full, or not writable.
        ValueError: safetensors has no name for a tensor's type.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in ordered:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name}: a safetensors file cannot hold {tensor.dtype}")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, tensor in ordered:
            flat = tensor.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state_dict, by the model's own names."""
    state: dict[str, Any] = model.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors, as ``load_state_dict``; what is no tensor stays as it is.

    Raises:
        RuntimeError: names or shapes differ.
    """
    state: dict[str, Any] = model.state_dict()
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    model.load_state_dict({**others, **tensors})


def without_wrappers(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return each of the model's names, of tensors or of modules, with its name in a file."""
    prefixes = [
        (f"{place}." if place else "", f"{INNER[type(module).__name__]}.")
        for place, module in model.named_modules()
        if type(module).__name__ in INNER and type(module).__module__.startswith("torch.")
    ]
    prefixes.sort(key=lambda pair: -len(pair[0]))  # the innermost first
    found = {}
    for name in names:
        plain = f"{name}."
        for outer, inner in prefixes:
            if plain.startswith(outer + inner):
                plain = outer + plain.removeprefix(outer + inner)
        found[name] = plain.removesuffix(".")
    return found


def with_wrappers(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by the model's own names; those that it has already stay."""
    own = {plain: name for name, plain in without_wrappers(model, tensors_of(model)).items()}
    return {own.get(name, name): tensor for name, tensor in tensors.items()}
