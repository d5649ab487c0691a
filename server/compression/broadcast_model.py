"""The model that devices hold, where they are sent differences: it follows the server's own.

It costs the server a second vector (4 bytes per parameter), and the differences of the latest
rounds within a limit (``DifferenceHistory``), for any number of devices. Gradients are taken at
this model, and the step is taken on the server's own.
"""

from __future__ import annotations

import hashlib
from threading import Lock

import torch
from torch import Tensor

from headwater.common.compression.model_difference import adds_exactly, move_towards
from headwater.common.compression.terms import DifferenceMethod
from headwater.common.flower.sent_model import ModelDifference
from headwater.common.model.layout import ModelLayout
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import all_finite
from headwater.server.compression.difference_history import DifferenceHistory


class BroadcastModel:
    """The vector as devices hold it, and the differences that led to it."""

    def __init__(self, image: ModelImage, method: DifferenceMethod, *, history_bytes: int) -> None:
        """``history_bytes`` bounds the differences that are stored."""
        self._image, self._method = image, method
        self.bytes_U8 = torch.zeros_like(image.bytes_U8)
        self.version: int | None = None
        """The version of the server's model that it follows; None before the first."""
        self._image_id = ""
        self._history = DifferenceHistory(self._values(), method, max_bytes=history_bytes)
        self._lock = Lock()  # devices are sent differences from other threads
        self._summing = Lock()

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
        """Take over what a checkpoint stored; the next difference is to this model.

        Raises:
            ValueError: no run has stored such.
        """
        is_whole = bytes_U8.dtype is torch.uint8 and bytes_U8.shape == self.bytes_U8.shape
        if not is_whole or type(version) is not int or version < 0:
            raise ValueError("the broadcast model is not one of this run")
        if not all_finite(bytes_U8.view(torch.float32)):
            raise ValueError("the broadcast model is not finite")
        with self._lock:
            self.bytes_U8.copy_(bytes_U8)
            self.version = version
            self._image_id = hashlib.sha256(self.buffer()).hexdigest()
            self._history.clear()

    def follow(self, version: int) -> None:
        """Move towards the server's model, which now is ``version``; does nothing a second time."""
        if version == self.version:
            return
        with self._lock:
            is_first, base_id = self.version is None, self._image_id
            data = None
            if is_first and not adds_exactly(self._method):
                self.bytes_U8.copy_(self._image.bytes_U8)
            else:
                data = move_towards(
                    self._values(), self._image.values_P, self._method, is_first=is_first
                )
            self.version, self._image_id = version, hashlib.sha256(self.buffer()).hexdigest()
            if data is None:
                self._history.clear()
            elif not is_first:
                latest = ModelDifference(
                    base_id=base_id, image_id=self._image_id, method=self._method, data=data
                )
                self._history.add(latest)

    def difference_from(self, held_id: str) -> ModelDifference | None:
        """See ``SentModel``.

        What is summed for one device holds up others that ask, and no round.
        """
        with self._summing:
            with self._lock:
                image_id, missed = self._image_id, self._history.to_sum(held_id)
            summed = None if missed is None else self._history.summed(missed, image_id)
            if missed is not None and summed is None:
                return None
            with self._lock:
                if summed is not None and image_id == self._image_id:
                    self._history.note_sum(summed)
                return self._history.difference_from(held_id, self._image_id)

    def _values(self) -> Tensor:
        return self.bytes_U8.view(torch.float32)
