"""A partial sum survives a power cut; the resumed window gives the same bits."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headwater.client.device.hardware import ThisMachine
from headwater.client.features import train_round
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity, TrainingContext
from headwater.client.training.sampler import SamplerPosition, SamplerState, window
from headwater.client.training.spool import Spool
from headwater.common.errors import EmptyUpdate
from headwater.common.messages import Plan
from tests.client.training.power_cuts import (
    CutOff,
    PowerCut,
    assert_same,
    cut_off,
    device,
    done,
    seen_by,
    spool,
)
from tests.processes import ended
from tests.tasks import NAN_LOSS, RAISES_BACKWARD, examples
from tests.training_contexts import FakeMemory, plan, training_context


@pytest.mark.slow
@given(
    st.integers(2, 24),
    st.integers(1, 8),
    st.integers(1, 30),
    st.lists(st.sampled_from([0, 0, 0, NAN_LOSS, RAISES_BACKWARD]), max_size=6),
    st.none() | st.integers(1, 100),
)
def test_a_resumed_window_equals_an_uninterrupted_one_to_the_bit(
    quota: int, size: int, cut_at: int, kinds: list[int], weigh_as: int | None
) -> None:
    chosen = plan(quota, size, weigh_as=weigh_as)
    with tempfile.TemporaryDirectory() as name:
        kept = spool(Path(name))
        try:
            expected = done(device(kinds=kinds), chosen)
        except EmptyUpdate:
            return
        broken = device(cut_at=cut_at, kinds=kinds)
        try:
            done(broken, chosen, kept)
        except PowerCut:
            assert_same(done(device(kinds=kinds), chosen, kept), expected)
        else:
            assert len(seen_by(broken)) <= cut_at


def test_micro_batches_in_the_spool_are_not_summed_again(tmp_path: Path) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=3)
    again = device()
    update = done(again, chosen, spool(tmp_path))
    assert seen_by(again) == [4, 4, 2]
    assert update.report.num_examples == 22


def test_a_window_can_be_resumed_twice(tmp_path: Path) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=2)
    with pytest.raises(PowerCut):
        done(device(cut_at=2), chosen, spool(tmp_path))
    again = device()
    assert_same(done(again, chosen, spool(tmp_path)), done(device(), chosen))
    assert seen_by(again) == [4, 2]


def test_reduced_micro_batches_stay_small_after_a_restart(tmp_path: Path) -> None:
    chosen = plan(22, 4)
    lowered = FakeMemory(lambda n: 1040 if n < 2 else 1020)
    with pytest.raises(PowerCut):
        done(device(cut_at=4, memory=lowered), chosen, spool(tmp_path))
    again = device()
    report = done(again, chosen, spool(tmp_path)).report
    assert seen_by(again) == [2] * 5
    assert (report.micro_batch_size, report.num_examples) == (2, 22)


@pytest.mark.parametrize("quota", [22, 40])
def test_a_window_across_epochs_continues_from_the_spool_to_the_same_bits(
    quota: int, tmp_path: Path
) -> None:
    """Also one that has examples twice."""
    chosen, place = plan(quota, 4), SamplerPosition(offset=17, skipped=(3, 5))
    part = window(place, quota=quota, run_seed=0, name="pi", num_examples=24)
    with pytest.raises(PowerCut):
        train_round(chosen, part, device(cut_at=5), spool(tmp_path))
    context = device()
    resumed = train_round(chosen, part, context, spool(tmp_path))
    assert sum(seen_by(context)) == quota - 20
    assert torch.equal(resumed.values_P, train_round(chosen, part, device()).values_P)
    assert resumed.report.num_examples == quota


def test_a_window_with_a_bad_example_twice_in_a_micro_batch_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(40, 20)
    part = window(SamplerPosition(), quota=40, run_seed=0, name="pi", num_examples=10)
    kept = spool(tmp_path)

    def small(**how: Any) -> TrainingContext:
        return training_context(CutOff(**how), examples(10, kinds=[NAN_LOSS]))

    with pytest.raises(PowerCut):
        train_round(chosen, part, small(cut_at=20), kept)
    resumed = train_round(chosen, part, small(), kept)
    assert "continues after 18 of 40 examples" in caplog.text
    assert_same(resumed, train_round(chosen, part, small()))


class WallClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("hours_later", "num_examples"),
    [
        pytest.param(0.0, 20, id="at once"),
        pytest.param(1.0, 12, id="past the deadline"),
        pytest.param(-1.0, 20, id="by a clock that lost time, after 12 s of training"),
    ],
)
def test_time_before_a_restart_counts_towards_the_deadline(
    hours_later: float, num_examples: int, tmp_path: Path
) -> None:
    chosen = plan(24, 4, deadline_seconds=20.0)
    wall = WallClock(1e9)
    cut_off(tmp_path, chosen, at=3, wall_clock=wall)
    wall.now += 3600 * hours_later + 12.0
    report = done(device(), chosen, spool(tmp_path, wall_clock=wall)).report
    assert (report.reason, report.num_examples) == ("deadline", num_examples)
    assert report.seconds >= 12.0 + (num_examples - 12) + 3600 * max(hours_later, 0.0)


def test_a_stop_request_after_a_restart_sends_the_spooled_sum(tmp_path: Path) -> None:
    chosen = plan(24, 4)
    cut_off(tmp_path, chosen, at=3)
    context = device(should_stop=lambda: True)
    update = done(context, chosen, spool(tmp_path))
    assert (update.report.reason, update.report.num_examples) == ("asked to stop", 12)
    assert seen_by(context) == []
    assert torch.equal(update.values_P, done(device(), plan(12, 4)).values_P)


def test_a_window_that_fails_leaves_no_spool(tmp_path: Path) -> None:
    home = Trainer("tests/tasks.py:TwoLayers", batch_norm=None, check_task=False)
    kept = spool(tmp_path)
    kept.path.write_bytes(b"of a window in which nothing could be summed")
    home.task = training_context(CutOff(), examples(1)).task
    home.task.loss_sum = lambda model, batch: (torch.tensor(torch.nan), 1)  # type: ignore[method-assign]
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    with pytest.raises(EmptyUpdate):
        home.train(identity, ThisMachine(), plan(4, 4), SamplerState(), spool=kept)
    assert not kept.path.exists()


def train_or_die(folder: str, kill_at: int) -> None:
    """Train a window in a process of its own; it kills itself at a micro-batch, from 0."""
    torch.set_num_threads(1)
    home = Trainer("tests/laws/architectures.py:Ragged", batch_norm=None, check_task=False)
    plain, num_seen = home.task.loss_sum, [0]

    def loss_sum(model: nn.Module, batch: Any) -> Any:
        if num_seen[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        num_seen[0] += 1
        return plain(model, batch)

    object.__setattr__(home.task, "loss_sum", loss_sum)
    chosen = Plan(round=1, run_seed=3, model_version=0, quota=38, micro_batch_size=4)
    kept = Spool(Path(folder), name="pi", run_id=1, every_seconds=0.0, max_share=1e9)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    update, _ = home.train(identity, ThisMachine(), chosen, SamplerState(), spool=kept)
    found = [num_seen[0], update.report.weight, update.values_P.numpy().tobytes().hex()]
    Path(folder, "found").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_killed_client_resumes_its_window_to_the_same_bits(tmp_path: Path) -> None:
    whole, broken = tmp_path / "uninterrupted", tmp_path / "broken"
    assert ended(train_or_die, str(whole), -1) == 0
    num_steps, *sums = json.loads((whole / "found").read_text())
    assert num_steps > 6
    assert ended(train_or_die, str(broken), 6) == -signal.SIGKILL
    assert (broken / "pi-1.safetensors").exists()
    assert ended(train_or_die, str(broken), -1) == 0
    assert json.loads((broken / "found").read_text()) == [num_steps - 6, *sums]
