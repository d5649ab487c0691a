"""The model that is in this process's memory: the server's of some version, or the task's own."""

from __future__ import annotations

import hashlib

from torch import Tensor

from headwater.common.messages import DescribeRequest
from headwater.common.model.frozen_part import Fingerprint
from headwater.common.model.mismatch import mismatch_error
from headwater.common.model.parameters import ModelImage


class LoadedModel:
    """Knows which model a process's parameters are, and loads the server's into them."""

    def __init__(self, image: ModelImage) -> None:
        self.image = image
        self.version: tuple[int, int] | None = None
        """The run and the version of the server's model that is loaded; None: another."""
        self.frozen_source: tuple[Tensor, Fingerprint] | None = None
        """The server's frozen part, where it is in the memory of this machine: in a simulation."""
        digest = hashlib.sha256(image.buffer())
        self.built_id = digest.hexdigest()
        """The SHA-256 of the parameters as the task built them, in hexadecimal."""
        # A second model would be as many bytes again.
        self._own_digest = _with_frozen(digest, image)

    def load(self, run_id: int, version: int, image: memoryview | bytes) -> None:
        """Load the server's parameters unless this version of them is loaded already.

        Raises:
            ModelMismatch: their size differs.
            BuffersChanged: the frozen part changed, unnoticed, since it was loaded.
        """
        if self.version != (run_id, version):
            self.version = None
            self.restore_frozen()
            self.image.check_frozen()
            self.image.load(image)
            self.version = (run_id, version)

    def restore_frozen(self) -> None:
        """Load the frozen part from its source, if there is one and it is not loaded."""
        if self.frozen_source is not None and self.image.fingerprint is None:
            frozen_U8, fingerprint = self.frozen_source
            self.image.frozen_buffer()[:] = frozen_U8.numpy().data
            self.image.fingerprint = fingerprint

    def share_frozen(self, image: ModelImage) -> None:
        """Take the frozen part from the server's model in this process, now and after changes."""
        if image.layout.frozen and image.fingerprint is not None:
            self.frozen_source = image.frozen_U8, image.fingerprint
            self.image.fingerprint = None

    def forget(self) -> None:
        """Load the server's model again with the next plan: training changed a buffer."""
        self.version = None
        self.image.fingerprint = None

    def check_layout(self, name: str, request: DescribeRequest) -> None:
        """Check that the server's model has this device's layout.

        Raises:
            ModelMismatch: with the first tensor that differs.
        """
        if request.layout_digest == self.image.layout.digest:
            return
        layout, there = self.image.layout, "the server's model"
        raise mismatch_error(
            f"{name}: this device's model has {layout.num_parameters:,} parameters, "
            f"{there} has {request.num_parameters:,}",
            layout.rows,
            request.layout,
            here="this device's",
            there=there,
        )

    def is_own(self) -> bool:
        """Whether the model is the one that the task builds here, not one of the server's."""
        return _with_frozen(hashlib.sha256(self.image.buffer()), self.image) == self._own_digest


class FirstModel:
    """Knows whether a run's model is still the one that devices build, which is not sent."""

    def __init__(self, built_id: str) -> None:
        """``built_id`` is the SHA-256 of what devices build."""
        self._built_id = built_id
        self._has_moved = False

    def num_bytes(self, model: memoryview | bytes) -> int:
        """Return the bytes of a model that is sent whole: none where devices have built it."""
        if not self._has_moved:
            self._has_moved = hashlib.sha256(model).hexdigest() != self._built_id
        return len(model) if self._has_moved else 0


def _with_frozen(digest: hashlib._Hash, image: ModelImage) -> bytes:
    """Return the SHA-256 of parameters and frozen part, of which the parameters are in it."""
    digest.update(image.frozen_U8.numpy().data)
    return digest.digest()
