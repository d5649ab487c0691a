"""The privacy that a device has spent over all runs, in a file of its own, and its owner's limit.

Every private update costs rho = 1 / (2 z^2), where z is the plan's noise multiplier
(``common.privacy.spending``), for the plan's unit: the device as a whole, or one example
(``client.privacy.example_spending``). The file has the sums for both. They are on disk before the
update leaves the device, so that no crash forgets it. They count all runs of a device of this name
in its state folder, on whatever data and with whatever task: that can only be more than was spent
on one data set. No other name has a budget for the same data (``client.privacy.budget_data``). The
lock file beside it stays, and tells that it was there: a device whose file is lost asks its owner.
A session that is aborted after this device has masked counts as well, at the least noise that the
device accepts: it cannot know what was opened. A request to help to open the sum shows how many
survived.

What it cannot know: in a plain round, whether the server adds the noise. A device that does not
trust the server sets ``--secure-aggregation`` too, and then takes part under masks alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.client.flower.request import DeviceRequest
from headwater.client.privacy.example_spending import (
    OF_A_DEVICE_S_ROUND,
    ExampleSpent,
    UpdateCost,
    UsedWindow,
)
from headwater.common.errors import PrivacyBudgetSpent, PrivacyRequired, StateError
from headwater.common.messages import Plan
from headwater.common.parsed_text import json_of
from headwater.common.privacy.epoch_cost import EpochCost
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.rounds import PrivacyUnit
from headwater.common.settings.schema import PrivacySettings
from headwater.common.system.atomic_file import OWNER_ONLY, make_private_folder, write_atomically
from headwater.common.system.file_lock import try_lock

log = logging.getLogger(__name__)

SUFFIX = ".privacy.json"
MAX_DATA = 256
"""The most descriptions of data that a file lists: data that grow have another at each start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a device has spent: rho, in so many updates; and the last one's id and rho.

    ``examples`` is what single examples have spent; ``data`` names the data of the updates.
    """

    rho: float = 0.0
    num_updates: int = 0
    last_update: str | None = None
    last_rho: float = 0.0
    examples: ExampleSpent = field(default_factory=ExampleSpent)
    data: tuple[str, ...] = ()

    def of_unit(self, unit: PrivacyUnit) -> float:
        """Return what a unit has spent, as zCDP."""
        return self.rho if unit == "device" else self.examples.cost.rho

    def on(self, data: Collection[str]) -> Spent:
        """Return the same, spent on these data too."""
        found = (*(one for one in self.data if one not in data), *data)
        return replace(self, data=found[-MAX_DATA:])

    def after(self, update: UpdateCost, *, update_id: str | None) -> Spent:
        """Return what is spent after an update; after the last one again, at the larger cost."""
        rho = update.device_rho
        if update_id is None or self.last_update != update_id:
            return Spent(
                rho=self.rho + rho,
                num_updates=self.num_updates + 1,
                last_update=update_id,
                last_rho=rho,
                examples=self.examples.after(update),
                data=self.data,
            )
        return self if rho <= self.last_rho else self.corrected(update)

    def corrected(self, update: UpdateCost) -> Spent:
        """Return what is spent if the last update costs this instead."""
        return replace(
            self,
            rho=max(self.rho - self.last_rho, 0.0) + update.device_rho,
            last_rho=update.device_rho,
            examples=self.examples.corrected(update.example_rho),
        )


class SpentFile:
    """A device's file of what it has spent."""

    def __init__(self, path: Path, *, may_begin_anew: bool = False) -> None:
        """``may_begin_anew`` is the owner's word that nothing was spent if the file is lost."""
        self.path = path
        self._lock = path.with_name(path.name + ".lock")
        self._may_begin_anew = may_begin_anew

    @staticmethod
    def of(folder: Path, name: str, chosen: PrivacySettings) -> SpentFile:
        """Return the file of a device in its state folder."""
        return SpentFile(folder / f"{name}{SUFFIX}", may_begin_anew=chosen.new_budget)

    def read(self) -> Spent:
        """Return what was spent; nothing if there never was a file.

        Raises:
            StateError: the file cannot be read, or it is lost.
        """
        try:
            spent = _read(json_of(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            if self._lock.exists():
                self._note_lost()
            return Spent()
        except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
            raise StateError(
                f"the file of spent privacy {self.path} cannot be read: {error}",
                remedy="restore it from a backup; without it the device forgets what it has spent",
            ) from error
        return spent

    def _note_lost(self) -> None:
        if not self._may_begin_anew:
            raise StateError(
                f"the file of spent privacy {self.path} is lost: its lock file is there",
                remedy="restore it from a backup; or say, as the owner, that nothing was spent on "
                "these data: --new-privacy-budget",
            )
        log.warning("%s is lost, and its owner says that nothing was spent", self.path)

    def spend(
        self,
        update: UpdateCost,
        chosen: PrivacySettings,
        *,
        update_id: str | None = None,
        data: Collection[str] = (),
    ) -> Spent:
        """Add an update's cost and return the sums; the last update again costs what is more now.

        It may come again, with less noise, if the device could not mask it after it was counted.
        Without an id each update is another one.

        Raises:
            PrivacyBudgetSpent: the sum would be more than the owner's limit; nothing changes.
            StateError: the file cannot be read or written; nothing changes.
        """
        with self._locked():
            spent = self.read()
            after = spent.after(update, update_id=update_id).on(data)
            if after == spent:
                return spent
            check_limit(after, chosen)
            return self._write(after)

    def lower(self, update: UpdateCost, *, update_id: str) -> Spent:
        """Give back what the last update did not cost, as more devices added noise than had to.

        Nothing changes if another update was the last, or cost less.

        Raises:
            StateError: the file cannot be read or written; nothing changes.
        """
        with self._locked():
            spent = self.read()
            if spent.last_update != update_id or update.device_rho >= spent.last_rho:
                return spent
            return self._write(spent.corrected(update))

    def _write(self, spent: Spent) -> Spent:
        try:
            write_atomically(self.path, json.dumps(asdict(spent)).encode(), mode=OWNER_ONLY)
        except OSError as error:
            raise StateError(
                f"the device cannot write what it has spent: {error.strerror}"
            ) from error
        return spent

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            make_private_folder(self.path.parent)
            is_first = not self._lock.exists() and not self.path.exists()
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        except OSError as error:
            raise StateError(f"cannot lock {self.path}: {error.strerror}") from error
        try:
            if not try_lock(descriptor):
                raise StateError(
                    f"another process uses {self.path}",
                    remedy="give each device a --name of its own, or a --state folder",
                )
            if is_first:
                self._write(Spent())
            yield
        finally:
            os.close(descriptor)


def _read(plain: Any) -> Spent:
    if not isinstance(plain, dict) or "rho" not in plain:  # nothing spent is said, not left out
        raise ValueError("it does not say what is spent (rho)")
    examples = plain.pop("examples", None)
    spent = Spent(**{**plain, "data": tuple(map(str, plain.get("data", ())))})
    if examples is None:  # a file of an earlier version has rounds with noise for devices alone
        cost = EpochCost(rho=OF_A_DEVICE_S_ROUND * spent.rho)
        spent = replace(spent, examples=ExampleSpent(cost=cost, before=cost))
    else:
        spent = replace(spent, examples=ExampleSpent.of(examples))
    found = spent.examples
    counted = (spent.num_updates, spent.last_rho, found.begins)
    for number in (spent.rho, *counted, *astuple(found.cost), *astuple(found.before)):
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{number} is nothing that was spent")
    return spent


def check_limit(spent: Spent, chosen: PrivacySettings) -> None:
    """Check that what is spent, with an update, is within the owner's limit for the owner's unit.

    Raises:
        PrivacyBudgetSpent: it is not.
    """
    if chosen.budget is None:
        return
    epsilon = epsilon_of(spent.of_unit(chosen.unit), delta=chosen.delta)
    if epsilon > chosen.budget:
        whose = {"device": "this device's privacy", "example": "this device's examples"}
        raise PrivacyBudgetSpent(
            f"one more update would bring {whose[chosen.unit]} to epsilon {epsilon:.3g} at delta "
            f"{chosen.delta:g}; its owner allows {chosen.budget:g} for each {chosen.unit}"
        )


def check_budget(
    plan: Plan,
    chosen: PrivacySettings,
    *,
    name: str,
    spent: SpentFile | None,
    window: UsedWindow | None = None,
) -> None:
    """Check, before anything is computed, that the owner's settings allow this plan.

    ``spent`` is None for a simulated device, which keeps no file. ``window`` has the plan's
    examples, if each of them has noise for itself.

    Raises:
        PrivacyRequired: the owner set a limit, and the plan has no noise, or the update is
            compressed: what is kept of earlier ones would enter it beyond the clip norm.
        StateError: the owner set a limit, and there is no file, or it cannot be read.
        PrivacyBudgetSpent: the update would exceed the limit.
    """
    if chosen.budget is None:
        return
    terms = plan.of(PrivacyTerms)
    if terms is None:
        raise PrivacyRequired(f"{name}: the server plans a round without noise")
    if "compression" in plan.terms:
        raise PrivacyRequired(
            f"{name}: the server plans a compressed update, which no clip norm bounds",
            remedy="leave out --compress on the server; --compress-down may stay",
        )
    if spent is None:
        raise StateError(f"{name}: a privacy budget needs a device that keeps files")
    update = UpdateCost.of(terms, terms.rho, window)
    check_limit(spent.read().after(update, update_id=None), chosen)


def check_test(chosen: PrivacySettings, *, name: str) -> None:
    """Check that the owner's settings allow to report the loss on examples that are held out.

    Raises:
        PrivacyRequired: the owner set a limit, and no noise hides this loss.
    """
    if chosen.budget is not None:
        raise PrivacyRequired(f"{name}: the server asks for a loss without noise")


def spent_of(request: DeviceRequest) -> SpentFile | None:
    """Return the file of what a device has spent; None for a simulated one, which keeps none."""
    if request.is_simulated:
        return None
    return SpentFile.of(request.state_folder, request.identity.name, request.settings.privacy)
