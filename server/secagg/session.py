"""One secure session: its clients, its setup, and the run through all phases to the unmasked sum.

A session opens only after all training has ended, so a failed session never costs hours of work.
Each phase is an immutable state (``server.secagg.key_phases`` and the following modules);
``run_session`` sends a phase's requests to the fleet and passes it the replies.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.common.compression.encoding import Coding, coding_of
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan, ReadyReport
from headwater.common.phases import Phase
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import WIDE_CLIP, WIDE_RING
from headwater.common.secagg.masked_numbers import bounds_of
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.secagg.protocol import PHASES, Request, SessionNumber
from headwater.common.settings.schema import SecureSettings
from headwater.common.terms import SumOf
from headwater.server.fleet import Dropout, Fleet
from headwater.server.secagg.blame import Evidence
from headwater.server.secagg.encoding_state import EncodingState
from headwater.server.secagg.key_phases import CheckPhase, DealPhase, KeysPhase, open_session
from headwater.server.secagg.mask_phases import MaskPhase, SignPhase
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.unmask_phase import UnmaskedSum, UnmaskPhase

log = logging.getLogger(__name__)

PHASE_OF: dict[type[Request], Phase] = {phase.request: phase for phase in PHASES}

Refuse = Callable[[str, HeadwaterError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyCohort:
    """The clients that have finished training, and the limits from their plans."""

    ready: Mapping[str, ReadyReport]
    planned_weights: Mapping[str, int]
    metrics: tuple[str, ...]
    max_examples: int
    plan_digest: bytes
    privacy: PrivacyTerms | None = None
    coding: Coding | None = None
    """The random coordinates that are masked; None: all."""
    sums: Mapping[str, SumOf] = field(default_factory=dict)
    """The sums beside the model's that the plans ask for."""

    @staticmethod
    def of(
        ready: Mapping[str, ReadyReport],
        plans: Mapping[str, Plan],
        *,
        max_weight_per_example: int,
        task: str,
        metrics: tuple[str, ...],
        num_values: int = 0,
    ) -> ReadyCohort:
        """Take the clients that are ready; ``metrics`` are the names that a session masks.

        ``task`` is the code of the run's task, ``num_values`` the number of the model's parameters.
        """
        shared = next(iter(plans.values()))
        return ReadyCohort(
            ready=ready,
            planned_weights={
                name: plans[name].weigh_as or max_weight_per_example * plans[name].max_examples
                for name in ready
            },
            metrics=metrics,
            max_examples=max((plans[name].max_examples for name in ready), default=1),
            plan_digest=plan_digest(shared, task),
            privacy=shared.of(PrivacyTerms),
            coding=None if shared.of(CompressionTerms) is None else coding_of(shared),
            sums=shared.extra_sums(num_values).of,
        )

    def num_masked(self, num_values: int) -> int:
        """Return how many coordinates of a vector are masked."""
        return num_values if self.coding is None else self.coding.terms.num_sent(num_values)

    def without(self, names: Iterable[str]) -> ReadyCohort:
        """Return the cohort without these clients."""
        removed = set(names)
        return replace(
            self,
            ready={name: one for name, one in self.ready.items() if name not in removed},
            planned_weights={n: w for n, w in self.planned_weights.items() if n not in removed},
        )


def setup_of(
    cohort: ReadyCohort,
    settings: SecureSettings,
    state: EncodingState,
    *,
    run_id: int,
    number: SessionNumber,
    num_values: int,
    model_digest: bytes,
    rotation_seed: bytes,
    whole: ReadyCohort | None = None,
) -> SessionSetup:
    """Choose the parameters that do not depend on which clients advertise keys.

    ``num_values`` are the coordinates of a whole vector, ``model_digest`` is of the model that all
    updates of the cohort are of. If ``cohort`` is a group of the round's clients, ``whole`` is all
    of them: bounds and encoding are the whole's, so that the groups' sums can be added in the ring.
    """
    limits = whole or cohort
    assert settings.aggregation != "off"
    num_values = cohort.num_masked(num_values)
    seed = digest = None
    ring_bits = state.ring_bits(
        settings.ring_bits, num_values, is_private=cohort.privacy is not None
    )
    if ring_bits < 32:
        seed = rotation_seed
        digest = hashlib.sha256(state.block_bounds(num_values).tobytes()).digest()
    return SessionSetup(
        run=run_id,
        number=number,
        mode=settings.aggregation,
        model_digest=model_digest,
        plan_digest=cohort.plan_digest,
        num_values=num_values,
        planned_weights=cohort.planned_weights,
        clip=WIDE_CLIP if ring_bits == WIDE_RING else state.clip.clip,
        ring_bits=ring_bits,
        bounds=bounds_of(
            cohort.metrics,
            largest_weight=max(limits.planned_weights.values(), default=1),
            max_examples=limits.max_examples,
        ),
        added_weights=None if whole is None else tuple(whole.planned_weights.values()),
        rotation_seed=seed,
        bounds_digest=digest,
        min_members=settings.min_members,
        min_survivors=settings.min_survivors,
        corrupted=settings.corrupted,
        dropout=settings.dropout,
        privacy=cohort.privacy,
        sums=cohort.sums,
    )


def run_session(
    setup: SessionSetup,
    fleet: Fleet,
    *,
    bounds: NDArray[np.float32] | None,
    phase_seconds: float,
    refuse: Refuse,
    evidence: Evidence,
) -> UnmaskedSum:
    """Run a session through all phases; call ``refuse`` for each client that fails in one.

    ``bounds`` are the block bounds of a 16-bit encoding. ``evidence`` collects what later shows
    which clients are at fault if the session is aborted.

    Raises:
        TooFewSurvivors, DealerCheated, NoSuchGraph: the session is aborted.
    """
    state: Any = open_session(setup)
    while not isinstance(state, UnmaskedSum):
        if requests := state.requests():
            state = _exchange(state, requests, fleet, bounds, phase_seconds, refuse, evidence)
        if isinstance(state, CheckPhase):
            evidence.add_complaints(state.complaints)
        if isinstance(state, KeysPhase | CheckPhase):
            for name, reason in state.excluded.items():
                refuse(name, reason)
            for line in dict.fromkeys(f"{why.code}: {why}" for why in state.excluded.values()):
                log.warning("%s", line)
        state = (
            state.close(num_threads=torch.get_num_threads())
            if isinstance(state, UnmaskPhase)
            else state.close()
        )
    return state


def _exchange(
    state: Any,
    requests: Mapping[str, Request],
    fleet: Fleet,
    bounds: NDArray[np.float32] | None,
    phase_seconds: float,
    refuse: Refuse,
    evidence: Evidence,
) -> Any:
    """Send a phase's requests, and return the phase with the accepted replies."""
    is_masking = isinstance(state, MaskPhase)
    evidence.has_masked |= is_masking
    if isinstance(state, DealPhase):
        evidence.members = frozenset(requests)
    replies = fleet.converse(
        PHASE_OF[type(next(iter(requests.values())))],
        requests,
        vector=bounds.tobytes() if is_masking and bounds is not None else None,
        reply_bytes=state.total.reply_bytes if is_masking else 0,
        num_needed=_num_needed(state, len(requests)),
        timeout_seconds=phase_seconds,
    )
    for reply in replies:
        if isinstance(reply, Dropout):
            refuse(reply.name, reply.error)
            evidence.add_client_error(reply.name, reply.error)
            continue
        try:
            vector = (reply.vector,) if is_masking else ()
            state = state.take(reply.name, reply.message, *vector)
        except HeadwaterError as error:
            log.warning("%s: %s", error.code, error)
            refuse(reply.name, error)
            evidence.add_rejected(reply.name, error)
        if isinstance(state, UnmaskPhase) and state.can_unmask:
            break
    close_replies = getattr(replies, "close", None)
    if close_replies is not None:
        close_replies()  # cancels the requests that are still open
    return state


def _num_needed(state: Any, num_requests: int) -> int:
    """Return the number of replies without which a phase, or the next one, aborts the session."""
    if isinstance(state, SignPhase):
        return state.num_needed
    if isinstance(state, UnmaskPhase):
        return num_requests  # ``run_session`` ends the phase as soon as it has enough
    setup: SessionSetup = state.setup
    return max(setup.least_members, setup.least_survivors(num_requests))
