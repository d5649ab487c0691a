"""A float32 vector as a field of a plan's terms: a tensor that is sent beside the model."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

MAX_BYTES = 700 << 10
"""A plan is one frame of the wire, of 1 MiB; in base64 each three bytes take four."""


def _read(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        values = found.detach().to(torch.float32).reshape(-1)
    elif isinstance(found, str):
        try:
            data = base64.b64decode(found, validate=True)
        except binascii.Error as error:
            raise ValueError("no base64") from error
        if len(data) % 4:
            raise ValueError("no whole number of float32 values")
        values = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    else:
        raise ValueError("a tensor, or its values in base64")
    return values


def _write(values: Tensor) -> str:
    data = values.numpy().astype("<f4").tobytes()
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"a tensor of {len(data):,} bytes beside the model: a plan has room for {MAX_BYTES:,}"
        )
    return base64.b64encode(data).decode()


Values: TypeAlias = Annotated[Tensor, PlainValidator(_read), PlainSerializer(_write)]
"""A float32 vector; give it a tensor of any shape, which is read back flat."""
