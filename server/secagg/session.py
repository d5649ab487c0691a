"""A masked round: the session among those who have an update, from its opening to the sum.

Training is over when a session opens, so that hours of work are never inside it. The phases are
states of their own (``server.secagg.key_phases``); here they are walked through over the fleet, and
what follows from round to round is kept: the session's number, the clip bound or the 16-bit ring's
block bounds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headwater.common.errors import CheckpointCorrupt, HeadwaterError, StateError, UnexpectedUpdate
from headwater.common.messages import Plan, ReadyReport
from headwater.common.model.parameters import ModelImage
from headwater.common.secagg import masked_numbers
from headwater.common.secagg.fixed_point import ClipState, decode_mean, follow_clip
from headwater.common.secagg.masked_numbers import bounds_of, check_sums, metrics_in, noise_in
from headwater.common.secagg.protocol import (
    NUM_CLIPPED,
    PHASES,
    WEIGHT,
    Phase,
    Request,
    SessionNumber,
    next_number,
)
from headwater.common.secagg.rotation import (
    Rotation,
    device_spread,
    first_bounds,
    follow_bounds,
    unrotate_in_place,
)
from headwater.common.settings.schema import SecureSettings
from headwater.common.system.atomic_file import write_whole
from headwater.server.aggregation.round_sum import RoundSum
from headwater.server.fleet import Dropout, Fleet
from headwater.server.secagg.blame import Evidence
from headwater.server.secagg.key_phases import CheckPhase, DealPhase, open_session
from headwater.server.secagg.mask_phases import MaskPhase
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.unmask_phase import UnmaskedSum, UnmaskPhase

log = logging.getLogger(__name__)

SESSION_FILE = "session.json"
PHASE_OF: dict[type[Request], Phase] = {phase.request: phase for phase in PHASES}

Refuse = Callable[[str, HeadwaterError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingState:
    """What follows from masked round to masked round."""

    clip: ClipState = field(default_factory=ClipState)
    bounds: NDArray[np.float32] | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {
            "clip": self.clip.clip,
            "largest_mean": self.clip.largest_mean,
            "bounds": None if self.bounds is None else self.bounds.tolist(),
        }

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> EncodingState:
        """Return what ``to_json`` gave."""
        if not row:
            return EncodingState()
        bounds = row["bounds"]
        return EncodingState(
            clip=ClipState(clip=row["clip"], largest_mean=row["largest_mean"]),
            bounds=None if bounds is None else np.array(bounds, dtype=np.float32),
        )


class SessionNumbers:
    """The numbers of a run's sessions: strictly increasing, and stored before anything is sent."""

    def __init__(self, folder: Path | None, *, run_id: int) -> None:
        """Go on behind the last number that was stored for this run, if any.

        Raises:
            CheckpointCorrupt: the file cannot be read.
        """
        self._path = None if folder is None else folder / SESSION_FILE
        self._run_id = run_id
        self._last: SessionNumber | None = None
        if self._path is not None and self._path.exists():
            try:
                told = json.loads(self._path.read_text())
                if told["run_id"] == run_id:
                    self._last = SessionNumber(int(told["round"]), int(told["attempt"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointCorrupt(
                    f"{self._path} does not say which secure sessions there were: {error}",
                    remedy="begin another run: devices refuse a number that was there before",
                ) from error

    def next(self, round_number: int) -> SessionNumber:
        """Return the number of a round's next session, once it is stored.

        Raises:
            StateError: it could not be stored.
        """
        number = next_number(self._last, round_number=round_number)
        if self._path is not None:
            row = {"run_id": self._run_id, "round": number.round, "attempt": number.attempt}
            try:
                write_whole(self._path, json.dumps(row).encode())
            except OSError as error:
                raise StateError(f"cannot write {self._path}: {error.strerror}") from error
        self._last = number
        return number


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyCohort:
    """The devices that have an update, and what their plans allow."""

    ready: Mapping[str, ReadyReport]
    planned_weights: Mapping[str, int]
    metrics: tuple[str, ...]
    most_examples: int

    @staticmethod
    def of(
        ready: Mapping[str, ReadyReport],
        plans: Mapping[str, Plan],
        *,
        max_weight_per_example: int,
        refuse: Refuse,
    ) -> ReadyCohort:
        """Take those whose metrics are those of most: all numbers of a session have one name."""
        kinds = [one.metrics for one in ready.values()]
        metrics = max(sorted(set(kinds)), key=kinds.count, default=())
        alike = {}
        for name, one in ready.items():
            if one.metrics == metrics:
                alike[name] = one
            else:
                refuse(name, UnexpectedUpdate(f"{name}: its metrics are not those of the others"))
        return ReadyCohort(
            ready=alike,
            planned_weights={
                name: plans[name].weigh_as or max_weight_per_example * plans[name].most_examples
                for name in alike
            },
            metrics=metrics,
            most_examples=max((plans[name].most_examples for name in alike), default=1),
        )

    def without(self, names: Iterable[str]) -> ReadyCohort:
        """Return the cohort without some of its devices."""
        gone = set(names)
        return replace(
            self,
            ready={name: one for name, one in self.ready.items() if name not in gone},
            planned_weights={n: w for n, w in self.planned_weights.items() if n not in gone},
        )


def setup_of(
    cohort: ReadyCohort,
    chosen: SecureSettings,
    followed: EncodingState,
    *,
    run_id: int,
    number: SessionNumber,
    image: ModelImage,
) -> SessionSetup:
    """Choose a session's parameters, as far as they do not depend on who takes part."""
    assert chosen.aggregation != "off"
    largest = max(cohort.planned_weights.values(), default=1)
    num_values = image.layout.num_parameters
    seed = digest = None
    if chosen.ring_bits == 16:
        seed = os.urandom(32)
        digest = hashlib.sha256(block_bounds(followed, num_values).tobytes()).digest()
    return SessionSetup(
        run=run_id,
        number=number,
        mode=chosen.aggregation,
        model_digest=hashlib.sha256(image.buffer()).digest(),
        num_values=num_values,
        planned_weights=cohort.planned_weights,
        clip=followed.clip.clip,
        ring_bits=chosen.ring_bits,
        bounds=bounds_of(
            cohort.metrics, largest_weight=largest, most_examples=cohort.most_examples
        ),
        rotation_seed=seed,
        bounds_digest=digest,
        min_members=chosen.min_members,
        min_survivors=chosen.min_survivors,
        corrupted=chosen.corrupted,
        dropout=chosen.dropout,
    )


def block_bounds(followed: EncodingState, num_values: int) -> NDArray[np.float32]:
    """Return the bounds of a 16-bit ring's blocks, followed or first."""
    if followed.bounds is not None:
        return followed.bounds
    return first_bounds(Rotation(seed=bytes(32), num_coordinates=num_values))


def run_session(
    opening: SessionSetup,
    fleet: Fleet,
    *,
    bounds: NDArray[np.float32] | None,
    phase_seconds: float,
    refuse: Refuse,
    evidence: Evidence,
) -> UnmaskedSum:
    """Walk through a session's phases; who fails in one of them is told to ``refuse``.

    ``evidence`` is what shows, if the session is aborted, who is at fault.

    Raises:
        TooFewSurvivors, DealerCheated, NoSuchGraph: the session is aborted.
    """
    state: Any = open_session(opening)
    while not isinstance(state, UnmaskedSum):
        requests = state.requests()
        if not requests:
            state = state.close()  # which says that they are too few
            continue
        phase = PHASE_OF[type(next(iter(requests.values())))]
        is_masking = isinstance(state, MaskPhase)
        evidence.has_masked |= is_masking
        if isinstance(state, DealPhase):
            evidence.members = frozenset(requests)
        replies = fleet.converse(
            phase,
            requests,
            beside=bounds.tobytes() if is_masking and bounds is not None else None,
            reply_bytes=state.total.vector_P.nbytes if is_masking else 0,
            timeout_seconds=phase_seconds,
        )
        for reply in replies:
            if isinstance(reply, Dropout):
                refuse(reply.name, reply.error)
                evidence.refused(reply.name, reply.error)
                continue
            try:
                state = (
                    state.take(reply.name, reply.said, reply.beside)
                    if is_masking
                    else state.take(reply.name, reply.said)
                )
            except HeadwaterError as error:
                log.warning("%s: %s", error.code, error)
                refuse(reply.name, error)
                evidence.rejected(reply.name, error)
            if isinstance(state, UnmaskPhase) and state.can_open:
                break
        closer = getattr(replies, "close", None)
        if closer is not None:
            closer()  # whoever is still at it is not waited for
        if isinstance(state, CheckPhase):
            evidence.complained(state.complaints)
            for name, why in state.left.items():
                log.warning("%s: %s", why.code, why)
                refuse(name, why)
        state = (
            state.close(num_threads=torch.get_num_threads())
            if isinstance(state, UnmaskPhase)
            else state.close()
        )
    return state


def decode_sum(opened: UnmaskedSum, followed: EncodingState) -> tuple[RoundSum, EncodingState]:
    """Divide the opened sum by its weight; return it, and what the next round follows from.

    Raises:
        SumOutOfRange: the numbers cannot be those of devices that kept to their plans.
    """
    numbers, chosen = opened.numbers, opened.session.parameters
    check_sums(
        numbers,
        chosen.scalars,
        num_devices=len(opened.survived),
        planned_weight=sum(opened.session.members[name].planned_weight for name in opened.survived),
    )
    weight, num_clipped = round(numbers[WEIGHT]), round(numbers[NUM_CLIPPED])
    mean_P = decode_mean(opened.vector_P, encoding=chosen.encoding, weight=weight)
    if chosen.rotation_seed is None:
        largest = float(np.abs(mean_P).max(initial=0.0))
        clip = follow_clip(followed.clip, largest_mean=largest, num_clipped=num_clipped)
        after = EncodingState(clip=clip, bounds=followed.bounds)
    else:
        rotation = Rotation(seed=chosen.rotation_seed, num_coordinates=chosen.num_values)
        bounds = block_bounds(followed, chosen.num_values)
        rms = unrotate_in_place(
            mean_P, rotation=rotation, bounds=bounds, max_weight=chosen.encoding.max_weight
        )
        spread = device_spread(
            num_devices=len(opened.survived),
            squared_norms=numbers[masked_numbers.SQUARED_NORM],
            weight=weight,
            mean_norm=float(np.linalg.norm(mean_P)),
        )
        share = num_clipped / (len(opened.survived) * chosen.num_values)
        after = EncodingState(
            clip=followed.clip,
            bounds=follow_bounds(bounds, block_rms=rms, spread=spread, clipped=share),
        )
    return (
        RoundSum(
            names=opened.survived,
            mean_P=torch.from_numpy(mean_P),
            weight=weight,
            loss_sum=numbers[masked_numbers.LOSS],
            metric_sums=metrics_in(numbers),
            num_examples=numbers[masked_numbers.NUM_EXAMPLES],
            summed_weight=numbers[masked_numbers.SUMMED_WEIGHT],
            noise=noise_in(numbers),
            num_clipped=num_clipped,
        ),
        after,
    )
