"""Which model each simulated device holds: what a round would have sent it over the wire."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from headwater.common.flower.sent_model import FindDifference, SentModel


class HeldModels:
    """The models that devices were last sent, by the devices' names.

    A device begins with the model that it built by its task and seed: where the run begins with the
    same, none is sent. In the simulator all devices share one model's memory, and no bytes travel.
    """

    def __init__(self, built_id: str) -> None:
        """``built_id`` is the SHA-256 of what devices build."""
        self._built_id = built_id
        self._held: dict[str, str] = {}

    def sent(self, names: Iterable[str], image: SentModel) -> int:
        """Note that devices are sent a model; return the bytes, which differences make fewer."""
        image_id = hashlib.sha256(image.buffer()).hexdigest()
        whole_bytes = image.layout.num_bytes
        return sum(
            self.sent_to(name, image_id, whole_bytes, image.difference_from) for name in names
        )

    def sent_to(
        self, name: str, image_id: str, whole_bytes: int, difference_from: FindDifference
    ) -> int:
        """Do the same for one device, and a model of this digest and length."""
        held = self._held.get(name, self._built_id)
        self._held[name] = image_id
        if held == image_id:
            return 0
        difference = difference_from(held)
        return whole_bytes if difference is None else len(difference.data)
