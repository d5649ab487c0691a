"""How a cohort's gradients are computed: one device after another, or many at once.

All of them start from the same parameters, and the step needs no more than the sum of their
gradients: so the examples of many devices may go through the model in one pass. What each device
does is the same in every way: its examples and their order, K, its counts and losses, the virtual
clock's seconds.

* ``one-by-one`` runs the device's own code, and gives the same bits as the wire; in several
  processes (``headwater.simulation.compute.modes.worker_pool``) if they are asked for.
* ``vectorised`` computes the norms of each device's own vector too, from which the gradient noise
  follows, many devices in a pass.
* ``fused`` computes the cohort's sum alone.

The last two round differently: each term of a sum is computed as before, to float32's rounding, and
the terms are added in another order (``tests/simulation/compute/test_modes.py`` holds the bound).
"""

from __future__ import annotations

import logging

from headwater.common.data.batches import UnsupportedBatch
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.simulation.compute.batched import Grouped
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.compute.worker_pool import Workers, num_workers
from headwater.simulation.fleet.devices import Compute, Devices

log = logging.getLogger(__name__)

# A round of so few devices takes no time one by one, and has the wire's bits.
FEW = 32


def compute_of(settings: Settings, devices: Devices) -> Compute:
    """Return the way that the settings name, or the fastest that gives what the rounds need.

    Raises:
        SettingsError: the named way cannot do what is asked for.
    """
    chosen, plan = settings.simulation.compute, settings.plan
    num_invited = min(settings.cohort.size or devices.num_devices, devices.num_devices)
    if chosen == "auto" and num_invited <= FEW:
        log.info("devices are computed one by one: %d are few", num_invited)
        return _one_by_one(settings, devices, num_invited)
    if chosen == "one-by-one":
        return _one_by_one(settings, devices, num_invited)
    own_vectors = chosen == "vectorised" or (chosen == "auto" and plan.follow_noise_scale)
    try:
        if plan.local_steps > 1:
            raise UnsupportedBatch("each device's local steps move a model of its own")
        if plan.follow_noise_scale and not own_vectors:
            raise UnsupportedBatch("the noise scale follows from each device's own norms")
        many = Grouped(devices, own_vectors=own_vectors)
    except UnsupportedBatch as reason:
        if chosen != "auto":
            raise SettingsError(
                f"--compute {chosen} cannot be: {reason}", remedy="leave --compute out"
            ) from reason
        _say(f"one by one: {reason}")
        return _one_by_one(settings, devices, num_invited)
    if settings.simulation.workers != 1:
        _say("together, in this process alone: workers are for --compute one-by-one")
    if own_vectors:
        _say("vectorised, many in a pass")
    else:
        _say("fused, all in one sum; --compute vectorised tells the noise scale too")
    return many


def _one_by_one(settings: Settings, devices: Devices, num_invited: int) -> Compute:
    if settings.simulation.compile:
        _say("one by one, with the bits of the wire: nothing is compiled")
    number = num_workers(settings, num_invited=num_invited)
    if number == 1:
        return OneByOne(devices)
    _say(f"one by one, in {number} processes")
    return Workers(devices, number)


def _say(how: str) -> None:
    console.print(f"devices are computed {how}", soft_wrap=True, markup=False, highlight=False)
