"""The plans that clients may still answer, in memory and in a file of the run's folder.

A client that lost its link goes on under its last plan (--offline-windows) and delivers when it is
back, perhaps to a server that was started again. So the plans are written down before they are
sent; the plan's round, which the update names, says which one it belongs to. Without offline
windows nothing is written: an update that was out when the server stopped is then computed again.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from headwater.common.errors import CountOutOfRange, FeatureMissing, StateError
from headwater.common.estimates.linear_fit import Line
from headwater.common.local_training.local_terms import LocalTerms
from headwater.common.local_training.terms import PLAIN, LocalPlan
from headwater.common.messages import Plan, UpdateReport
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.server.local_training.local_plans import algorithm_of

log = logging.getLogger(__name__)

FILE = "plans.json"
MOST_HASTE = 4.0
"""A client may be so many times faster than it told: it measured itself while it was busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOut:
    """A plan, and when it was sent: in seconds since 1970, by this machine's clock.

    ``since`` is that of a clock which nobody sets; None if an earlier server has sent it.
    """

    plan: Plan
    sent_at: float
    clock: str
    since: float | None = None


class PlansOut:
    """Each client's plans, the newest last.

    Two may be of one round: a server that took over plans the round again that it found unfinished,
    and a client without a link still works on the first plan. At most one of them is answered.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        wall_clock: Callable[[], float] = time.time,
        steady_clock: Callable[[], float] = time.monotonic,
        clock: str | None = None,
    ) -> None:
        """``clock`` names the clock, by default that of the machine."""
        chosen = settings.asynchronous
        self._wall_clock, self._steady_clock = wall_clock, steady_clock
        self._clock = clock or socket.gethostname()
        self.is_kept = chosen.offline_windows > 1
        """Whether plans are noted: only for offline windows."""
        self._max_staleness = chosen.max_staleness
        self._path = None if settings.out is None else settings.out / FILE
        self._algorithm = algorithm_of(settings)
        """What the plans of this server say of the algorithm."""
        self._plans: dict[str, list[PlanOut]] = {}

    def restore(self, *, version: int, counted: Mapping[str, int]) -> None:
        """Read the file of an earlier server of the run; a damaged one counts as empty.

        It may be older or newer than the checkpoint of the model ``version``. Left out are plans
        that were counted (``counted``: the last round of each client), plans of models that this
        server has not made, and plans of another algorithm, whose updates are no like sums.
        """
        if not self.is_kept or self._path is None:
            return

        def is_open(name: str, plan: Plan) -> bool:
            is_new = plan.round > counted.get(name, 0) and plan.model_version <= version
            return is_new and _way_of(plan) == self._algorithm

        try:
            found = json_of(self._path.read_text(encoding="utf-8"))
            self._plans = {
                name: [
                    PlanOut(
                        plan=plan, sent_at=float(one["sent_at"]), clock=str(one.get("clock", ""))
                    )
                    for one in rows
                    if is_open(name, plan := Plan.model_validate_json(one["plan"]))
                ]
                for name, rows in found.items()
            }
        except FileNotFoundError:
            return
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            ValidationError,
            FeatureMissing,
        ) as error:
            log.warning(
                "%s cannot be read, so that updates of earlier plans are refused: %s",
                self._path,
                error,
            )

    def discard_other_run(self) -> None:
        """Delete the file that another run left in the folder, before this run's first checkpoint.

        Else a server that is killed after that checkpoint would read it when it resumes. If it
        cannot be deleted, ``add`` cannot write it either, and reports that.
        """
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()

    def add(self, plans: Mapping[str, Plan], *, version: int) -> bool:
        """Note plans before they are sent with the model ``version``, and drop those too stale.

        Returns whether the file was written.

        Raises:
            StateError: the file cannot be written.
        """
        if not self.is_kept:
            return False
        for name, plan in plans.items():
            own = self._plans.setdefault(name, [])
            if all(one.plan != plan for one in own):
                at, since = self._wall_clock(), self._steady_clock()
                own.append(PlanOut(plan=plan, sent_at=at, clock=self._clock, since=since))
        oldest = version - self._max_staleness
        for name, own in list(self._plans.items()):
            self._plans[name] = [one for one in own if one.plan.model_version >= oldest]
            if not self._plans[name]:
                del self._plans[name]
        if self._path is None or not plans:
            return False
        plain = {
            name: [
                {"sent_at": one.sent_at, "clock": one.clock, "plan": one.plan.model_dump_json()}
                for one in own
            ]
            for name, own in self._plans.items()
        }
        try:
            write_atomically(self._path, json.dumps(plain).encode())
        except OSError as error:
            raise StateError(f"cannot write {self._path}: {error.strerror}") from error
        return True

    def answered_by(self, report: UpdateReport) -> Plan | None:
        """Return the plan that a client's report answers; None if there is none of its round.

        Of two plans of one round it is the newest that allows so many examples.
        """
        found = [
            one.plan for one in self._plans.get(report.name, []) if one.plan.round == report.round
        ]
        fitting = [one for one in found if _allows(one, report)]
        return next(reversed(fitting or found), None)

    def check_time(self, report: UpdateReport, plan: Plan, pace: Line | None) -> None:
        """Check that a client had the time for its windows, by the speed that it told.

        ``pace`` are the seconds of its micro-batch; None: the run asks for no speed. Nothing is
        known of a plan that another machine's server has sent: their clocks need not agree.

        Raises:
            CountOutOfRange: it claims more windows than that.
        """
        sent = [one for one in self._plans.get(report.name, []) if one.plan == plan]
        if pace is None or report.num_windows < 2 or not sent or sent[0].clock != self._clock:
            return
        passed = self._wall_clock() - sent[0].sent_at
        if (since := sent[0].since) is not None:  # the other clock may have been set back
            passed = max(passed, self._steady_clock() - since)
        elif passed < 0:
            return
        window = plan.accumulation_steps * pace.base + plan.quota * pace.each
        if report.num_windows * window > MOST_HASTE * passed:
            raise CountOutOfRange(
                f"{report.name}: {report.num_windows} windows in {passed:.3g} s, and by the speed "
                f"that it told one takes {window:.3g} s"
            )

    def remove(self, name: str, round_number: int) -> None:
        """Forget a client's plans up to a round, because it has answered that one."""
        own = self._plans.get(name, [])
        self._plans[name] = [one for one in own if one.plan.round > round_number]


def _allows(plan: Plan, report: UpdateReport) -> bool:
    most = report.num_windows * plan.max_examples
    return report.num_windows <= plan.max_windows and report.num_examples <= most


def _way_of(plan: Plan) -> tuple[LocalTerms | None, str | None]:
    local = plan.of(LocalPlan) or PLAIN
    return local.how, local.algorithm
