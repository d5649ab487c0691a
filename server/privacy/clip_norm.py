"""The clip norm of a run: as set, or following a quantile of the devices' norms under noise.

What is followed is the noisy sum of the devices' bits (``common.privacy.clip_bit``), so that the
clip norm and all figures made of it are released like the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headwater.common.privacy.clip_bit import bit_multiplier_of, next_clip
from headwater.common.settings.schema import PrivacySettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipNorm:
    """The clip norm of the next round, and the last round's figures."""

    start: float
    norm: float
    quantile: float | None
    last_norm: float | None = None
    """The clip norm of the last committed round."""
    last_share: float | None = None
    """The noisy share of its devices whose vectors were within it; it may be outside of 0..1."""

    @staticmethod
    def of(chosen: PrivacySettings) -> ClipNorm:
        """Return a new run's clip norm."""
        return ClipNorm(start=chosen.clip, norm=chosen.clip, quantile=chosen.clip_quantile)

    def bit_multiplier(self, noise_multiplier: float, *, num_devices: int) -> float | None:
        """Return the noise multiplier of a round's bits; None if they are not asked for."""
        if self.quantile is None:
            return None
        return bit_multiplier_of(noise_multiplier, num_devices=num_devices)

    def after(self, bit_sum: float | None, *, num_devices: int) -> ClipNorm:
        """Return the clip norm after a committed round with this noisy sum of bits."""
        if self.quantile is None or bit_sum is None:
            return replace(self, last_norm=self.norm)
        share = (bit_sum / num_devices + 1) / 2
        return replace(
            self,
            norm=next_clip(self.norm, share=share, quantile=self.quantile),
            last_norm=self.norm,
            last_share=share,
        )

    def to_json(self) -> dict[str, float]:
        """Return plain data for the checkpoint; nothing if the clip norm is fixed."""
        return {} if self.quantile is None else {"start": self.start, "norm": self.norm}

    def restored(self, row: Mapping[str, Any]) -> ClipNorm:
        """Return the clip norm that ``to_json`` wrote; that of a new run if the start was changed.

        Nothing is restored where the resumed run has a fixed clip norm.
        """
        if self.quantile is None or row.get("start") != self.start:
            return self
        return replace(self, norm=float(row["norm"]))
