"""The sum of a device without a link: windows added up in one file, whole at every instant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwater.client.offline.offline_sum import OfflineSum, OfflineSumFile, merged
from headwater.client.training.sampler import SamplerPosition, SamplerState
from headwater.common.messages import MAX_STEPS, Step, UpdateReport
from tests.plans import plan_of

PLAN = plan_of(round=3, run_seed=0, model_version=2, quota=8, micro_batch_size=4, max_windows=50)


def window(num_examples: int, *, loss: float = 1.0, num_steps: int = 2) -> UpdateReport:
    step = Step(num_examples=4, weight=4, loss=loss, seconds=0.1, peak_bytes=0)
    return UpdateReport(
        name="pi",
        round=3,
        num_examples=num_examples,
        weight=2 * num_examples,
        loss_sum=loss,
        metric_sums={"correct": 3.0},
        micro_batch_size=4,
        seconds=0.5,
        steps=(step,) * num_steps,
        reason="quota",
    )


def place(offset: int) -> SamplerState:
    return SamplerState(place=SamplerPosition(offset=2)).pend(3, SamplerPosition(offset=offset))


def kept_in(folder: Path, values_P: Tensor) -> tuple[OfflineSumFile, OfflineSum]:
    file = OfflineSumFile(folder / "state" / "pi-1.offline")
    kept = OfflineSum(plan=PLAN, report=window(8), sampler=place(10))
    file.write(kept, values_P)
    return file, kept


def test_a_sum_of_fifty_windows_has_the_counts_of_all_of_them() -> None:
    total = window(8, loss=2.0)
    for _ in range(49):
        total = merged(total, window(6, loss=0.5))
    assert (total.num_windows, total.num_examples, total.weight) == (50, 302, 604)
    assert (total.loss_sum, total.metric_sums) == (2.0 + 49 * 0.5, {"correct": 150.0})
    assert total.summed_weight == 50 * 2 * 4


def test_a_sum_of_windows_has_the_local_steps_of_all_of_them() -> None:
    five, three = (window(8).model_copy(update={"local_steps": number}) for number in (5, 3))
    assert merged(merged(five, five), three).local_steps == 13


def test_examples_that_joined_before_the_first_window_stay_counted() -> None:
    first = window(8).model_copy(update={"num_joined": 3, "num_left": 1})
    total = merged(merged(first, window(8)), window(8))
    assert (total.num_joined, total.num_left) == (3, 1)


def test_the_place_before_the_first_window_stays_until_the_sum_is_counted() -> None:
    kept = OfflineSum(plan=PLAN, report=window(8), sampler=place(10))
    assert kept.next_sampler == SamplerState(place=SamplerPosition(offset=10))
    after = kept.after(window(8), kept.next_sampler.pend(3, SamplerPosition(offset=18)))
    assert after.sampler.settle(None).place == SamplerPosition(offset=2)
    assert after.sampler.settle(3).place == SamplerPosition(offset=18)


def test_what_is_kept_is_read_back_and_added_to(tmp_path: Path) -> None:
    values_P = torch.tensor([1.0, -2.0, 0.5])
    file, kept = kept_in(tmp_path, values_P)
    more_P, read_P = torch.tensor([4.0, 8.0, 16.0]), torch.zeros(3)
    assert file.add_to(more_P)
    assert more_P.tolist() == [5.0, 6.0, 16.5]
    assert file.load_into(read_P) == kept == file.read()
    assert torch.equal(read_P, values_P)


def test_a_sum_that_overflows_is_not_taken(tmp_path: Path) -> None:
    largest = torch.finfo(torch.float32).max
    file, _ = kept_in(tmp_path, torch.full((3,), largest))
    assert not file.add_to(torch.full((3,), largest))


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_file_is_deleted_and_nothing_of_it_is_sent(tmp_path: Path, at: int) -> None:
    file, _ = kept_in(tmp_path, torch.ones(3))
    data = bytearray(file.path.read_bytes())
    data[at] ^= 64
    file.path.write_bytes(data)
    assert not file.add_to(torch.ones(3))
    assert file.load_into(torch.zeros(3)) is None
    assert not file.path.exists()


def test_a_report_without_room_for_further_steps_takes_no_window() -> None:
    assert OfflineSum(plan=PLAN, report=window(8), sampler=place(10)).has_room
    full = window(8, num_steps=MAX_STEPS - 2)
    assert not OfflineSum(plan=PLAN, report=full, sampler=place(10)).has_room
