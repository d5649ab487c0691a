"""Rounds whose devices send factors of matrices; their columns follow the last round's sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.common.compression.low_rank import (
    first_columns,
    least_rank,
    next_columns,
    shapes_of,
)
from headwater.common.compression.planned_bytes import (
    download_bytes,
    low_rank_matrices,
    masked_bytes,
)
from headwater.common.compression.shared_columns import BITS, columns_bytes
from headwater.common.compression.terms import CompressionTerms, Matrix, Side
from headwater.common.errors import SettingsError
from headwater.common.settings.rounds import MIN_MASKED_FRACTION
from headwater.common.sums.tensor_field import MAX_BYTES
from headwater.server.aggregation.round_reports import RoundSum
from headwater.server.planning.features import DraftPlans
from headwater.server.rounds.features import RunFeature, RunState


class LowRankRounds(RunFeature):
    """Asks for factors, and keeps the columns of the next round."""

    def __init__(self, run: RunState) -> None:
        """Draw the columns of the first round.

        Raises:
            SettingsError: no matrix is large enough, the columns are too many for a plan, or the
                rank is less than devices mask.
        """
        self._run, self._rank = run, run.settings.compression.rank
        self._matrices = low_rank_matrices(run.settings, run.image.layout)
        if not self._matrices:
            is_masked = run.settings.secure.aggregation != "off"
            other = "--compress random-k" if is_masked else "--compress int4"
            raise SettingsError(
                f"--compress low-rank of rank {self._rank} shortens no parameter of this model"
                + is_masked * f" to between {MIN_MASKED_FRACTION:.0%} and half of it",
                remedy=(self._rank > 1) * "lower --compress-rank, or " + f"take {other}",
            )
        self._begin()
        self._check_length(max(self._matrices, key=lambda one: one.rows + one.columns))
        if run.settings.secure.aggregation != "off":
            self._check_share()

    def _begin(self) -> None:
        self._side: Side = "right"
        self._columns = first_columns(self._matrices, self._rank, self._random(0))

    def _random(self, round_number: int) -> np.random.Generator:
        seed = np.random.SeedSequence([self._run.settings.seed, round_number])
        return np.random.Generator(np.random.Philox(seed))

    def _check_length(self, largest: Matrix) -> None:
        shapes = [(max(one.rows, one.columns), one.rank(self._rank)) for one in self._matrices]
        longest = columns_bytes(shapes)
        if longest > MAX_BYTES:
            raise SettingsError(
                f"--compress-rank {self._rank}: the columns of all matrices are up to "
                f"{longest:,} bytes, and a plan has room for {MAX_BYTES:,} "
                f"(the largest matrix is {largest.rows:,} x {largest.columns:,})",
                remedy=f"use --compress-rank {max(self._rank * MAX_BYTES // longest, 1)}",
            )

    def _check_share(self) -> None:
        share = min(terms.sent_share for terms in (self._terms("left"), self._terms("right")))
        if share < MIN_MASKED_FRACTION:
            longest = max(max(one.rows, one.columns) for one in self._matrices)
            raise SettingsError(
                f"--compress-rank {self._rank} sends {share:.2%} of a matrix, and devices mask at "
                f"least {MIN_MASKED_FRACTION:.0%}",
                remedy=f"use --compress-rank {least_rank(longest, MIN_MASKED_FRACTION)}",
            )

    def write(self, drafts: DraftPlans) -> None:
        drafts.ask(self._terms(self._side))

    def _terms(self, side: Side) -> CompressionTerms:
        return CompressionTerms(
            method="low-rank",
            feedback=self._run.settings.compression.feedback,
            values=self._run.settings.compression.values,
            rank=self._rank,
            matrices=self._matrices,
            side=side,
            columns=self._columns,
        )

    def transfer_bytes(self, down: int, up: int, *, num_values: int) -> tuple[int, int]:
        settings, terms = self._run.settings, self._terms(self._side)
        is_masked = settings.secure.aggregation != "off"
        sent = (
            masked_bytes(settings, terms, num_values) if is_masked else terms.num_bytes(num_values)
        )
        return download_bytes(settings, self._run.image.layout) + len(self._columns), sent

    def committed(self, done: RoundSum) -> None:
        """Let the next round's columns span what this round's sum had, if it had the model's."""
        if not len(done.mean_P):
            return
        random = self._random(self._run.round)
        self._side, self._columns = next_columns(done.mean_P, self._terms(self._side), random)

    def to_json(self) -> dict[str, Any]:
        return {"side": self._side, "rank": self._rank, "bits": BITS}

    def tensors(self) -> Mapping[str, Tensor]:
        return {"columns": torch.frombuffer(bytearray(self._columns), dtype=torch.uint8)}

    def restore(self, row: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take the columns of the next round; of another rank, or in other bits, it begins anew.

        Raises:
            ValueError: the columns are not those of that side's round.
        """
        if (row.get("rank"), row.get("bits")) != (self._rank, BITS):
            self._begin()
            return
        self._side, self._columns = row["side"], tensors["columns"].numpy().tobytes()
        if len(self._columns) != columns_bytes(shapes_of(self._terms(self._side))):
            raise ValueError("the columns of low-rank updates are not those of this model and side")
