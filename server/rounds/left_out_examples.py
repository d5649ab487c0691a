"""Logs the examples that clients leave out, without a line in every round."""

from __future__ import annotations

import logging

from headwater.common.errors import EmptyUpdate
from headwater.common.wording import counted
from headwater.server.rounds.open_round import OpenRound
from headwater.server.rounds.round_row import RoundRow

log = logging.getLogger(__name__)

MAX_LEFT_OUT_NAMED = 5  # clients in one log line


class LeftOutLog:
    """What the log of a run has said of examples that cannot be trained on."""

    def __init__(self) -> None:
        self._most = 0
        """The most examples that the clients left out in one round."""
        self._empty: set[str] = set()
        """The clients that could train on no example of a plan."""

    def note(self, row: RoundRow) -> None:
        """Log how many examples the clients left out, if more than before; the clients say why."""
        if row.num_examples_left_out <= self._most:
            return
        self._most = row.num_examples_left_out
        if row.masked_clients:
            where = "; no client tells its own"
        else:
            counts = {
                client.name: client.num_refused for client in row.clients if client.num_refused
            }
            most = sorted(counts, key=counts.__getitem__, reverse=True)[:MAX_LEFT_OUT_NAMED]
            named = ", ".join(f"{name}: {counts[name]}" for name in most)
            where = f" on {len(counts)} of {counted(row.num_clients, 'client')} ({named})"
            if len(counts) > len(most):
                where = f"{where[:-1]}, ...)"
        log.warning(
            "round %d: %d of %s cannot be used and were left out%s; the log says so again "
            "when it is more",
            row.round,
            row.num_examples_left_out,
            counted(row.num_examples + row.num_examples_left_out, "example"),
            where,
        )

    def note_empty(self, opened: OpenRound) -> None:
        """Log, once for each client, that it could train on no example of its plan."""
        for name, error in opened.refused.items():
            if not isinstance(error, EmptyUpdate) or name in self._empty:
                continue
            self._empty.add(name)
            plan = opened.plans[name]
            log.warning(
                "round %d: %s could train on none of %s (%s), and adds nothing: look at its data, "
                "or raise --effective-batch-size if it has others. The log says so once",
                plan.round,
                name,
                counted(plan.quota, "example"),
                plan.reason,
            )
