"""Real text on six devices of different memory learns as fast as the same text in one place."""

from __future__ import annotations

import pytest

import headwater
from benchmarks.federated_text import MEMORY_MB, central, federated, held_out_loss

NUM_ROUNDS = 3


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "masked"])
def run(request: pytest.FixtureRequest) -> headwater.Run:
    return federated(NUM_ROUNDS, is_masked=request.param)


@pytest.mark.slow
def test_six_devices_reach_the_loss_of_a_central_run_at_as_many_tokens(run: headwater.Run) -> None:
    assert [row.num_clients for row in run.history] == [len(MEMORY_MB)] * NUM_ROUNDS
    peer = central([row.weight for row in run.history], order=1)
    assert held_out_loss(run.model) == pytest.approx(peer, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("run", [False], indirect=True, ids=["plain"])
def test_the_six_devices_differ_in_k(run: headwater.Run) -> None:
    assert len({row.accumulation_steps for row in run.history[-1].clients}) > len(MEMORY_MB) / 2
