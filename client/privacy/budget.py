"""The privacy that a device has spent over all runs, in a file of its own, and its owner's limit.

Every private update costs rho = 1 / (2 z^2), where z is the plan's noise multiplier
(``common.privacy.spending``). The sum is on disk before the update leaves the device, so that no
crash forgets it. It counts all runs of a device of this name in its state folder, on whatever data
and with whatever task: that can only be more than was spent on one data set. A session that is
aborted after this device has masked counts as well, at the least noise that the device accepts: it
cannot know what was opened. A request to help to open the sum shows how many survived.

What it cannot know: in a plain round, whether the server adds the noise. A device that does not
trust the server sets ``--secure-aggregation`` too, and then takes part under masks alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headwater.common.errors import PrivacyBudgetSpent, PrivacyRequired, StateError
from headwater.common.messages import Plan
from headwater.common.privacy.spending import epsilon_of
from headwater.common.settings.schema import PrivacySettings
from headwater.common.system.atomic_file import OWNER_ONLY, write_atomically
from headwater.common.system.file_lock import try_lock


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a device has spent: rho, in so many updates; and the last one's id and rho."""

    rho: float = 0.0
    num_updates: int = 0
    last_update: str | None = None
    last_rho: float = 0.0


class SpentFile:
    """A device's file of what it has spent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Spent:
        """Return what was spent; nothing if there is no file.

        Raises:
            StateError: the file cannot be read.
        """
        try:
            spent = Spent(**json.loads(self.path.read_text(encoding="utf-8")))
            if not (math.isfinite(spent.rho) and spent.rho >= 0):
                raise ValueError(f"rho is {spent.rho}")
        except FileNotFoundError:
            return Spent()
        except (OSError, ValueError, TypeError) as error:
            raise StateError(
                f"the file of spent privacy {self.path} cannot be read: {error}",
                remedy="restore it from a backup; without it the device forgets what it has spent",
            ) from error
        return spent

    def spend(
        self, rho: float, *, update_id: str | None, limit: float | None, delta: float
    ) -> Spent:
        """Add an update's rho and return the sum; the last update again costs what is more now.

        It may come again, with less noise, if the device could not mask it after it was counted.

        Raises:
            PrivacyBudgetSpent: the sum would be more than an epsilon of ``limit``; nothing changes.
            StateError: the file cannot be read or written; nothing changes.
        """
        with self._locked():
            spent = self.read()
            is_same = update_id is not None and spent.last_update == update_id
            if is_same and rho <= spent.last_rho:
                return spent
            total = spent.rho + (rho - spent.last_rho if is_same else rho)
            check_limit(total, limit=limit, delta=delta)
            return self._write(
                Spent(
                    rho=total,
                    num_updates=spent.num_updates + (not is_same),
                    last_update=update_id,
                    last_rho=rho,
                )
            )

    def lower(self, rho: float, *, update_id: str) -> Spent:
        """Give back what the last update did not cost, as more devices added noise than had to.

        Nothing changes if another update was the last, or cost less.

        Raises:
            StateError: the file cannot be read or written; nothing changes.
        """
        with self._locked():
            spent = self.read()
            if spent.last_update != update_id or rho >= spent.last_rho:
                return spent
            rest = max(spent.rho - spent.last_rho, 0.0)
            return self._write(replace(spent, rho=rest + rho, last_rho=rho))

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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_name(self.path.name + ".lock")
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        except OSError as error:
            raise StateError(f"cannot lock {self.path}: {error.strerror}") from error
        try:
            if not try_lock(descriptor):
                raise StateError(
                    f"another process uses {self.path}",
                    remedy="give each device a --name of its own, or a --state folder",
                )
            yield
        finally:
            os.close(descriptor)


def check_limit(rho: float, *, limit: float | None, delta: float) -> None:
    """Check that a sum is within the owner's limit.

    Raises:
        PrivacyBudgetSpent: it is not.
    """
    if limit is None:
        return
    epsilon = epsilon_of(rho, delta=delta)
    if epsilon > limit:
        raise PrivacyBudgetSpent(
            f"one more update would bring this device's privacy to epsilon {epsilon:.3g} at delta "
            f"{delta:g}; its owner allows {limit:g}"
        )


def check_budget(
    plan: Plan, chosen: PrivacySettings, *, name: str, spent: SpentFile | None
) -> None:
    """Check, before anything is computed, that the owner's settings allow this plan.

    ``spent`` is None for a simulated device, which keeps no file.

    Raises:
        PrivacyRequired: the owner set a limit, and the plan has no noise.
        StateError: the owner set a limit, and there is no file, or it cannot be read.
        PrivacyBudgetSpent: the update would exceed the limit.
    """
    if chosen.budget is None:
        return
    if plan.privacy is None:
        raise PrivacyRequired(f"{name}: the server plans a round without noise")
    if spent is None:
        raise StateError(f"{name}: a privacy budget needs a device that keeps files")
    check_limit(spent.read().rho + plan.privacy.device_rho, limit=chosen.budget, delta=chosen.delta)


def check_test(chosen: PrivacySettings, *, name: str) -> None:
    """Check that the owner's settings allow to report the loss on examples that are held out.

    Raises:
        PrivacyRequired: the owner set a limit, and no noise hides this loss.
    """
    if chosen.budget is not None:
        raise PrivacyRequired(f"{name}: the server asks for a loss without noise")
