"""What an example or a batch holds: the parts of an object, and the stored parts of a tensor.

A batch may be a tensor, a dict, a tuple, or an object: a dataclass, a class with slots, a graph of
another library. A tensor may be sparse or nested, and then torch has no ``==`` for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def parts_by_name(value: Any) -> dict[str, Any]:
    """Return what an object holds, by attribute; nothing for a number, a text or a class."""
    if isinstance(value, type):
        return {}
    named = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    slots = [slot for slots in named for slot in ((slots,) if isinstance(slots, str) else slots)]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    held.pop("__dict__", None)
    held.pop("__weakref__", None)
    return held | getattr(value, "__dict__", {})


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor is made of; of a sparse one its values are last."""
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [whole.indices(), whole.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
