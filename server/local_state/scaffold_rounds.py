"""Rounds of SCAFFOLD: the mean of the devices' control variates, and its part in plans.

Karimireddy et al. 2020, algorithm 1. The paper's mean is over all N clients, each with the same
weight. Here a device's control variate has the weight of its last update, as its update has in the
sum, so that c is the gradient of the loss that the rounds minimise; and the mean is over the
devices that have ever taken part:

    c = sum of weight x c_i / sum of weight

Both sums are kept, and each round adds what its devices changed. With equal weights, and all
devices in the first round, that is the paper's c.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.common.local_state.terms import VARIATES, WEIGHTS, ScaffoldTerms, moved_bytes
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.planning.features import DraftPlans
from headwater.server.rounds.features import RunFeature, RunState


class ScaffoldRounds(RunFeature):
    """Sends c with each plan, and keeps the two sums, also in the checkpoint."""

    def __init__(self, run: RunState) -> None:
        self._run, self._length = run, run.image.layout.num_parameters
        self._begin()

    def _begin(self) -> None:
        self._sum_P = torch.zeros(self._length, dtype=torch.float64)
        self._weight = 0.0
        self._first_round: int | None = None

    def write(self, drafts: DraftPlans) -> None:
        if self._first_round is None:
            self._first_round = self._run.round
        mean_P = self._sum_P / self._weight if self._weight > 0 else self._sum_P
        drafts.ask(ScaffoldTerms(variate=mean_P.float(), first_round=self._first_round))

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        more_down, more_up = moved_bytes(self._length)
        return down + more_down, up + more_up

    def committed(self, done: RoundSum) -> None:
        if VARIATES in done.sums:
            self._sum_P = self._sum_P + done.sums[VARIATES]
            self._weight += float(done.sums[WEIGHTS])

    def to_json(self) -> dict[str, Any]:
        return {"weight": self._weight, "first_round": self._first_round}

    def tensors(self) -> Mapping[str, Tensor]:
        return {"variates": self._sum_P}

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._begin()
        if row:
            self._sum_P = tensors["variates"].double()
            self._weight, self._first_round = row["weight"], row["first_round"]
