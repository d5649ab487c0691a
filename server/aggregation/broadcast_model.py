"""The model that devices hold, where they are sent differences: it follows the server's own.

It costs the server a second vector (4 bytes per parameter) and the latest difference (2 or 1), for
any number of devices. Gradients are taken at this model, and the step is taken on the server's own.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headwater.common.compression.model_difference import (
    DifferenceMethod,
    ModelDifference,
    move_towards,
)
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import ModelImage


class BroadcastModel:
    """The vector as devices hold it, and the difference that led to it."""

    def __init__(self, image: ModelImage, method: DifferenceMethod) -> None:
        self._image, self._method = image, method
        self.bytes_U8 = torch.empty_like(image.bytes_U8)
        self.version: int | None = None
        """The version of the server's model that it follows; None before the first."""
        self.difference: ModelDifference | None = None
        self._image_id = ""

    @property
    def layout(self) -> ModelLayout:
        return self._image.layout

    @property
    def digest(self) -> bytes:
        sha = hashlib.sha256(self.buffer())
        sha.update(bytes.fromhex(self._image.frozen_digest))
        return sha.digest()

    def buffer(self) -> memoryview:
        return self.bytes_U8.numpy().data

    def restore(self, bytes_U8: Tensor, version: int) -> None:
        """Take over what a checkpoint stored; the next difference is to this model."""
        self.bytes_U8.copy_(bytes_U8)
        self.version, self.difference = version, None
        self._image_id = hashlib.sha256(self.buffer()).hexdigest()

    def follow(self, version: int) -> None:
        """Move towards the server's model, which now is ``version``; does nothing a second time."""
        if version == self.version:
            return
        if self.version is None:
            self.restore(self._image.bytes_U8, version)
            return
        values_P = self.bytes_U8.view(torch.float32)
        base_id = self._image_id
        data = move_towards(values_P, self._image.values_P, self._method)
        self.version, self._image_id = version, hashlib.sha256(self.buffer()).hexdigest()
        self.difference = ModelDifference(
            base_id=base_id, image_id=self._image_id, method=self._method, data=data
        )
