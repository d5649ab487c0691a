"""A model as it is sent to devices: whole, or as a difference to one that a device holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headwater.common.model.layout import ModelLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDifference:
    """What turns one model into another; both are named by the SHA-256 of their vectors, in hex."""

    base_id: str
    """Empty: the model whose parameters are all zero, which every device can make."""
    image_id: str
    method: str
    """How ``data`` is encoded (``headwater.common.compression.model_difference.METHODS``)."""
    data: bytearray = field(repr=False)


class SentModel(Protocol):
    """A model as it is sent to devices: the server's own, or the one that follows it."""

    @property
    def layout(self) -> ModelLayout: ...
    @property
    def digest(self) -> bytes:
        """The SHA-256 of the vector and of the frozen part's digest."""
        ...

    def difference_from(self, held_id: str) -> ModelDifference | None:
        """Return what a device needs that holds this model; None: the whole model.

        An empty id is a device that holds none. It may be called from any thread.
        """
        ...

    def buffer(self) -> memoryview:
        """Return the memory of the trainable parameters."""
        ...


FindDifference = Callable[[str], ModelDifference | None]
"""``SentModel.difference_from``."""
