"""Error feedback: sums of what is sent, over rounds that count, are lost, or follow a restart."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headwater.client.compression.error_feedback import ErrorFeedback, ResidualSlots
from headwater.client.compression.residual_slots import SLOTS, STALE_SECONDS, ResidualFiles
from headwater.common.compression.low_rank import first_columns
from headwater.common.compression.terms import CompressionTerms, Matrix, Method
from headwater.common.errors import StateError
from headwater.common.messages import Plan, Update, UpdateReport
from headwater.common.overlap.terms import OverlapTerms
from tests.plans import plan_of

NUM_VALUES = 3000
EPS = 2.0**-23
LAYOUT = "0" * 64


def plan(
    number: int, *, counted: int | None, method: Method = "int8", after: int | None = None
) -> Plan:
    return plan_of(
        after=after,
        round=number,
        run_seed=1,
        model_version=number - 1,
        quota=1,
        micro_batch_size=1,
        counted_round=counted,
        compression=CompressionTerms(method=method, fraction=0.1, **columns(number, method)),
    )


def columns(number: int, method: Method) -> dict[str, Any]:
    """Return what low-rank says more, of one matrix; each round has columns of its own."""
    if method != "low-rank":
        return {}
    matrices, random = (Matrix(0, 50, 60),), np.random.default_rng(number)
    drawn = first_columns(matrices, 4, random)
    return {"matrices": matrices, "rank": 4, "side": "right", "columns": drawn}


def gradient(number: int) -> Tensor:
    return torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(number))


def update(number: int, values_P: Tensor | None = None) -> Update:
    report = UpdateReport(
        name="pi",
        round=number,
        num_examples=1,
        weight=1,
        loss_sum=0.0,
        micro_batch_size=1,
        seconds=1.0,
        steps=(),
        reason="quota",
    )
    return Update(values_P=gradient(number) if values_P is None else values_P, report=report)


def files(folder: Path, *, run_id: int = 7) -> ResidualFiles:
    return ResidualFiles(folder, name="pi", run_id=run_id)


def sent(folder: Path, chosen: Plan, *, layout: str = LAYOUT) -> Tensor:
    """Return what a device that was just started sends for a plan."""
    data = ErrorFeedback(files(folder), layout).encode(update(chosen.round), chosen)
    assert chosen.coding is not None
    return chosen.coding.read(data, "pi", NUM_VALUES).tensor()


def residual(folder: Path, number: int) -> Tensor:
    """Return the residual that was stored in a round, as its file has it."""
    for slot in SLOTS:
        data = files(folder).read(slot)
        if data is None:
            continue
        end = 8 + int.from_bytes(data[:8], "little")
        if json.loads(bytes(data[8:end]))["round"] == number:
            return torch.frombuffer(bytearray(data[end:]), dtype=torch.float32)
    raise AssertionError(f"no residual of round {number}")


@pytest.mark.parametrize(
    "method", ["bfloat16", "int8", "int4", "int2", "int1", "top-k", "random-k"]
)
def test_all_that_was_sent_and_the_residual_are_the_sum_of_all_updates(
    tmp_path: Path, method: Method
) -> None:
    total = torch.zeros(NUM_VALUES, dtype=torch.float64)
    for number in range(1, 6):
        chosen = plan(number, counted=number - 1 or None, method=method)
        total += sent(tmp_path, chosen).double()
    expected = sum(gradient(number).double() for number in range(1, 6))
    error = (total + residual(tmp_path, 5).double() - expected).abs().max()
    # Each round adds and subtracts numbers below 16 with a few roundings each.
    assert error < 5 * 4 * 16 * EPS


def test_a_lost_update_leaves_the_residual_of_the_last_counted_round(tmp_path: Path) -> None:
    sent(tmp_path, plan(1, counted=None))
    expected = sent(tmp_path, plan(2, counted=1))  # never arrives
    for _ in range(3):
        assert torch.equal(sent(tmp_path, plan(2, counted=1)), expected)


def test_a_residual_of_a_lost_first_round_is_not_sent(tmp_path: Path) -> None:
    sent(tmp_path, plan(1, counted=None))
    again, anew = (
        sent(tmp_path, plan(2, counted=None)),
        sent(tmp_path / "new", plan(2, counted=None)),
    )
    assert torch.equal(again, anew)


def test_several_lost_updates_in_a_row_lose_nothing_of_the_residual(tmp_path: Path) -> None:
    sent(tmp_path, plan(1, counted=None))
    sent(tmp_path, plan(2, counted=1))
    once = sent(tmp_path, plan(4, counted=2))
    sent(tmp_path, plan(3, counted=2))
    assert torch.equal(sent(tmp_path, plan(4, counted=2)), once)


def overlapping(number: int, *, counted: int | None, after: int | None) -> Plan:
    """Return a plan of a run with --overlap, whether it follows on another or not."""
    return plan(number, counted=counted).asking(OverlapTerms(after=after))


def test_residuals_of_two_pending_rounds_follow_one_another(tmp_path: Path) -> None:
    """Each plan is encoded before the one before is counted; the second pair is lost once."""
    total = sent(tmp_path, overlapping(1, counted=None, after=None)).double()
    total += sent(tmp_path, overlapping(2, counted=None, after=1)).double()
    sent(tmp_path, overlapping(3, counted=1, after=2))  # lost, with what follows on it
    sent(tmp_path, overlapping(4, counted=2, after=3))
    total += sent(tmp_path, overlapping(3, counted=2, after=None)).double()
    total += sent(tmp_path, overlapping(4, counted=2, after=3)).double()
    total += sent(tmp_path, overlapping(5, counted=3, after=4)).double()
    expected = sum(gradient(number).double() for number in range(1, 6))
    error = (total + residual(tmp_path, 5).double() - expected).abs().max()
    assert error < 7 * 4 * 16 * EPS


@pytest.mark.slow
@given(st.lists(st.sampled_from(["both count", "second lost", "both lost", "again"]), max_size=8))
def test_whatever_is_lost_of_overlapping_rounds_the_rest_and_the_residual_are_their_sum(
    story: list[str],
) -> None:
    """Two plans are out at a time. One that is lost comes again, and takes the next one with it."""
    with tempfile.TemporaryDirectory() as name:
        folder, total = Path(name), torch.zeros(NUM_VALUES, dtype=torch.float64)
        counted, number = None, 1
        for what in [*story, "both count"]:
            first = overlapping(number, counted=counted, after=None)
            second = overlapping(number + 1, counted=counted, after=number)
            vectors = [sent(folder, one).double() for one in (first, second)]
            if what == "again":  # the device was killed
                vectors = [sent(folder, one).double() for one in (first, second)]
            arrived = {"second lost": 1, "both lost": 0}.get(what, 2)
            total += sum(vectors[:arrived])
            number += arrived
            counted = number - 1 or None
        assert counted is not None
        expected = sum(gradient(one).double() for one in range(1, counted + 1))
        error = (total + residual(folder, counted).double() - expected).abs().max()
        assert error < 2 * number * 4 * 16 * EPS


def test_a_plan_in_the_overlap_that_comes_again_is_encoded_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    """A device that was killed after it had begun the next plan carries out both again."""
    sent(tmp_path, overlapping(1, counted=None, after=None))
    plans = [overlapping(2, counted=None, after=1), overlapping(3, counted=1, after=2)]
    once = [sent(tmp_path, one) for one in plans]
    again = [sent(tmp_path, one) for one in plans]
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def change_layout(folder: Path) -> Tensor:
    return sent(folder, plan(2, counted=1), layout="1" * 64)


def damage(folder: Path) -> Tensor:
    file = next(folder.glob("*.residual-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    return sent(folder, plan(2, counted=1))


def empty(folder: Path) -> Tensor:
    next(folder.glob("*.residual-*")).write_bytes(b"")
    return sent(folder, plan(2, counted=1))


def train_without(folder: Path) -> Tensor:
    """Rounds 2 and 3 had no compression, so the residual of round 1 did not stay the device's."""
    return sent(folder, plan(4, counted=3))


@pytest.mark.parametrize("happen", [change_layout, damage, empty, train_without])
def test_a_residual_that_does_not_fit_is_dropped_with_a_line_in_the_log(
    tmp_path: Path, happen: Callable[[Path], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    sent(tmp_path / "old", plan(1, counted=None))
    with caplog.at_level(logging.WARNING):
        after = happen(tmp_path / "old")
    number = 4 if happen is train_without else 2
    assert torch.equal(after, sent(tmp_path / "new", plan(number, counted=None)))
    assert "dropped" in caplog.text


def test_another_run_begins_without_a_residual_and_removes_old_files(tmp_path: Path) -> None:
    sent(tmp_path, plan(1, counted=None))
    late = ResidualFiles(tmp_path, name="pi", run_id=8, wall_clock=lambda: STALE_SECONDS + 2**40)
    assert late.read(0) is None
    late.write(0, b"", memoryview(b"1234"))
    assert [path.name for path in tmp_path.iterdir()] == ["pi-8.residual-0"]


class CountingPath(type(Path())):  # type: ignore[misc]
    """A folder that counts how often it is listed."""

    num_listed = 0

    def iterdir(self) -> Iterator[Path]:
        CountingPath.num_listed += 1
        yield from super().iterdir()


@pytest.mark.parametrize(("is_durable", "most"), [(True, 2), (False, 0)])
def test_a_folder_is_listed_when_a_run_begins_and_not_at_each_write(
    tmp_path: Path, is_durable: bool, most: int
) -> None:
    """Simulated devices share a run's folder, which holds two files of each."""
    CountingPath.num_listed = 0
    slots = ResidualFiles(CountingPath(tmp_path), name="pi", run_id=7, is_durable=is_durable)
    for number in range(10):
        slots.write(number % 2, b"", memoryview(b"1234"))
    assert most // 2 <= CountingPath.num_listed <= most


def test_a_device_that_was_away_for_weeks_loses_nothing_if_its_next_update_is_lost(
    tmp_path: Path,
) -> None:
    for folder in (tmp_path / "away", tmp_path / "here"):
        sent(folder, plan(1, counted=None))
    for path in (tmp_path / "away").iterdir():
        os.utime(path, (0, 0))
    again = [sent(tmp_path / "away", plan(2, counted=1)) for _ in range(2)]
    expected = sent(tmp_path / "here", plan(2, counted=1))
    assert [torch.equal(one, expected) for one in again] == [True, True]


@pytest.mark.parametrize("num_rounds", [3, 4])  # the last round is then in either slot
def test_rounds_that_come_again_after_an_older_checkpoint_have_their_own_residual(
    tmp_path: Path, num_rounds: int, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, num_rounds + 1):
        sent(tmp_path / "back", plan(number, counted=number - 1 or None))
    at = num_rounds - 2  # neither of the two residuals that are stored is of a counted round
    with caplog.at_level(logging.WARNING):
        sent(tmp_path / "back", plan(at + 1, counted=at))
    assert "the server went back to an earlier checkpoint" in caplog.text
    sent(tmp_path / "new", plan(at + 1, counted=None))
    after = [sent(tmp_path / name, plan(at + 2, counted=at + 1)) for name in ("back", "new")]
    assert torch.equal(*after)


class FullDisk:
    """Slots on a disk that has become full."""

    where = "/full"

    def __init__(self, inner: ResidualSlots) -> None:
        self.read, self.remove = inner.read, inner.remove

    def write(self, slot: int, head: bytes, values: memoryview) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_refuses_the_update_and_keeps_the_residual(tmp_path: Path) -> None:
    sent(tmp_path, plan(1, counted=None))
    feedback = ErrorFeedback(FullDisk(files(tmp_path)), LAYOUT)
    with pytest.raises(StateError, match="what compression left out cannot be kept in /full"):
        feedback.encode(update(2), plan(2, counted=1))
    as_before = sent(tmp_path, plan(2, counted=1))
    sent(tmp_path / "other", plan(1, counted=None))
    assert torch.equal(as_before, sent(tmp_path / "other", plan(2, counted=1)))
