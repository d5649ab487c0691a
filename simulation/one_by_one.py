"""One device after another, by the very code that runs on a real one: the same bits as the wire."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.errors import EmptyUpdate, HeadwaterError, error_of, travelling
from common.parameters import ModelImage
from common.update import Update
from server.fleet import Dropout, UpdateOfMany
from simulation.devices import Called, Devices
from simulation.faults import lie
from simulation.profiles import moment_of

log = logging.getLogger(__name__)


class OneByOne:
    """Trains the called devices in their order."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def train(
        self,
        called: Sequence[Called],
        image: ModelImage,
        *,
        run_id: int,
        timeout_seconds: float | None,
    ) -> Iterator[Update | UpdateOfMany | Dropout]:
        """Yield each device's answer; its vector is valid until the next one is asked for."""
        model = image.buffer()
        for one in called:
            yield self.answer(one, model, run_id=run_id)

    def answer(self, called: Called, model: memoryview, *, run_id: int) -> Update | Dropout:
        """Let one device work on its plan, and remember its place."""
        devices, plan, part = self._devices, called.plan, called.part
        identity, resident = devices.identity(part), devices.resident
        resident.load_model(run_id, plan.model_version, model)
        machine = devices.machine(part, round_number=plan.round)
        walk = devices.walks[part]
        try:
            update, devices.walks[part] = resident.train(identity, machine, plan, walk)
        except EmptyUpdate as error:
            devices.walks[part] = resident.skip(identity, plan, walk)
            return Dropout(name=called.name, error=error)
        except HeadwaterError as error:
            return Dropout(name=called.name, error=error)
        except Exception as error:
            log.exception("the task or the device failed")
            return Dropout(name=called.name, error=error_of(*travelling(error)))
        told = devices.lies(part, round_number=plan.round)
        if told:
            moment = moment_of(devices.settings, part, round_number=plan.round)
            update = replace(update, values_P=lie(update.values_P, told, moment))
        return update
