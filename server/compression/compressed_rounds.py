"""Rounds whose devices are sent the model as a difference to what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headwater.server.compression.broadcast_model import BroadcastModel
from headwater.server.rounds.features import RunFeature, RunState


class CompressedRounds(RunFeature):
    """Has the run send the model that devices hold in the place of the server's own."""

    def __init__(self, run: RunState) -> None:
        chosen = run.settings.compression
        assert chosen.down != "off"  # see ``FEATURES``
        self._run = run
        self._held = BroadcastModel(run.image, chosen.down, history_bytes=chosen.history_bytes)
        run.held_model = self._held

    def to_json(self) -> dict[str, Any]:
        return {"version": self._held.version}

    def tensors(self) -> Mapping[str, Tensor]:
        return {"held": self._held.bytes_U8}

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if row.get("version") is not None:
            self._held.restore(tensors["held"], row["version"])

    def sending(self) -> None:
        """Move the model that devices hold towards the server's."""
        self._held.follow(self._run.round)
