"""A float32 vector, or bytes, as a field of a plan's terms: what is sent beside the model."""

from __future__ import annotations

import base64
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
        data = _bytes(found)
        if len(data) % 4:
            raise ValueError("no whole number of float32 values")
        values = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    else:
        raise ValueError("a tensor, or its values in base64")
    return values


def _write(values: Tensor) -> str:
    return _text(values.numpy().astype("<f4").tobytes())


def _bytes(found: Any) -> bytes:
    if isinstance(found, bytes):
        return found
    if not isinstance(found, str):
        raise ValueError("bytes, or their base64")
    try:
        return base64.b64decode(found, validate=True)
    except ValueError as error:
        raise ValueError("no base64") from error


def _text(data: bytes) -> str:
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"a tensor of {len(data):,} bytes beside the model: a plan has room for {MAX_BYTES:,}"
        )
    return base64.b64encode(data).decode()


Values: TypeAlias = Annotated[Tensor, PlainValidator(_read), PlainSerializer(_write)]
"""A float32 vector; give it a tensor of any shape, which is read back flat."""
Bytes: TypeAlias = Annotated[bytes, PlainValidator(_bytes), PlainSerializer(_text)]
"""Bytes whose meaning the terms know."""
