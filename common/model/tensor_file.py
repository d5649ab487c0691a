"""Tensors written as a safetensors file, straight from where they lie into the file that is named.

safetensors' own ``save_file`` writes into a second file of a random name beside it and renames
that: a process that is killed meanwhile would leave one more copy of the model at each kill, which
nobody finds. It reads these files; the format is eight bytes of length, a header in JSON, and the
tensors' bytes without a gap (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# As safetensors names them; all that a state_dict can hold of dense tensors.
NAMES = {
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
    """Write a file; no tensor is copied unless it is not contiguous.

    Wider elements come first, so that each tensor lies aligned, and then they go by name: the same
    tensors make the same bytes.

    Raises:
        OSError: the disk is full, or not writable.
        ValueError: safetensors has no name for a tensor's type.
    """
    found = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    begin = 0
    for name, tensor in found:
        if tensor.dtype not in NAMES:
            raise ValueError(f"{name}: a safetensors file has no {tensor.dtype}")
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for _, tensor in found:
            flat = tensor.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
