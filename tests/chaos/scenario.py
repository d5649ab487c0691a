"""One scenario as data: what goes wrong, in a run of how many devices, with how large a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.faults import FaultPlan

Need = Literal["mount", "network", "cc", "history", "tinyproxy"]
Mode = Literal["", "masked", "int8", "local", "asynchronous"]
MODES: dict[Mode, str] = {
    "": "",
    "masked": '[secure]\naggregation = "semi-honest"\n',
    "int8": '[compression]\nup = "int8"\n',
    "local": "[local]\nsteps = 2\n",
    "asynchronous": "[asynchronous]\nis_on = true\nbuffer = {num_devices}\n",
}
"""The lines of settings that turn a mode of training on, for the server and for the simulator."""
OWNERS_FLAGS: dict[Mode, tuple[str, ...]] = {"masked": ("--secure-aggregation", "semi-honest")}

SMALL = 16
LARGE = 80_000  # 2.2 MB: three chunks
NARROW = 10_000  # 280 KB: 2.2 s each way at 1 Mbit/s


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One thing that goes wrong in a run."""

    name: str
    plan: FaultPlan
    hidden: int = SMALL
    num_devices: int = 2
    has_tls: bool = False
    may_lose: bool = False
    """Whether updates may be left out of a round; they are never half in it, nor twice."""
    needs: Need | None = None
    is_short: bool = False
    mode: Mode = ""
    has_http_proxy: bool = False
    """Whether the devices reach the server by an HTTP proxy (tinyproxy)."""

    @property
    def has_reference(self) -> bool:
        """Whether the float64 reference knows this mode: it rounds nothing, and has no masks."""
        return not self.mode

    @property
    def vector_bytes(self) -> int:
        """An update's size."""
        return 4 * (7 * self.hidden + 2)
