"""A device without masks sends statistics that no examples have: it alone is not measured."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator

import pytest
import torch

from headwater.common.messages import Update
from headwater.common.settings.schema import Settings
from headwater.common.statistics.terms import COUNTS, MOMENTS
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from tests.server.rounds.test_round_loop import Answer, Network

HOUSES = "./tests/statistics/measured.py:Houses"


@pytest.mark.parametrize("lie", [COUNTS, MOMENTS])
def test_a_device_that_sends_other_statistics_than_examples_have_is_left_out_by_name(
    lie: str,
) -> None:
    def hostile(answer: Answer) -> Iterator[Answer]:
        if isinstance(answer, Update) and answer.name == "1":
            other = {lie: answer.sums[lie].flip(0) + 3}
            answer = dataclasses.replace(answer, sums={**answer.sums, **other})
        yield answer

    torch.set_num_threads(1)
    settings = Settings.model_validate(
        {
            "task": HOUSES,
            "rounds": 2,
            "simulation": {"clients": 4},
            "statistics": {"is_on": True},
            "plan": {"accumulation_steps": 1, "micro_batch_size": 8},
        }
    )
    rows: list[RoundRow] = []
    training = Training(settings, run_id=secrets.randbits(62))
    run(training, Network(settings, hostile), on_round=rows.append)
    assert rows[0].refused.keys() == {"1"}
    assert "1: the statistics of" in rows[0].refused["1"]
    assert rows[0].num_clients == 3
