"""The terms of a private round, the same for all its devices (docs/privacy.md).

Each device's vector is clipped to an L2 norm of at most ``norm_bound``, and the sum gets noise with
a standard deviation of ``noise_multiplier`` times that bound in each coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Bound = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Multiplier = Annotated[float, Field(ge=0.01, le=1e6, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivacyTerms:
    """The terms that a plan carries; in masked rounds all members of the session agree on them.

    ``min_survivors`` and ``corrupted`` are shares of the members with masks. Noise under masks is
    calibrated for the honest devices among the fewest survivors that a session accepts.
    """

    norm_bound: Bound
    noise_multiplier: Multiplier
    min_survivors: Annotated[float, Field(gt=0, le=1)] = 1.0
    corrupted: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def text(self) -> str:
        """All fields, exactly: equal terms have equal texts."""
        numbers = (self.norm_bound, self.noise_multiplier, self.min_survivors, self.corrupted)
        return " ".join(float(number).hex() for number in numbers)

    @property
    def rho(self) -> float:
        """What one sum with this noise costs a device, as zCDP."""
        return rho_of(self.noise_multiplier)


def rho_of(noise_multiplier: float) -> float:
    """Return the zCDP of a (discrete) Gaussian with this noise multiplier: 1 / (2 z^2).

    Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), theorem 4.
    """
    return 1 / (2 * noise_multiplier * noise_multiplier)
