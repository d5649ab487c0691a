"""What a device's single examples have spent, counted by its own epochs.

The device knows exactly which examples an update contains. An update continues the current epoch's
cost (``common.privacy.epoch_cost``) if none of its examples was used in this epoch before; else, as
after a round that the server repeats, its cost is added. Another run, seed or number of
examples is another order: an epoch begins.

In a round for which each device's whole vector is clipped, taking one example out may lead from one
clipped vector to any other, which is twice its bound away. The round costs an example four times
the rho that it costs the device, and counts every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.common.privacy.epoch_cost import EpochCost
from headwater.common.privacy.terms import PrivacyTerms

OF_A_DEVICE_S_ROUND = 4
"""What a round with noise for devices costs an example, in the device's rho."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlace:
    """A place in an order of a device's examples; ``run`` names the run and its order.

    Its epoch has those from ``offset`` on left, and those at the places ``skipped`` before.
    """

    run: str
    num_examples: int
    epoch: int
    offset: int
    skipped: tuple[int, ...] = ()

    @property
    def is_begun(self) -> bool:
        """Whether the epoch has been used from."""
        return bool(self.offset or self.skipped)

    def is_unused_after(self, other: EpochPlace) -> bool:
        """Whether all that the epoch has left here, it had left at the other place."""
        same = (self.run, self.num_examples, self.epoch)
        return (
            same == (other.run, other.num_examples, other.epoch)
            and other.is_begun
            and self.offset >= other.offset
            and {*self.skipped} <= {*other.skipped}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedWindow:
    """Where an update's examples begin and end, and if they are of two epochs."""

    start: EpochPlace
    end: EpochPlace
    is_of_two_epochs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCost:
    """What an update costs the device as a whole, and the single examples in it, as zCDP."""

    device_rho: float
    example_rho: float
    window: UsedWindow | None
    """None if any example may be in it."""

    @staticmethod
    def of(terms: PrivacyTerms, rho: float, window: UsedWindow | None = None) -> UpdateCost:
        """Return the cost of an update under these terms; ``rho`` is that of their unit."""
        if terms.unit == "device":
            return UpdateCost(device_rho=rho, example_rho=OF_A_DEVICE_S_ROUND * rho, window=None)
        ratio = terms.norm_bound / terms.unit_bound
        return UpdateCost(device_rho=rho * ratio * ratio, example_rho=rho, window=window)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleSpent:
    """What the example has spent that the updates cost most; and the last update's part in it."""

    cost: EpochCost = field(default_factory=EpochCost)
    place: EpochPlace | None = None
    """Where the last update's examples end; None before the first, or if that is not known."""
    before: EpochCost = field(default_factory=EpochCost)
    """The cost without the last update."""
    continues: bool = False
    begins: int = 0

    @staticmethod
    def of(plain: Mapping[str, Any]) -> ExampleSpent:
        """Read the file's entry.

        Raises:
            KeyError, TypeError: it is something else.
        """
        place = plain["place"]
        if place is not None:
            place = EpochPlace(**{**place, "skipped": tuple(place["skipped"])})
        return ExampleSpent(
            cost=EpochCost(**plain["cost"]),
            place=place,
            before=EpochCost(**plain["before"]),
            continues=bool(plain["continues"]),
            begins=int(plain["begins"]),
        )

    def after(self, update: UpdateCost) -> ExampleSpent:
        """Return what is spent after one more update."""
        window, place = update.window, self.place
        continues = window is not None and place is not None and window.start.is_unused_after(place)
        begins = int(not continues) + int(window is not None and window.is_of_two_epochs)
        return ExampleSpent(
            cost=self.cost.after(update.example_rho, continues=continues, begins=begins),
            place=None if window is None else window.end,
            before=self.cost,
            continues=continues,
            begins=begins,
        )

    def corrected(self, example_rho: float) -> ExampleSpent:
        """Return what is spent if the last update costs this instead."""
        return ExampleSpent(
            cost=self.before.after(example_rho, continues=self.continues, begins=self.begins),
            place=self.place,
            before=self.before,
            continues=self.continues,
            begins=self.begins,
        )
