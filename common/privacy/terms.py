"""The terms of a private round, the same for all its devices (docs/privacy.md).

Each device's vector is clipped to an L2 norm of at most ``norm_bound``, and the sum gets noise with
a standard deviation of ``noise_multiplier`` times that bound in each coordinate. If the unit of
privacy is an example, each example's gradient is clipped to ``example_bound`` before it is added,
and the noise is that multiple of this bound instead. If devices also tell under noise whether their
vectors were within the bound (``common.privacy.clip_bit``), the vectors' noise is a little more.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from headwater.common.settings.rounds import PrivacyUnit
from headwater.common.terms import Terms

Bound = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Multiplier = Annotated[float, Field(ge=0.01, le=1e6, allow_inf_nan=False)]
BitMultiplier = Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)]


class PrivacyTerms(Terms):
    """The terms that a plan carries; in masked rounds all members of the session agree on them.

    ``min_survivors`` and ``corrupted`` are shares of the members with masks. Noise under masks is
    calibrated for the honest devices among the fewest survivors that a session accepts.
    ``noise_multiplier`` is what the round costs. ``bit_multiplier`` is the noise of the devices'
    bits; None if the clip norm does not follow them.

    Raises:
        ValueError: the bits alone would cost what the round does, or more.
    """

    NAME: ClassVar[str] = "privacy"

    norm_bound: Bound
    noise_multiplier: Multiplier
    min_survivors: Annotated[float, Field(gt=0, le=1)] = 1.0
    corrupted: Annotated[float, Field(ge=0, lt=1)] = 0.0
    min_colluding: Annotated[int, Field(ge=1, le=2**20)] = 1
    """The fewest colluding members in a session of any size: ``corrupted`` of all invited clients,
    who may all be in one session if a round is divided into several."""

    example_bound: Bound | None = None
    """The L2 norm of an example's gradient; None if the unit is the device."""

    bit_multiplier: BitMultiplier | None = None

    @model_validator(mode="after")
    def _check_bits(self) -> Self:
        if self.bit_multiplier is not None and self.example_bound is not None:
            raise ValueError("bits are on the clip norm of devices, not of examples")
        if self.bit_multiplier is not None and self.bit_multiplier <= self.noise_multiplier:
            raise ValueError(
                f"bits with noise of {self.bit_multiplier} cost more than a round of "
                f"{self.noise_multiplier}"
            )
        return self

    @property
    def why_alone(self) -> str | None:
        return "with privacy each device's vector is clipped by itself"

    @property
    def unit(self) -> PrivacyUnit:
        """What one unit of the promise is: a device's whole part, or one example."""
        return "device" if self.example_bound is None else "example"

    @property
    def unit_bound(self) -> float:
        """The L2 norm of what one unit adds to a device's vector, before any rounding."""
        return self.norm_bound if self.example_bound is None else self.example_bound

    @property
    def max_examples(self) -> int:
        """The most examples of a device whose clipped gradients ``norm_bound`` holds."""
        assert self.example_bound is not None
        return math.floor(self.norm_bound / self.example_bound)

    @property
    def uses_whole_window(self) -> bool:
        """Whether the quota bounds what a round may spend, as each example is clipped by itself."""
        return self.unit == "example"

    @property
    def has_planned_weight(self) -> bool:
        return True

    @property
    def is_private(self) -> bool:
        return True

    @property
    def vector_bound(self) -> float | None:
        return self.norm_bound

    @property
    def hides_pace(self) -> bool:
        return True

    @property
    def vector_multiplier(self) -> float:
        """The noise of the vectors' sum, with which vectors and bits cost ``noise_multiplier``."""
        if self.bit_multiplier is None:
            return self.noise_multiplier
        ratio = self.noise_multiplier / self.bit_multiplier
        return self.noise_multiplier / math.sqrt((1 - ratio) * (1 + ratio))

    @property
    def rho(self) -> float:
        """What one round with this noise costs one unit that adds to it, as zCDP."""
        return rho_of(self.noise_multiplier)


def rho_of(noise_multiplier: float) -> float:
    """Return the zCDP of a (discrete) Gaussian with this noise multiplier: 1 / (2 z^2).

    Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), theorem 4.
    """
    return 1 / (2 * noise_multiplier * noise_multiplier)


def joint_multiplier(*multipliers: float) -> float:
    """Return the noise multiplier of one sum that costs what these sums of a round cost together.

    zCDP adds up: 1 / z^2 is the sum of 1 / z_i^2. A multiplier of 0 gives 0.
    """
    if not all(multipliers):
        return 0.0
    return 1 / math.sqrt(math.fsum(1 / (z * z) for z in multipliers))
