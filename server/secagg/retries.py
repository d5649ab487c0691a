"""Retries of a masked round: a further session without the clients at fault, until one succeeds.

A session that is aborted before any client has masked its update costs no update. If the clients at
fault are known, the remaining clients enter the next session at once, with the same updates. After
a client has masked, the round is aborted, and its next attempt uses new examples.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import (
    HeadwaterError,
    RoundAborted,
    SessionRefused,
    TooFewSurvivors,
)
from headwater.common.wording import counted
from headwater.server.fleet import Fleet
from headwater.server.secagg.blame import Evidence
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.session import ReadyCohort, Refuse, run_session
from headwater.server.secagg.unmask_phase import UnmaskedSum

log = logging.getLogger(__name__)

MAX_LOGGED = 3  # devices whose errors one log line shows


def sum_masked(
    cohort: ReadyCohort,
    fleet: Fleet,
    *,
    set_up: Callable[[ReadyCohort], SessionSetup],
    bounds: NDArray[np.float32] | None,
    phase_seconds: float,
    refuse: Refuse,
    leave_out: Callable[[Mapping[str, str]], None],
) -> UnmaskedSum:
    """Return the cohort's sum, after as many sessions as it takes to remove clients at fault.

    ``set_up`` chooses each session's parameters, with a new session number. ``refuse`` is called
    for each client that is not in the sum, ``leave_out`` with the clients at fault and the reasons.

    Raises:
        TooFewSurvivors, DealerCheated, NoSuchGraph: the last session was aborted.
    """
    while True:
        setup, evidence = set_up(cohort), Evidence()
        refused: dict[str, HeadwaterError] = {}
        try:
            unmasked = run_session(
                setup,
                fleet,
                bounds=bounds,
                phase_seconds=phase_seconds,
                refuse=refused.__setitem__,
                evidence=evidence,
            )
        except RoundAborted as aborted:
            reasons = evidence.at_fault(aborted)
            leave_out(reasons)
            rest = cohort.without(reasons)
            is_over = not reasons or evidence.has_masked or len(rest.ready) < setup.least_members
            errors: dict[str, HeadwaterError] = {
                name: SessionRefused(f"{name}: {reason}") for name, reason in reasons.items()
            }
            for name, error in ({**errors, **refused} if is_over else errors).items():
                refuse(name, error)
            _log_refused(setup, refused)
            if is_over:
                if (with_reason := _with_reason(aborted, {**errors, **refused})) is not aborted:
                    raise with_reason from aborted
                raise  # an error that is its own cause would have no last cause
            log.warning("%s: %s; retrying without %s", aborted.code, aborted, ", ".join(reasons))
            cohort = rest
        else:
            for name, error in refused.items():
                refuse(name, error)
            return unmasked


def _with_reason(aborted: RoundAborted, errors: Mapping[str, HeadwaterError]) -> RoundAborted:
    """Add to an error of too few members what all devices that left the session have said.

    If they gave several reasons, the log has each, and the error counts them.
    """
    if not isinstance(aborted, TooFewSurvivors) or not errors:
        return aborted
    counts, first = Counter(error.code for error in errors.values()), next(iter(errors.values()))
    if len(counts) > 1:
        why = ", ".join(f"{code} {number}" for code, number in counts.most_common())
        return TooFewSurvivors(f"{aborted.message}; why devices left: {why}")
    return TooFewSurvivors(
        f"{aborted.message}; {counted(len(errors), 'device')} left for one reason, "
        f"{first.code}: {first.message}",
        remedy=first.remedy or aborted.remedy,
    )


def _log_refused(setup: SessionSetup, refused: Mapping[str, HeadwaterError]) -> None:
    """Log why clients left, which the error that aborts the session does not say."""
    some = "; ".join(f"{error.code}: {error}" for error in list(refused.values())[:MAX_LOGGED])
    if refused:
        more = f"; and {len(refused) - MAX_LOGGED} more" if len(refused) > MAX_LOGGED else ""
        log.warning("%s: %s left (%s%s)", setup.number, counted(len(refused), "device"), some, more)
