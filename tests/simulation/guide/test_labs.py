"""The guide's computations: each says what the project's law says, and each break breaks it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from headwater.client.training.gradient_pass import add_micro_batch
from headwater.simulation.guide import loop_lab, masks_lab, memory_lab, pace_lab, sums_lab

ROOT = Path(__file__).resolve().parents[3]


def errors(examples: int, size: int) -> dict[str, float | None]:
    return {way["name"]: way["error"] for way in sums_lab.compare(examples, size)["ways"]}


def test_sums_are_those_of_the_whole_batch_and_every_break_is_seen() -> None:
    found = errors(100, 32)
    assert found.pop(sums_lab.EXACT.name) < 1e-6  # type: ignore[operator]
    assert all(error is not None and error > 1e-3 for error in found.values()), found


def test_dividing_by_k_is_right_where_all_micro_batches_are_equal() -> None:
    assert errors(96, 32)[sums_lab.DIVIDED.name] < 1e-6  # type: ignore[operator]
    assert errors(97, 32)[sums_lab.DIVIDED.name] > 0.1  # type: ignore[operator]


def test_in_one_micro_batch_only_the_mean_and_bfloat16_are_wrong() -> None:
    found = errors(32, 32)
    wrong = {name for name, error in found.items() if error is not None and error > 1e-4}
    assert wrong == {sums_lab.MEAN.name, sums_lab.BFLOAT16.name}


def test_batch_norm_fails_on_a_single_example() -> None:
    assert errors(33, 32)[sums_lab.BATCH_NORM.name] is None


def test_the_last_micro_batch_is_what_is_left() -> None:
    assert sums_lab.compare(70, 32)["sizes"] == [32, 32, 6]


def test_activations_are_those_that_torch_keeps() -> None:
    one, ten = memory_lab.activation_bytes(1), memory_lab.activation_bytes(10)
    assert ten == pytest.approx(10 * one, rel=0.01)
    pixels = memory_lab.PIXELS**2 * memory_lab.FLOAT_BYTES
    assert one > memory_lab.WIDTH * memory_lab.LAYERS * pixels, "the layers' outputs at least"


def test_a_batch_that_overflows_fits_in_micro_batches() -> None:
    found = memory_lab.measure(64, 4, 8 * 2**20)
    assert not found["fits_whole"]
    assert found["fits_small"]
    assert found["k"] == 16
    most = found["most"]
    assert memory_lab.measure(most, most, 8 * 2**20)["fits_whole"]
    assert not memory_lab.measure(most + 1, most + 1, 8 * 2**20)["fits_whole"]


@pytest.mark.parametrize("size", [1, 3, loop_lab.EXAMPLES])
def test_the_traced_loop_ends_with_the_whole_batchs_gradient(size: int) -> None:
    found = loop_lab.trace(size)
    task = loop_lab._SmallTask()
    inputs, wanted = task.train_examples(data=None, part=0, num_parts=1).tensors
    context, _, _ = loop_lab._prepared(task, size)
    model = context.image.model
    functional.mse_loss(model(inputs), wanted, reduction="sum").backward()  # type: ignore[no-untyped-call]
    expected = context.accumulator.values_P
    assert torch.allclose(torch.tensor(found["vector"]), expected, atol=1e-4)
    assert found["steps"][0]["vector"] == [0.0] * len(expected)
    assert sum(found["sizes"]) == found["weight"] == loop_lab.EXAMPLES


def test_each_traced_line_is_a_line_of_the_source_that_is_shown() -> None:
    found = loop_lab.trace(3)
    own = found["sources"]["add_micro_batch"]
    assert own["lines"] == [line.rstrip() for line in inspect.getsourcelines(add_micro_batch)[0]]
    for step in found["steps"]:
        source = found["sources"][step["function"]]
        assert source["lines"][step["line"] - source["first"]].strip()


def test_the_sources_of_the_loop_are_the_lines_of_the_core_s_files() -> None:
    sources = loop_lab.trace(3)["sources"]
    assert {source["file"] for source in sources.values()} == {
        "client/training/window.py",
        "client/training/gradient_pass.py",
    }
    for source in sources.values():
        text, start = (ROOT / source["file"]).read_text().splitlines(), source["first"] - 1
        assert source["lines"] == text[start : start + len(source["lines"])]


def test_masks_hide_the_update_until_all_others_collude() -> None:
    for colluders in range(4):
        found = masks_lab.look(5, colluders, digit=3)
        assert not found["is_revealed"]
        assert found["is_sum_exact"]
        assert found["keys_missing"] == 4 - colluders
    assert masks_lab.look(5, 4, digit=3)["is_revealed"]


def test_a_masked_vector_is_spread_over_the_ring_and_a_plain_one_is_not() -> None:
    found = masks_lab.look(5, 0, digit=3)
    total = sum(found["histogram_masked"])
    assert max(found["histogram_masked"]) < 2 * total / masks_lab.BINS
    assert max(found["histogram_plain"]) > total / 4


def given(**changes: float) -> dict[str, float]:
    plain: dict[str, float] = {
        "num_devices": 6,
        "spread": 4.0,
        "examples": 512,
        "micro_batch_size": 8,
        "seconds_per_example": 0.05,
        "megabytes": 1.0,
        "megabytes_per_second": 2.5,
    }
    return plain | changes


def test_fast_and_slow_devices_finish_together() -> None:
    devices = pace_lab.plan(**given())["devices"]  # type: ignore[arg-type]
    finish = [one["seconds"] for one in devices]
    assert max(finish) < 1.1 * min(finish)
    assert sum(one["quota"] for one in devices) == 512
    assert devices[0]["k"] > 3 * devices[1]["k"]


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, "times as fast"),
        ({"micro_batch_size": 256, "spread": 1.0}, "one micro-batch"),
        ({"megabytes": 60.0}, "no longer than this round"),
        ({"megabytes": 12.0}, "More than half"),
    ],
)
def test_the_advice_follows_from_the_times(changes: dict[str, float], advice: str) -> None:
    assert advice in pace_lab.plan(**given(**changes))["advice"]  # type: ignore[arg-type]
