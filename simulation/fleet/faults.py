"""Faults injected into a simulated fleet: devices that vanish, have slow links or lie.

A TOML file says which devices a fault affects, when, and how (``docs/fleet.md``). What happens is a
pure function of the faults and of a ``Moment``: the run's seed, the device and the round. So a run
is repeatable, and every way of computing a round injects the same faults. Faults of the network and
of processes are not simulated; the project's tests inject them with a proxy.

A liar changes the vector that it sends and nothing else: its counts, losses and norms are those of
the honest update, as an attacker who wants to pass the checks would send them.

The kinds of falsified updates follow Blanchard et al. 2017 ("Machine Learning with Adversaries",
section 5) and what broken devices send: ``sign-flipped`` is -x, ``scaled`` is c x, ``random`` is
normal noise with the norm of x, ``nan`` and ``infinite`` put one such value at a random position.
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

from headwater.client.training.sampler import seed_of
from headwater.common.user_code.run_scope import cached_in_scope

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
    """Return the type of the message that asks a device for a phase."""
    return phase if phase in (TRAIN, EVALUATE) else f"query.{phase}"


# The messages that an invited device receives in a round, in order. All but the first and the last
# are ``headwater.common.secagg.protocol.PHASES``, whose import would load torch for their names.
STAGES = tuple(stage_of(phase) for phase in get_args(DropoutPhase))
SECURE_STAGES = STAGES[1:-1]
RoundNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A device in a round of a run: everything that a fault depends on."""

    seed: int
    num_devices: int
    part: int
    round: int


class Fault(BaseModel):
    """The devices (named, or a share of all) and the rounds that a fault affects."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    first_round: RoundNumber = 1
    last_round: RoundNumber | None = None
    chance: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if (self.devices is None) == (self.share is None):
            raise ValueError("expected devices or share, and one of them only")
        if self.last_round is not None and self.last_round < self.first_round:
            raise ValueError(f"last_round {self.last_round} is before first_round")
        return self

    def applies(self, moment: Moment, *extra_seeds: object) -> bool:
        """Return whether the fault affects a device in a round.

        The devices of a share are the same in all rounds: share x devices, rounded, and at least
        one. The chance is drawn for each device, round and ``extra_seeds``.
        """
        if moment.round < self.first_round:
            return False
        if self.last_round is not None and moment.round > self.last_round:
            return False
        if self.devices is not None:
            is_target = moment.part in self.devices
        else:
            is_target = bool(_targets(self, moment.seed, moment.num_devices)[moment.part])
        if not is_target or self.chance == 1:
            return is_target
        seed = seed_of("fault", self.key, moment.seed, moment.part, moment.round, *extra_seeds)
        return bool(np.random.default_rng(seed).random() < self.chance)

    @property
    def key(self) -> str:
        """The class and the values, which seed the random draws: equal faults act alike."""
        return f"{type(self).__name__} {self.model_dump_json()}"


class DropoutFault(Fault):
    """Devices that stop answering from one message of the round on."""

    phase: DropoutPhase = "train"

    @property
    def stage(self) -> str:
        """The type of the first message without an answer."""
        return stage_of(self.phase)


class SlowLinkFault(Fault):
    """Devices whose upload and download take ``factor`` times as long."""

    factor: Annotated[float, Field(gt=1, le=1e6)]


class AbsenceFault(Fault):
    """Devices that train and are then away, so that their answers come ``seconds`` later."""

    seconds: Annotated[float, Field(gt=0, le=1e8)]


class LiarFault(Fault):
    """Devices that send a falsified vector instead of the one that they have summed."""

    kind: LieKind
    factor: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None

    @model_validator(mode="after")
    def _check_factor(self) -> Self:
        if (self.factor is not None) != (self.kind == "scaled"):
            raise ValueError("factor goes with the kind scaled, and only with it")
        return self


class FleetFaults(BaseModel):
    """All faults of a run; the fields are the names of the file's tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dropout: tuple[DropoutFault, ...] = ()
    slow_link: tuple[SlowLinkFault, ...] = ()
    absence: tuple[AbsenceFault, ...] = ()
    liar: tuple[LiarFault, ...] = ()

    def __add__(self, other: FleetFaults) -> FleetFaults:
        return FleetFaults(
            dropout=(*self.dropout, *other.dropout),
            slow_link=(*self.slow_link, *other.slow_link),
            absence=(*self.absence, *other.absence),
            liar=(*self.liar, *other.liar),
        )

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def all(self) -> tuple[Fault, ...]:
        """The faults of all kinds."""
        return (*self.dropout, *self.slow_link, *self.absence, *self.liar)


NO_FAULTS = FleetFaults()


# Effects.


def unanswered_stage(faults: FleetFaults, moment: Moment, *, attempt: int = 0) -> str | None:
    """Return the first of ``STAGES`` that a device leaves unanswered in a round; None if none.

    A repeated round is another ``attempt``, with new random draws.
    """
    return first_stage([fault.stage for fault in faults.dropout if fault.applies(moment, attempt)])


def first_stage(stages: Sequence[str]) -> str | None:
    """Return the earliest of some stages; None without any."""
    return min(stages, key=STAGES.index, default=None)


def link_slowdown(faults: FleetFaults, moment: Moment) -> float:
    """Return how many times as long a device's transfers take in a round; factors multiply."""
    factor = 1.0
    for fault in faults.slow_link:
        if fault.applies(moment):
            factor *= fault.factor
    return factor


def absent_seconds(faults: FleetFaults, moment: Moment) -> float:
    """Return how much later a device answers in a round because it is away; absences add up."""
    return sum(fault.seconds for fault in faults.absence if fault.applies(moment))


def falsifications(faults: FleetFaults, moment: Moment) -> tuple[LiarFault, ...]:
    """Return how a device falsifies its update in a round, in the order of the file."""
    return tuple(fault for fault in faults.liar if fault.applies(moment))


def falsify(values_P: Tensor, faults: Sequence[LiarFault], moment: Moment) -> Tensor:
    """Return the vector that a device sends instead of ``values_P``; the faults act in sequence.

    The result is a new vector, or ``values_P`` itself without faults. A scaled value beyond the
    range of float32 becomes infinite.
    """
    for fault in faults:
        values_P = _falsify(values_P, fault, moment)
    return values_P


def _falsify(values_P: Tensor, fault: LiarFault, moment: Moment) -> Tensor:
    if fault.kind == "sign-flipped":
        return values_P.neg()
    if fault.kind == "scaled":
        assert fault.factor is not None  # ``_check_factor``
        return values_P.mul(fault.factor)
    seed = seed_of("lie", fault.kind, moment.seed, moment.part, moment.round)
    generator = np.random.default_rng(seed)
    changed_P = values_P.clone()
    if fault.kind == "random":
        changed_P.numpy()[:] = generator.standard_normal(len(changed_P), dtype=np.float32)
        changed_P *= values_P.norm() / changed_P.norm().clamp(min=1e-30)
        return changed_P
    if len(changed_P):
        position = int(generator.integers(len(changed_P)))
        changed_P[position] = float("nan") if fault.kind == "nan" else float("inf")
    return changed_P


@lru_cache(maxsize=64)
def _targets(fault: Fault, seed: int, num_devices: int) -> NDArray[np.bool_]:
    """Return a flag for each device: whether it belongs to the fault's share. Drawn once."""
    assert fault.share is not None
    flags = np.zeros(num_devices, dtype=np.bool_)
    count = max(round(fault.share * num_devices), 1)
    generator = np.random.default_rng(seed_of("struck", fault.key, seed))
    flags[generator.choice(num_devices, size=count, replace=False)] = True
    return flags


@cached_in_scope(maxsize=8)
def read_faults(path: Path) -> FleetFaults:
    """Read a faults file, once in a run.

    Raises:
        SettingsError: see ``read_tables``; or the file has no table.
    """
    from headwater.simulation.fleet.toml_tables import file_error, read_tables

    faults = read_tables(path, FleetFaults, name="faults file")
    if not faults:
        raise file_error(
            path, "expected a table [[dropout]], [[slow_link]], [[absence]] or [[liar]], found none"
        )
    return faults
