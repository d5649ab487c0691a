"""What goes wrong on purpose in a simulated fleet: devices that vanish, crawl or lie.

A file says whom it strikes, when, and how (``docs/fleet.md``). What happens is a pure function of
the faults and of a ``Moment``: the run's seed, the device and the round. So a run repeats itself,
and each way of computing a round injects the same. Faults of the network and of processes are
another matter, and no part of the product: the tests have a proxy for them.

A liar changes the vector that it sends and nothing beside it: its counts, losses and norms are
those of the honest update, as a liar that wants to get through would tell them.

Kinds of lies, after Blanchard et al. 2017 ("Machine Learning with Adversaries", section 5) and what
broken devices do: ``sign-flipped`` is -x, ``scaled`` is c x, ``random`` is normal noise of the norm
of x, ``nan`` and ``infinite`` put one such value at a place that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.client.training.micro_batches import seed_of
from headwater.simulation.fleet.toml_tables import read_tables, wrong

if TYPE_CHECKING:
    from torch import Tensor

TRAIN, EVALUATE = "train", "evaluate"

LieKind = Literal["nan", "infinite", "scaled", "sign-flipped", "random"]
NOT_FINITE: tuple[LieKind, ...] = ("nan", "infinite")
DropoutPhase = Literal[
    "train",
    "advertise_keys",
    "share_keys",
    "check_shares",
    "masked_update",
    "consistency",
    "unmask",
    "evaluate",
]


def stage_of(phase: str) -> str:
    """Return the type of the message by which a device is asked for a phase."""
    return phase if phase in (TRAIN, EVALUATE) else f"query.{phase}"


# What an invited device is asked in a round, in this order; between the first and the last are
# ``headwater.common.secagg.protocol.protocol.PHASES``, which would load torch for a look at their names.
STAGES = tuple(stage_of(phase) for phase in get_args(DropoutPhase))
SECURE_STAGES = STAGES[1:-1]
RoundNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A device in a round of a run: all that a fault depends on."""

    seed: int
    num_devices: int
    part: int
    round: int


class Fault(BaseModel):
    """Whom a fault strikes and when: these devices or that share of all, in these rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    first_round: RoundNumber = 1
    last_round: RoundNumber | None = None
    chance: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _is_aimed(self) -> Self:
        if (self.devices is None) == (self.share is None):
            raise ValueError("expected devices or share, and one of them only")
        if self.last_round is not None and self.last_round < self.first_round:
            raise ValueError(f"last_round {self.last_round} is before first_round")
        return self

    def strikes(self, moment: Moment, *drawn_by: object) -> bool:
        """Say whether it strikes a device in a round.

        The devices of a share are the same in all rounds: as many as share x devices rounds to, and
        one at the least. A chance is drawn anew for each device, round and ``drawn_by``.
        """
        if moment.round < self.first_round:
            return False
        if self.last_round is not None and moment.round > self.last_round:
            return False
        if self.devices is not None:
            is_meant = moment.part in self.devices
        else:
            is_meant = bool(_struck(self, moment.seed, moment.num_devices)[moment.part])
        if not is_meant or self.chance == 1:
            return is_meant
        seed = seed_of("fault", self.words, moment.seed, moment.part, moment.round, *drawn_by)
        return bool(np.random.default_rng(seed).random() < self.chance)

    @property
    def words(self) -> str:
        """What tells this fault from another: two alike strike alike."""
        return f"{type(self).__name__} {self.model_dump_json()}"


class DropoutFault(Fault):
    """Devices that answer no more from a message of the round on."""

    phase: DropoutPhase = "train"

    @property
    def stage(self) -> str:
        """The type of the first message that is not answered."""
        return stage_of(self.phase)


class SlowLinkFault(Fault):
    """Devices whose link, up and down, is so many times as slow."""

    factor: Annotated[float, Field(gt=1, le=1e6)]


class LiarFault(Fault):
    """Devices that send another vector than the one they summed."""

    kind: LieKind
    factor: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if (self.factor is not None) != (self.kind == "scaled"):
            raise ValueError("factor goes with the kind scaled, and only with it")
        return self


class FleetFaults(BaseModel):
    """All that goes wrong in a run, by the names of the file's tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dropout: tuple[DropoutFault, ...] = ()
    slow_link: tuple[SlowLinkFault, ...] = ()
    liar: tuple[LiarFault, ...] = ()

    def __add__(self, other: FleetFaults) -> FleetFaults:
        return FleetFaults(
            dropout=(*self.dropout, *other.dropout),
            slow_link=(*self.slow_link, *other.slow_link),
            liar=(*self.liar, *other.liar),
        )

    def __bool__(self) -> bool:
        return bool(self.dropout or self.slow_link or self.liar)

    @property
    def all(self) -> tuple[Fault, ...]:
        """Every fault, whatever its kind."""
        return (*self.dropout, *self.slow_link, *self.liar)


NO_FAULTS = FleetFaults()


# What happens.


def vanishes(faults: FleetFaults, moment: Moment, *, attempt: int = 0) -> str | None:
    """Return the first of ``STAGES`` that a device does not answer in a round, if any.

    A round that is tried again is another ``attempt``, for which chances are drawn anew.
    """
    return first_stage([fault.stage for fault in faults.dropout if fault.strikes(moment, attempt)])


def first_stage(stages: Sequence[str]) -> str | None:
    """Return the earliest of some stages; None if there is none."""
    return min(stages, key=STAGES.index, default=None)


def slowed(faults: FleetFaults, moment: Moment) -> float:
    """Return how many times as slow a device's link is in a round; factors multiply."""
    factor = 1.0
    for fault in faults.slow_link:
        if fault.strikes(moment):
            factor *= fault.factor
    return factor


def lies(faults: FleetFaults, moment: Moment) -> tuple[LiarFault, ...]:
    """Return the lies that a device tells in a round, in the order of the file; mostly none."""
    return tuple(fault for fault in faults.liar if fault.strikes(moment))


def lie(values_P: Tensor, told: Sequence[LiarFault], moment: Moment) -> Tensor:
    """Return the vector that a device sends instead of ``values_P``, one lie upon the other.

    A new vector, or ``values_P`` itself where nothing is told. What a factor takes beyond float32
    becomes infinite.
    """
    for fault in told:
        values_P = _lie(values_P, fault, moment)
    return values_P


def _lie(values_P: Tensor, fault: LiarFault, moment: Moment) -> Tensor:
    if fault.kind == "sign-flipped":
        return values_P.neg()
    if fault.kind == "scaled":
        assert fault.factor is not None  # checked in the file
        return values_P.mul(fault.factor)
    seed = seed_of("lie", fault.kind, moment.seed, moment.part, moment.round)
    generator = np.random.default_rng(seed)
    changed_P = values_P.clone()
    if fault.kind == "random":
        changed_P.numpy()[:] = generator.standard_normal(len(changed_P), dtype=np.float32)
        changed_P *= values_P.norm() / changed_P.norm().clamp(min=1e-30)
        return changed_P
    if len(changed_P):
        where = int(generator.integers(len(changed_P)))
        changed_P[where] = float("nan") if fault.kind == "nan" else float("inf")
    return changed_P


@lru_cache(maxsize=64)
def _struck(fault: Fault, seed: int, num_devices: int) -> NDArray[np.bool_]:
    """Return a mark for each device of a fleet: a byte a device, drawn once a process."""
    assert fault.share is not None
    marks = np.zeros(num_devices, dtype=np.bool_)
    count = max(round(fault.share * num_devices), 1)
    generator = np.random.default_rng(seed_of("struck", fault.words, seed))
    marks[generator.choice(num_devices, size=count, replace=False)] = True
    return marks


# The file.


@lru_cache(maxsize=8)
def read_faults(path: Path) -> FleetFaults:
    """Read a faults' file, once a process.

    Raises:
        SettingsError: see ``read_tables``; or there is no table in it.
    """
    found = read_tables(path, FleetFaults, what="faults' file")
    if not found:
        raise wrong(path, "expected a table [[dropout]], [[slow_link]] or [[liar]], found none")
    return found
