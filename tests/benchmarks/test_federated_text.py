"""Real text on six devices of different memory learns as fast as the same text in one place."""

from __future__ import annotations

import pytest

from benchmarks.federated_text import MEMORY_MB, central, federated, held_out_loss

NUM_ROUNDS = 3


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True], ids=["plain", "masked"])
def test_six_devices_reach_the_loss_of_a_central_run_at_as_many_tokens(is_masked: bool) -> None:
    run = federated(NUM_ROUNDS, is_masked=is_masked)
    assert [row.num_clients for row in run.history] == [len(MEMORY_MB)] * NUM_ROUNDS
    peer = central([row.weight for row in run.history], order=1)
    assert held_out_loss(run.model) == pytest.approx(peer, rel=0.005)


@pytest.mark.slow
def test_the_six_devices_differ_in_k() -> None:
    run = federated(1, is_masked=False)
    assert len({row.accumulation_steps for row in run.history[-1].clients}) > len(MEMORY_MB) / 2
