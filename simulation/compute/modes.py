"""Chooses how a round's gradients are computed: one device after another, or many in one pass.

All devices start from the same parameters, and the server's step needs only the sum of their
gradients. So the examples of many devices may go through the model in one pass. A device uses the
same examples in the same order in every mode, with the same K, counts, losses and virtual seconds.

* ``one-by-one`` runs the device's own code and gives the same bits as the wire, optionally in
  several processes (``simulation.compute.worker_pool``).
* ``vectorised`` computes many devices in a pass, and the norms of each device's vector, from which
  the gradient noise follows. It is the one that takes local steps.
* ``fused`` computes only the cohort's sum.

``vectorised`` and ``fused`` round differently from ``one-by-one``: they add the same float32 terms
in another order (``tests/simulation/compute/test_modes.py`` checks the bound).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from headwater.common.additivity.penalty import has_penalty
from headwater.common.data.batches import UnsupportedBatch
from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.system.console import print_text
from headwater.common.system.portability import num_usable_cores
from headwater.common.task import weight_unit
from headwater.simulation.compute.one_by_one import OneByOne
from headwater.simulation.fleet.devices import ClientPlans, Compute, Devices

if TYPE_CHECKING:
    from headwater.simulation.compute.worker_pool import WorkerPool

StartPool = Callable[[Devices, int], "WorkerPool"]

log = logging.getLogger(__name__)

# A round of at most so many devices is fast one by one, which has the wire's bits.
MAX_ONE_BY_ONE = 32


def compute_of(
    settings: Settings,
    devices: Devices,
    called: ClientPlans,
    *,
    start_pool: StartPool | None = None,
) -> Compute:
    """Return the mode that the settings name, or the fastest that gives what the rounds need.

    ``called`` are the first round's devices, at least one: their plans' terms say what is asked of
    each, and the first of them is tried. ``start_pool`` starts at most so many workers on a
    cluster; None: they are processes of this machine, if the settings ask for some.

    Raises:
        SettingsError: the named mode cannot compute this task or these settings.
    """
    chosen, plan = settings.simulation.compute, settings.plan
    num_invited = min(settings.cohort.size or devices.num_devices, devices.num_devices)
    if chosen == "auto" and num_invited <= MAX_ONE_BY_ONE:
        log.info("devices are computed one by one: there are only %d in a round", num_invited)
        return _one_by_one(devices, num_invited, start_pool)
    if chosen == "one-by-one" or settings.simulation.aggregators > 1:
        return _one_by_one(devices, num_invited, start_pool)
    from headwater.simulation.compute.batched import BatchedCompute, VectorsTooLarge

    # A liar's norm is held against those of the honest devices.
    watches = devices.has_liars and settings.aggregation.beyond_norm != "keep"
    needs_norms = plan.follow_noise_scale or watches or settings.local.is_on
    with_norms = chosen == "vectorised" or (chosen == "auto" and needs_norms)
    try:
        task = devices.trainer.task
        if weight_unit(task) != 1:
            raise UnsupportedBatch(f"its weights are counted in units of {weight_unit(task):g}")
        if settings.local.is_on and has_penalty(task):
            raise UnsupportedBatch("each device adds its own penalty to each local step")
        if (why := _why_alone(called, with_norms=with_norms)) is not None:
            raise UnsupportedBatch(why)
        if settings.feature.name is not None:  # it may act without terms in the plan
            raise UnsupportedBatch(f"the feature {settings.feature.name} acts on each device")
        if hasattr(devices.trainer.task, "lengths") or (
            plan.max_tokens_per_micro_batch is not None and hasattr(devices.trainer.task, "collate")
        ):
            raise UnsupportedBatch("each device cuts its micro-batches by the examples' lengths")
        if plan.follow_noise_scale and not with_norms:
            raise UnsupportedBatch("the noise scale needs each device's own norms")
        if devices.fleet.faults.absence:
            raise UnsupportedBatch("some devices are away before they answer")
        if settings.asynchronous.is_on:
            raise UnsupportedBatch("in asynchronous rounds each update arrives by itself")
        if settings.aggregation.rule != "sum":
            raise UnsupportedBatch(f"{settings.aggregation.rule} compares each device's own update")
        batched = BatchedCompute(devices, first=int(called.parts[0]), with_norms=with_norms)
    except UnsupportedBatch as reason:
        if chosen != "auto" and not isinstance(reason, VectorsTooLarge):
            raise SettingsError(
                f"--compute {chosen} is not possible: {reason}", remedy="leave --compute out"
            ) from reason
        _say(f"one by one: {reason}")
        return _one_by_one(devices, num_invited, start_pool)
    where = ""
    if (pool := _pool(devices, num_invited, start_pool)) is not None:
        batched.share(pool)
        where = _where(settings, num_invited)
    if settings.local.is_on:
        _say(f"vectorised: many in a pass, each with parameters of its own{where}")
    elif with_norms:
        _say(f"vectorised: many in a pass, each with its norms{where}")
    else:
        _say(f"fused: all in one sum; --compute vectorised measures the noise scale too{where}")
    return batched


def _why_alone(called: ClientPlans, *, with_norms: bool) -> str | None:
    """Return why the plans' terms have each device computed by itself; None: they do not."""
    return next(
        (
            one.why_alone
            for plan in called.table.of_each_kind()
            for one in plan.terms.values()
            if one.why_alone is not None and not (with_norms and one.has_columns)
        ),
        None,
    )


def _one_by_one(devices: Devices, num_invited: int, start_pool: StartPool | None) -> Compute:
    pool = _pool(devices, num_invited, start_pool)
    if pool is None:
        return OneByOne(devices)
    _say(f"one by one{_where(devices.settings, num_invited)}")
    return pool


def _where(settings: Settings, num_invited: int) -> str:
    if settings.simulation.engine == "ray":
        return ", on Ray"
    return f", in {_num_workers(settings, num_invited=num_invited)} processes"


def _num_workers(settings: Settings, *, num_invited: int) -> int:
    """Return the number of processes: the setting, or the usable cores; at most ``num_invited``."""
    chosen = settings.simulation.workers
    number = num_usable_cores() if chosen == "auto" else chosen
    return min(number, num_invited)


def _pool(devices: Devices, num_invited: int, start_pool: StartPool | None) -> WorkerPool | None:
    """Return the processes that compute for this one; most runs have none.

    Raises:
        SettingsError: they could not share what the devices keep.
    """
    settings = devices.settings
    number = _num_workers(settings, num_invited=num_invited)
    if number == 1 and start_pool is None:
        return None
    has_files = (
        settings.model.local_parameters is not None
        or settings.compression.keeps
        or settings.local.keeps_state
    )
    if has_files and start_pool is not None:
        raise SettingsError(
            "the machines of a cluster share no folder, in which devices keep parameters of their "
            "own, what compression left out or the state of --algorithm",
            remedy="leave --engine out",
        )
    if has_files and settings.out is None:
        raise SettingsError(
            "worker processes share what the devices keep as files, and the run writes to no "
            "folder",
            remedy="name one: --out DIR; or leave --workers out",
        )
    if start_pool is not None:
        return start_pool(devices, num_invited)
    from headwater.simulation.compute.local_workers import local_pool

    return local_pool(devices, number)


def _say(how: str) -> None:
    print_text(f"devices are computed {how}")
