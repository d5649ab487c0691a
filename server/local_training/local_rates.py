"""The learning rate of the local steps in each round: set, or by a schedule of torch's."""

from __future__ import annotations

import math

import torch

from headwater.common.errors import SettingsError
from headwater.common.settings.training import (
    LocalScheduleSettings,
    LocalSettings,
    ScheduleSettings,
)
from headwater.server.aggregation.optimizer_settings import new_scheduler


class LocalRates:
    """A rate for each round, which follows from its number: a repeated round has the same."""

    def __init__(self, local: LocalSettings, schedule: LocalScheduleSettings) -> None:
        """Make the schedule.

        Raises:
            SettingsError: there is none of this name, or its arguments are wrong.
        """
        self._name = schedule.name
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=local.rate)
        chosen = ScheduleSettings(name=schedule.name, arguments=schedule.arguments)
        self._schedule = new_scheduler(self._optimizer, chosen)
        self._rates: list[float] = [self._rate]
        """Those of the first rounds."""

    @property
    def is_set(self) -> bool:
        """Whether the rate changes at all."""
        return self._schedule is not None

    @property
    def _rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def of_round(self, number: int) -> float:
        """Return the rate of a round, from 1.

        Raises:
            SettingsError: the schedule has ended before, or its rate is not above 0.
        """
        if self._schedule is None:
            return self._rates[0]
        while len(self._rates) < number:
            self._optimizer.step()  # torch warns where a schedule steps before its optimizer
            try:
                self._schedule.step()
            except Exception as error:  # whatever it raises for these arguments
                raise SettingsError(
                    f"--local-schedule {self._name} has no rate for round "
                    f"{len(self._rates) + 1}: {error}",
                    remedy="set --local-schedule-argument so that it lasts for all --rounds",
                ) from error
            self._rates.append(self._rate)
        rate = self._rates[number - 1]
        if not (rate > 0 and math.isfinite(rate)):
            raise SettingsError(
                f"--local-schedule {self._name} gives round {number} the rate {rate:g}, and "
                f"devices would train nothing",
                remedy="let the schedule end later or above 0: --local-schedule-argument, "
                "e.g. eta_min=1e-5",
            )
        return rate
