"""Receives a model, its frozen part or a difference, in chunks, into the trainer's memory."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from headwater.client.node_features import difference_reader
from headwater.common.errors import ProtocolMismatch, UpdateRefused
from headwater.common.transport.wire_pb2 import Chunk, Image


class ModelBroken(Exception):
    """The received model is not the announced one; the server sends it again on a new stream."""


class IncomingDifference:
    """A rounded difference that is being received; each piece is added to the model as it comes."""

    is_frozen = False

    def __init__(self, image: Image, memory: memoryview) -> None:
        """``memory`` is the model that the difference is to.

        Raises:
            ProtocolMismatch: see ``difference_reader``.
        """
        self._reader = difference_reader(image.difference, image.num_bytes, memory)
        self.image_id = image.image_id
        self.num_bytes = image.num_bytes
        self.seconds = 0.0  # from the announcement to the latest chunk
        self._sha256 = image.sha256
        self._memory = memory
        self._received = 0
        self._start = time.monotonic()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises:
            ProtocolMismatch: it is out of order.
            ModelBroken: it is no difference.
        """
        end = self._received + len(chunk.data)
        if chunk.offset != self._received or end > self.num_bytes:
            raise ProtocolMismatch("the server sent a chunk of its model out of order")
        try:
            self._reader.add(chunk.data)
        except UpdateRefused as error:
            raise ModelBroken(str(error)) from error
        self._received = end
        self.seconds = time.monotonic() - self._start

    def verify(self) -> None:
        """Check the model that resulted against its digest.

        Raises:
            ModelBroken: the digest is not the announced one.
        """
        is_whole = self._reader.is_complete
        if not is_whole or hashlib.sha256(self._memory).digest() != self._sha256:
            raise ModelBroken("the model and its difference do not add up to the announced model")


class IncomingImage:
    """A model, or its frozen part, that is being received."""

    def __init__(
        self, image: Image, memory: memoryview, digest: Any, *, is_beside: bool = False
    ) -> None:
        """``is_beside``: the memory is not the trainer's, which is in use."""
        self.is_beside = is_beside
        self.image_id = image.image_id
        self.is_frozen = image.is_frozen
        self.num_bytes = len(memory)
        self.seconds = 0.0  # from the announcement to the latest chunk
        self.memory = memory
        self._sha256 = image.sha256
        self._received = 0
        self._digest = digest
        self._start = time.monotonic()

    def add(self, chunk: Chunk) -> None:
        """Take the next chunk.

        Raises:
            ProtocolMismatch: it is out of order.
        """
        end = self._received + len(chunk.data)
        if chunk.offset != self._received or end > len(self.memory):
            raise ProtocolMismatch("the server sent a chunk of its model out of order")
        self.memory[self._received : end] = chunk.data
        self._digest.update(chunk.data)
        self._received = end
        self.seconds = time.monotonic() - self._start

    def verify(self) -> None:
        """Check the complete model against its digest.

        Raises:
            ModelBroken: the digest is not the announced one.
        """
        if self._received != len(self.memory) or self._digest.digest() != self._sha256:
            raise ModelBroken("the received model is not the announced one")
