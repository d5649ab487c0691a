"""A masked round's attempts: a session, and another among the rest while nobody has masked.

A session that is aborted before the masks has cost no update anything: if it is known whose fault
it was, the others go into the next session at once, with the updates that they have. Once somebody
has masked, the round is aborted, and its next attempt takes new examples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import HeadwaterError, RoundAborted, SessionRefused
from headwater.server.fleet import Fleet
from headwater.server.secagg.blame import Evidence
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.session import ReadyCohort, Refuse, run_session
from headwater.server.secagg.unmask_phase import UnmaskedSum

log = logging.getLogger(__name__)

SHOWN = 3  # devices that a line of the log explains


def sum_masked(
    cohort: ReadyCohort,
    fleet: Fleet,
    *,
    open_session: Callable[[ReadyCohort], SessionSetup],
    bounds: NDArray[np.float32] | None,
    phase_seconds: float,
    refuse: Refuse,
    leave_out: Callable[[Mapping[str, str]], None],
) -> UnmaskedSum:
    """Return the cohort's sum, of as many attempts as it takes to be rid of who can be named.

    ``open_session`` chooses a session's parameters, with a number of its own. ``refuse`` is told of
    whoever is not in the sum, ``leave_out`` of who made an attempt fail, and why.

    Raises:
        TooFewSurvivors, DealerCheated, NoSuchGraph: the last attempt was aborted.
    """
    while True:
        opening, evidence = open_session(cohort), Evidence()
        refused: dict[str, HeadwaterError] = {}
        try:
            opened = run_session(
                opening,
                fleet,
                bounds=bounds,
                phase_seconds=phase_seconds,
                refuse=refused.__setitem__,
                evidence=evidence,
            )
        except RoundAborted as aborted:
            found = evidence.culprits(aborted)
            leave_out(found)
            rest = cohort.without(found)
            is_over = not found or evidence.has_masked or len(rest.ready) < opening.least_members
            whose = {name: SessionRefused(f"{name}: {why}") for name, why in found.items()}
            _tell({**whose, **refused} if is_over else whose, refuse)
            _log_reasons(opening, refused)
            if is_over:
                raise
            log.warning("%s: %s; trying again without %s", aborted.code, aborted, ", ".join(found))
            cohort = rest
        else:
            _tell(refused, refuse)
            return opened


def _log_reasons(opening: SessionSetup, refused: Mapping[str, HeadwaterError]) -> None:
    """Say why devices left: the error that ends an attempt only says that they were too few."""
    some = "; ".join(f"{error.code}: {error}" for error in list(refused.values())[:SHOWN])
    if refused:
        more = f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        log.warning("%s: %d devices left (%s%s)", opening.number, len(refused), some, more)


def _tell(refused: Mapping[str, HeadwaterError], refuse: Refuse) -> None:
    for name, error in refused.items():
        refuse(name, error)
