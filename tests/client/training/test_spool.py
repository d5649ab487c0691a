"""A partial sum survives a power cut; the resumed window gives the same bits."""

from __future__ import annotations

import logging
import math
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from headwater.client.device.hardware import ThisMachine
from headwater.client.flower.request import SIMULATED, SPOOL, spool_of
from headwater.client.training.context import Identity, TrainingContext
from headwater.client.training.local_update import train_round
from headwater.client.training.sampler import (
    ExampleOrder,
    SamplerPosition,
    SamplerState,
    Window,
    window,
)
from headwater.client.training.spool import Spool
from headwater.client.training.trainer import Trainer
from headwater.common.errors import EmptyUpdate
from headwater.common.messages import Plan, Update
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import ClientSettings, Settings
from tests.processes import ROOT
from tests.tasks import NAN_LOSS, RAISES_BACKWARD, TwoLayers, examples
from tests.training_contexts import FakeClock, FakeMemory, plan, training_context

RUN = 7


class PowerCut(BaseException):
    """Nothing catches it."""


class CutOff(TwoLayers):
    """Has a dropout layer and a metric; power fails at one of its micro-batches."""

    def __init__(self, *, cut_at: int | None = None) -> None:
        super().__init__()
        self.cut_at = cut_at

    def new_model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, batch: Sequence[Tensor]) -> Any:
        if self.cut_at is not None and len(self.seen) >= self.cut_at:
            raise PowerCut
        loss, weight = super().loss_sum(model, batch)
        return loss * 0.1, weight, {"tenths": 0.1 * weight}


def spool(folder: Path, **how: Any) -> Spool:
    return Spool(
        folder, name="pi", run_id=RUN, **{"every_seconds": 0.0, "max_share": math.inf, **how}
    )


def device(*, cut_at: int | None = None, kinds: Sequence[int] = (), **more: Any) -> TrainingContext:
    return training_context(CutOff(cut_at=cut_at), examples(24, kinds=kinds), **more)


def window_of(context: TrainingContext, quota: int) -> Window:
    order = ExampleOrder(0, "pi", quota)
    return Window(positions=tuple(range(quota)), place=SamplerPosition(), order=order)


def done(context: TrainingContext, chosen: Plan, kept: Spool | None = None) -> Update:
    return train_round(chosen, window_of(context, chosen.quota), context, kept)


def cut_off(folder: Path, chosen: Plan, *, at: int, **how: Any) -> None:
    """Simulate a power cut at micro-batch ``at``, from 0."""
    with pytest.raises(PowerCut):
        done(device(cut_at=at), chosen, spool(folder, **how))


def seen_by(context: TrainingContext) -> list[int]:
    assert isinstance(context.task, CutOff)
    return context.task.seen


def assert_same(found: Update, expected: Update) -> None:
    assert torch.equal(found.values_P, expected.values_P)
    timeless = {"steps", "seconds", "vitals"}
    assert found.report.model_dump(exclude=timeless) == expected.report.model_dump(exclude=timeless)
    for one, other in zip(found.report.steps, expected.report.steps, strict=True):
        assert replace(one, peak_bytes=0) == replace(other, peak_bytes=0)


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


def test_the_file_is_a_safetensors_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    cut_off(tmp_path / "new", plan(22, 4), at=2)
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == f"pi-{RUN}.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    expected = done(device(), plan(8, 4)).values_P
    assert torch.equal(load_file(file)["values_P"], expected)


OTHERS: dict[str, Callable[[Plan], tuple[Plan, dict[str, Any]]]] = {
    "round 1, not 2": lambda chosen: (chosen.model_copy(update={"round": 2}), {}),
    "version 0, not 5": lambda chosen: (chosen.model_copy(update={"model_version": 5}), {}),
    "plan": lambda chosen: (chosen.model_copy(update={"precision": "bfloat16"}), {}),
    "epoch 0, not 1": lambda chosen: (chosen, {"place": SamplerPosition(epoch=1)}),
    "offset 0, not 9": lambda chosen: (chosen, {"place": SamplerPosition(offset=9)}),
    "skipped [], not [3]": lambda chosen: (chosen, {"place": SamplerPosition(skipped=(3,))}),
    "other examples": lambda chosen: (chosen, {"positions": tuple(range(1, 23))}),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_a_file_of_another_window_is_deleted_and_the_log_says_why(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=2)
    other, changes = OTHERS[reason](chosen)
    context = device()
    part = replace(window_of(context, 22), **changes)
    with caplog.at_level(logging.WARNING):
        found = train_round(other, part, context, spool(tmp_path)).values_P
    assert any("is deleted" in text and reason in text for text in caplog.messages)
    assert torch.equal(found, train_round(other, part, device()).values_P)
    assert sum(seen_by(context)) == 22


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


def test_the_spool_of_another_model_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=2)
    context = device()
    context.image.load(bytes(build_model(CutOff(), seed=4).buffer()))
    done(context, chosen, spool(tmp_path))
    assert "it belongs to another model" in caplog.text
    assert sum(seen_by(context)) == 22


def test_the_spool_of_another_layout_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut_off(tmp_path, plan(22, 4), at=2)
    context = training_context(TwoLayers(), examples(24))
    update = done(context, plan(22, 4), spool(tmp_path))
    assert "it belongs to layout" in caplog.text
    assert update.report.num_examples == 22


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_the_sum_is_exact_whichever_byte_is_damaged(at: float, change: int, cuts: bool) -> None:
    chosen = plan(22, 4)
    with tempfile.TemporaryDirectory() as name:
        kept = spool(Path(name))
        cut_off(Path(name), chosen, at=3)
        data = bytearray(kept.path.read_bytes())
        position = int(at * len(data))
        data[position] ^= change
        kept.path.write_bytes(data[:position] if cuts else data)
        found = done(device(), chosen, kept)
    assert torch.equal(found.values_P, done(device(), chosen).values_P)


@pytest.mark.parametrize("left", [b"", b"\x00" * 8, b"\xff" * 64, b'\x02\0\0\0\0\0\0\0{}{"a":[]}'])
def test_a_file_in_another_format_is_deleted(
    left: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = spool(tmp_path, every_seconds=1e9)
    kept.path.write_bytes(left)
    assert done(device(), plan(22, 4), kept).report.num_examples == 22
    assert "is deleted: it is damaged" in caplog.text
    assert not kept.path.exists()


def test_a_disk_that_cannot_be_written_costs_one_warning_and_no_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    found = done(device(), plan(22, 4), spool(tmp_path / "file"))
    assert_same(found, done(device(), plan(22, 4)))
    (warning,) = caplog.messages
    assert warning.startswith("pi, round 1: the spool cannot be written, so a power cut would")


def test_only_files_of_the_client_s_old_runs_are_removed(tmp_path: Path) -> None:
    names = [
        "pi-6.safetensors",
        "pi-6.safetensors.part",
        "pi-2-6.safetensors",
        "pi-6.safetensors.bak",
    ]
    for name in [*names, "pi-5.safetensors"]:
        (tmp_path / name).write_bytes(b"")
    days_ago = (tmp_path / "pi-5.safetensors").stat().st_mtime - 8 * 86_400
    for name in names:
        os.utime(tmp_path / name, (days_ago, days_ago))
    cut_off(tmp_path, plan(22, 4), at=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("pi-2-6.safetensors", "pi-6.safetensors.bak", "pi-5.safetensors"),
        f"pi-{RUN}.safetensors",
    }


def test_a_temporary_file_left_by_a_kill_is_removed_with_the_spool(tmp_path: Path) -> None:
    kept = spool(tmp_path)
    kept.path.with_name(kept.path.name + ".part").write_bytes(b"half of a sum")
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_spool_is_written_at_most_every_few_seconds(tmp_path: Path) -> None:
    # A micro-batch takes a second: written after the sixth, and after the twelfth.
    chosen = plan(22, 1)
    cut_off(tmp_path, chosen, at=5, every_seconds=6.0)
    assert not any(tmp_path.iterdir())
    cut_off(tmp_path, chosen, at=16, every_seconds=6.0)
    again = device()
    done(again, chosen, spool(tmp_path))
    assert len(seen_by(again)) == 22 - 12


class SlowDisk(FakeClock):
    """Advances a second at each reading outside of micro-batches."""

    def seconds(self) -> float:
        self.now += 1.0
        return self.now


def test_writing_to_a_slow_disk_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    # A write takes the second between two readings: twenty seconds pass before the next.
    chosen = plan(22, 1)
    context = replace(device(cut_at=10), clock=SlowDisk())
    with pytest.raises(PowerCut):
        done(context, chosen, spool(tmp_path, max_share=1 / 20))
    again = device()
    done(again, chosen, spool(tmp_path))
    # Two clock readings and a second of work a micro-batch: after the first and the eighth.
    assert len(seen_by(again)) == 22 - 8


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


def test_local_steps_are_not_spooled_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(12, 4, local_steps=3, local_learning_rate=2.0**-6)
    for _ in range(2):
        done(device(), chosen, spool(tmp_path))
    assert not any(tmp_path.iterdir())
    assert sum("not spooled" in text for text in caplog.messages) <= 1


def test_a_window_that_fails_leaves_no_spool(tmp_path: Path) -> None:
    home = Trainer("tests/tasks.py:TwoLayers", replace_batch_norm=False, check_task=False)
    kept = spool(tmp_path)
    kept.path.write_bytes(b"of a window in which nothing could be summed")
    home.task = training_context(CutOff(), examples(1)).task
    home.task.loss_sum = lambda model, batch: (torch.tensor(torch.nan), 1)  # type: ignore[method-assign]
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    with pytest.raises(EmptyUpdate):
        home.train(identity, ThisMachine(), plan(4, 4), SamplerState(), spool=kept)
    assert not kept.path.exists()


def test_only_a_node_with_a_spool_folder_has_a_spool(tmp_path: Path) -> None:
    run_config = Settings(client=ClientSettings(spool=tmp_path)).to_run_config()

    def context(**node_config: Any) -> Context:
        return Context(
            run_id=RUN,
            node_id=1,
            node_config=node_config,
            state=RecordDict(),
            run_config=run_config,
        )

    assert spool_of(context(**{SIMULATED: True}), "pi") is None
    found = spool_of(context(**{SPOOL: str(tmp_path)}), "pi")
    assert found is not None
    assert found.path == tmp_path / f"pi-{RUN}.safetensors"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from headwater.client.device.hardware import ThisMachine
from headwater.client.training.sampler import SamplerState
from headwater.client.training.context import Identity
from headwater.client.training.trainer import Trainer
from headwater.client.training.spool import Spool
from headwater.common.messages import Plan

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
home = Trainer("tests/laws/architectures.py:Ragged", replace_batch_norm=False, check_task=False)
plain, num_seen = home.task.loss_sum, [0]

def loss_sum(model, batch):
    if num_seen[0] == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    num_seen[0] += 1
    return plain(model, batch)

object.__setattr__(home.task, "loss_sum", loss_sum)
plan = Plan(round=1, run_seed=3, model_version=0, quota=38, micro_batch_size=4)
kept = Spool(folder, name="pi", run_id=1, every_seconds=0.0, max_share=1e9)
identity = Identity(name="pi", data=None, part=0, num_parts=1)
update, _ = home.train(identity, ThisMachine(), plan, SamplerState(), spool=kept)
print(num_seen[0], update.report.weight, update.values_P.numpy().tobytes().hex())
"""


@pytest.mark.slow
def test_a_killed_client_resumes_its_window_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, kill_at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / folder), str(kill_at)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    uninterrupted = run("uninterrupted", -1).stdout.split()
    assert uninterrupted[0] == "10"
    assert run("broken", 6).returncode == -signal.SIGKILL
    assert (tmp_path / "broken" / "pi-1.safetensors").exists()
    assert run("broken", -1).stdout.split() == ["4", *uninterrupted[1:]]
