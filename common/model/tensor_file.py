"""Writes tensors as a safetensors file: directly from their memory, under the given name.

``safetensors.torch.save_file`` 0.8 needs no more memory (both write 400 MB without a second copy),
but it writes to a temporary file with a random name and renames that. A process that is killed
meanwhile leaves it in the folder: three kills in a test left three files of 400 MB. It also orders
the metadata differently in each process, so equal models would not give equal bytes. It reads these
files: eight bytes of length, a header in JSON, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
