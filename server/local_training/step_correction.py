"""Corrects the mean of devices that took unlike numbers of local steps (FedNova).

Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous federated
optimization", equations 7 and 8. A device that takes twice as many steps moves about twice as far,
so that a mean of differences weighs its data twice, and converges to a point between the devices'
own optima that is no optimum of their sum. Each device therefore divides its difference by the
length of its own path (``common.local_training.local_optimizer.path_length``), and the server
multiplies the mean by the mean length: the direction is that of one step each, and the length that
of a usual round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from headwater.common.local_training.local_optimizer import path_length
from headwater.common.local_training.terms import LocalPlan
from headwater.common.messages import Plan, UpdateReport
from headwater.server.aggregation.round_reports import RoundSum


def once(_: Plan, _num_windows: int) -> int:
    """Return how many times an update of a synchronous round counts."""
    return 1


def correct_steps(
    done: RoundSum,
    plans: Mapping[str, Plan],
    reports: Mapping[str, UpdateReport],
    times_of: Callable[[Plan, int], int] = once,
) -> None:
    """Multiply the mean by the mean path length of its clients, in place; 1 if none is normalized.

    The lengths are weighed as the updates are: by their weights, ``times_of`` their plans times. A
    client counts with the steps that it reports, at most those of its plan; one without a report,
    as in masked and private rounds, with its plan's. The sum of several windows of a plan, each of
    which begins at the plan's model, counts with their mean length.
    """
    local = next(iter(plans.values())).of(LocalPlan)  # the same in all plans of a round
    if local is not None and local.how is not None and local.how.is_normalized:
        done.mean_P.mul_(mean_path_length(plans, done.names, reports, times_of))


def mean_path_length(
    plans: Mapping[str, Plan],
    names: Iterable[str],
    reports: Mapping[str, UpdateReport],
    times_of: Callable[[Plan, int], int] = once,
) -> float:
    """Return the mean path length of the clients ``names``; ``reports`` are those of some."""
    lengths, weights = [], []
    for name in names:
        plan, report = plans[name], reports.get(name)
        local = plan.of(LocalPlan)
        assert local is not None
        length = _own_length(local, report)
        own = (plan.weigh_as or plan.quota) if report is None else report.weight
        weight = float(times_of(plan, 1 if report is None else report.num_windows) * own)
        lengths.append(weight * length)
        weights.append(weight)
    return math.fsum(lengths) / math.fsum(weights)


def _own_length(local: LocalPlan, report: UpdateReport | None) -> float:
    """Return the mean path length of a client's windows, of which there is mostly one."""
    terms = local.how
    assert terms is not None
    if report is None:
        return path_length(terms, local.steps, rate=local.learning_rate)
    number = report.num_windows
    steps = min(max(report.local_steps, number), number * local.steps)
    # So many windows with one step more than the rest make up the sum of all steps.
    fewest, num_longer = divmod(steps, number)
    lengths = [
        path_length(terms, fewest + more, rate=local.learning_rate)
        for more in range(2 if num_longer else 1)
    ]
    return ((number - num_longer) * lengths[0] + num_longer * lengths[-1]) / number
