"""Admits the devices of a run's labels; the others stay connected, and wait for another run."""

from __future__ import annotations

import logging

from headwater.common.messages import DeviceReport
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.fields import has_labels
from headwater.common.settings.schema import Settings
from headwater.server.planning.features import PlanningFeature

log = logging.getLogger(__name__)


class LabelledDevices(PlanningFeature):
    """The devices of ``cohort.devices``, by what their owners say of them."""

    chooses_clients = True

    def __init__(self, settings: Settings, layout: ModelLayout) -> None:
        super().__init__(settings, layout)
        self._wanted = settings.cohort.devices or ""
        self._others: dict[str, str | None] = {}
        """What the devices have that wait, so that each is logged once."""

    def admits(self, report: DeviceReport) -> bool:
        is_wanted = has_labels(report.labels, self._wanted)
        if not is_wanted and self._others.get(report.name, "") != report.labels:
            self._others[report.name] = report.labels
            log.info(
                "%s waits: this run is for devices of %s, and it has %s",
                report.name,
                self._wanted,
                report.labels or "no labels",
            )
        return is_wanted
