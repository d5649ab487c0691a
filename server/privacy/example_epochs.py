"""How far the devices of a run are in their epochs, and what that cost their examples.

A device takes its examples in a fixed order, each once an epoch (``common.privacy.epoch_cost``). In
plain rounds the server knows how far: an update that is in an opened sum has used the plan's quota,
as a window that ended early counts as whole, and the device repeats the examples of an update that
is in none. The epsilon of a run is that of the device which has begun the most epochs.

Where the server cannot know, every round counts: a device that does not tell how many examples it
has, or tells another number than before, and all devices once an older checkpoint was brought back.
The number is the device's own word; a false one misleads it about its own examples alone. A device
that tells another number than before is left out where its noise would be stronger than that of the
others (``affordable_noise``), so that it does not end the run for all. Under masks a device moves
on though its session was aborted, so there too every round counts, and this file is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.common.privacy.epoch_cost import EpochCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A device's part of a round: its plan's quota, and the number of its examples if known."""

    quota: int
    num_owned: int | None

    @property
    def num_used(self) -> int:
        """The number of examples that an update uses: each at most once."""
        return self.quota if self.num_owned is None else min(self.quota, self.num_owned)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A device's place in its epoch: how many examples the epoch has left, 0 between epochs.

    ``num_owned`` is None if every round counts: the number is unknown, or the device told another
    one before (``has_told``).
    """

    num_owned: int | None
    num_left: int = 0
    cost: EpochCost = field(default_factory=EpochCost)
    has_told: bool = False

    def after(self, rho: float, share: Share) -> Place:
        """Return the place after a round of cost ``rho``."""
        number, used = self.num_owned, share.num_used
        if number is None or share.num_owned != number:
            cost = self.cost.after(rho, continues=False, begins=1)
            has_told = self.has_told or number is not None or share.num_owned is not None
            return Place(num_owned=None, cost=cost, has_told=has_told)
        begins = _num_begun(used - self.num_left, number)
        cost = self.cost.after(rho, continues=self.num_left > 0, begins=begins)
        return replace(self, num_left=self.num_left - used + begins * number, cost=cost)

    def affordable(self, total: float, share: Share, rounds: int) -> float:
        """Return the largest cost of each of so many rounds with which all stay within ``total``.

        0 or less if nothing is left.
        """
        left = total - self.cost.rho
        if self.num_owned is None or share.num_owned != self.num_owned:
            return left / rounds
        begins = _num_begun(rounds * share.num_used - self.num_left, self.num_owned)
        if not self.num_left or (begins and left / begins <= self.cost.epoch_rho):
            return left / begins
        # Of a cost above the current epoch's own, this epoch pays the difference.
        return (left + self.cost.epoch_rho) / (begins + 1)


def _num_begun(num_more: int, num_owned: int) -> int:
    """Return how many epochs ``num_more`` examples after the end of the current one begin."""
    return max(math.ceil(num_more / num_owned), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleEpochs:
    """The places of all devices of a run, as of the last opened sum.

    ``before`` are those of the sum's devices before it: a crash may undo its round. Once the round
    is committed, its devices go on, and a server that repeats it has an older checkpoint.
    """

    round: int = 0
    rho: float = 0.0
    is_committed: bool = False
    places: Mapping[str, Place]
    before: Mapping[str, Place]

    @property
    def most(self) -> float:
        """The zCDP of the example that the sums so far cost most."""
        return max((place.cost.rho for place in self.places.values()), default=0.0)

    def after(self, round_number: int, rho: float, shares: Mapping[str, Share]) -> ExampleEpochs:
        """Return the places after an opened sum of cost ``rho`` with these devices' updates."""
        places = self._at(round_number)
        before = {name: _place(places, name, share) for name, share in shares.items()}
        places |= {name: before[name].after(rho, share) for name, share in shares.items()}
        return ExampleEpochs(round=round_number, rho=rho, places=places, before=before)

    def _at(self, round_number: int) -> dict[str, Place]:
        """Return the places before a round; the costs of a round that is repeated stay."""
        places = dict(self.places)
        if round_number == self.round and not self.is_committed:
            for name, place in self.before.items():
                cost = replace(place.cost, rho=place.cost.rho + self.rho)
                places[name] = replace(place, cost=cost)
        elif round_number <= self.round:
            places = {
                name: replace(
                    place, num_owned=None, has_told=place.has_told or place.num_owned is not None
                )
                for name, place in places.items()
            }
        return places

    def affordable(
        self, total: float, *, round_number: int, rounds: int, shares: Mapping[str, Share]
    ) -> dict[str, float]:
        """Return the largest cost of each of the remaining rounds by device, if it is in them all.

        The least of them keeps every example within ``total``: a device that is not in the coming
        round, whose parts are ``shares``, spends nothing in it.
        """
        places = self._at(round_number)
        return {
            name: _place(places, name, share).affordable(total, share, rounds)
            for name, share in shares.items()
        }

    def irregular(self, shares: Mapping[str, Share], *, round_number: int) -> set[str]:
        """Return the devices whose rounds all count, as they told another number than before."""
        places = self._at(round_number)
        return {
            name
            for name, share in shares.items()
            if name in places
            and (
                share.num_owned != places[name].num_owned
                or (share.num_owned is None and places[name].has_told)
            )
        }

    def affordable_beside(self, total: float, *, rounds: int, shares: Mapping[str, Share]) -> float:
        """Return the cost of a round that uses each example once, before so many others.

        All of them then cost the same, and stay together within ``total``.
        """
        left = total - self.most
        return min(
            left / (1 + rounds)
            if share.num_owned is None
            else left / (1 + _num_begun(rounds * share.num_used, share.num_owned))
            for share in shares.values()
        )

    def as_json(self) -> dict[str, Any]:
        """Return this as plain objects."""
        return {
            "round": self.round,
            "rho": self.rho,
            "is_committed": self.is_committed,
            "places": {name: _row(place) for name, place in self.places.items()},
            "before": {name: _row(place) for name, place in self.before.items()},
        }


NOBODY = ExampleEpochs(places={}, before={})


def from_json(plain: Mapping[str, Any]) -> ExampleEpochs:
    """Return what ``as_json`` returned.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    return ExampleEpochs(
        round=int(plain["round"]),
        rho=float(plain["rho"]),
        is_committed=bool(plain.get("is_committed", False)),  # 0.2 did not write it
        places={name: _read(row) for name, row in plain["places"].items()},
        before={name: _read(row) for name, row in plain["before"].items()},
    )


def _place(places: Mapping[str, Place], name: str, share: Share) -> Place:
    """Return a device's place; at its first example if it was in no sum so far."""
    return places.get(name) or Place(num_owned=share.num_owned)


def _row(place: Place) -> list[Any]:
    return [
        *(place.num_owned, place.num_left, place.cost.rho, place.cost.epoch_rho),
        place.has_told,
    ]


def _read(row: Any) -> Place:
    num_owned, num_left, rho, epoch_rho, *has_told = row  # 0.2 wrote four
    if not 0 <= epoch_rho <= rho:
        raise ValueError(f"a cost of {epoch_rho} in one of {rho}")
    return Place(
        num_owned=num_owned,
        num_left=num_left,
        cost=EpochCost(rho=rho, epoch_rho=epoch_rho),
        has_told=has_told == [True],
    )
