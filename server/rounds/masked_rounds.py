"""The masked rounds of a run: which secure sessions sum a cohort, and what a run remembers of them.

A cohort is one session, or several disjoint ones while a client is sought that masks false numbers
(``headwater.server.secagg.group_testing``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headwater.common.compression.model_difference import SentModel
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.fleet import Fleet
from headwater.server.rounds.open_round import OpenRound
from headwater.server.secagg import group_testing
from headwater.server.secagg.encoding_state import EncodingState, decode_sum
from headwater.server.secagg.group_sums import sum_groups
from headwater.server.secagg.parameters import SessionSetup
from headwater.server.secagg.retries import sum_masked
from headwater.server.secagg.ring_histogram import ring_histogram
from headwater.server.secagg.session import ReadyCohort, setup_of
from headwater.server.secagg.session_counter import SessionNumbers
from headwater.server.secagg.unmask_phase import UnmaskedSum

log = logging.getLogger(__name__)

MASKED_FALSELY = "SumOutOfRange: the sums in and out of range show that it masked a false number"

RANDOM_ROOM = 2.0
"""What random-k leaves out grows in the first rounds: from the first to the second it doubles."""

Exclude = Callable[[Mapping[str, str]], None]
"""Takes the clients that made a session fail, with the reasons."""


@dataclass(slots=True)
class MaskedRounds:
    """What a run's masked rounds hand on to the next one."""

    settings: Settings
    image: SentModel
    has_narrowed: bool = False
    """Whether the sums of the last round told more about which client masks false numbers."""
    publish: Callable[[], None] = lambda: None
    """Called when a session's number is stored, before it is used."""
    seen: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """What the server saw of the last session: the histograms of one member's masked vector, and of
    the opened sum."""
    _encoding: EncodingState = field(default_factory=EncodingState)
    _suspicion: group_testing.Suspicion = field(default_factory=group_testing.Suspicion)
    _sessions: SessionNumbers | None = None

    def sum(
        self,
        opened: OpenRound,
        fleet: Fleet,
        *,
        run_id: int,
        round_number: int,
        max_weight_per_example: int,
        exclude: Exclude,
        note_unmasked: Callable[[UnmaskedSum], None],
    ) -> RoundSum:
        """Sum the ready clients' masked updates; the encoding changes with a decoded sum alone.

        Raises:
            RoundAborted: a secure session was aborted.
        """
        chosen = self.settings.secure
        cohort = ReadyCohort.of(
            opened.ready,
            opened.plans,
            max_weight_per_example=max_weight_per_example,
            metrics=opened.metrics,
        )
        if self._sessions is None:
            self._sessions = SessionNumbers(self.settings.out, run_id=run_id, publish=self.publish)
        sessions = self._sessions
        rotation_seed = os.urandom(32)
        groups = group_testing.groups(
            cohort.ready,
            self._suspicion,
            least=chosen.min_members,
            seed=f"{run_id} {round_number}".encode(),
        )

        def set_up(group: ReadyCohort) -> SessionSetup:
            return setup_of(
                group,
                chosen,
                self._encoding,
                run_id=run_id,
                number=sessions.next(round_number),
                image=self.image,
                rotation_seed=rotation_seed,
                whole=cohort if len(groups) > 1 else None,
            )

        num_values = self.image.layout.num_parameters
        bounds = None
        if chosen.ring_bits != 32:
            bounds = self._encoding.block_bounds(cohort.num_masked(num_values))

        def run_session(group: ReadyCohort) -> UnmaskedSum:
            unmasked = sum_masked(
                group,
                fleet,
                set_up=set_up,
                bounds=bounds,
                phase_seconds=chosen.phase_seconds,
                refuse=opened.refuse,
                leave_out=exclude,
            )
            note_unmasked(unmasked)
            self.seen = unmasked.first_seen, ring_histogram(unmasked.vector_P)
            return unmasked

        sums = sum_groups(cohort, groups, run_session=run_session, refuse=opened.refuse)
        before = self._suspicion
        self._suspicion, culprits = sums.after(before)
        self.has_narrowed = bool(culprits) or self._suspicion.is_narrower(before)
        exclude(dict.fromkeys(culprits, MASKED_FALSELY))
        if suspects := self._suspicion.suspects:
            log.warning("a false number is from one of %d clients", len(suspects))
        room = 1.0 if cohort.coding is None else RANDOM_ROOM
        done, self._encoding = decode_sum(sums.total(), self._encoding, room=room)
        if cohort.coding is not None:
            mean_P = torch.zeros(num_values)
            cohort.coding.positions(num_values).scatter_add(done.mean_P, mean_P)
            done = replace(done, mean_P=mean_P)
        return done

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        suspicion = group_testing.to_json(self._suspicion)
        return {**self._encoding.to_json(), "suspicion": suspicion}

    def restore(self, row: Mapping[str, Any]) -> None:
        """Take the state that ``to_json`` gave; the initial state from an empty row."""
        self._encoding = EncodingState.of_json(row)
        self._suspicion = group_testing.from_json(row.get("suspicion", {}))
