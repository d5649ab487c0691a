"""The probe measures micro-batches before the first plan and stays below the memory limit."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.device.hardware import MonotonicClock
from headwater.client.memory.peak_model import NOISE_BYTES, WORKING_FACTOR, ProcessMemory
from headwater.client.trainer.probe import ExampleProbe
from headwater.client.trainer.probe_fit import (
    DISPATCH_SECONDS,
    GAIN,
    PROBE_SECONDS,
    SAFE_SHARE,
    ProbeFit,
    ProbePoint,
    peak_line,
    predicted_bytes,
    reason_to_stop,
)
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.common.errors import OutOfMemory, TaskFailed
from headwater.common.estimates.linear_fit import Line
from headwater.common.model.parameters import build_model
from headwater.common.task import Task
from tests.commands import python
from tests.tasks import NAN_LOSS, NUM_HIDDEN, RAISES_BACKWARD, RAISES_FORWARD, TwoLayers, examples

MIB = 2**20
ROOT = Path(__file__).parents[3]


def training_context(data: TensorDataset, task: Task | None = None) -> TrainingContext:
    task = task or TwoLayers()
    image = build_model(task, seed=0)
    return TrainingContext(
        task=task,
        image=image,
        accumulator=Accumulator(image),
        examples=data,
        name="pi",
        clock=MonotonicClock(),
        memory=ProcessMemory(),
        should_stop=lambda: False,
    )


def probe(context: TrainingContext, *, cores: float = math.inf) -> ProbeFit:
    """Probe without a memory limit."""
    return ExampleProbe(context).fit(lambda: None, cores=cores)


def points(seconds: Line, peaks: Line, sizes: list[int]) -> tuple[ProbePoint, ...]:
    return tuple(
        ProbePoint(
            size=size,
            seconds=seconds.at(size),
            usual_seconds=seconds.at(size),
            least_seconds=seconds.at(size),
            peak_bytes=math.ceil(peaks.at(size)),
        )
        for size in sizes
    )


def doubled(count: int) -> list[int]:
    return [2**n for n in range(count)]


DISPATCHED = Line(base=0.01, each=0.0001)
PEAKS = Line(base=300 * MIB, each=8 * MIB)


def stopped(
    found: tuple[ProbePoint, ...],
    *,
    num_examples: int = 256,
    predicted: float = 0,
    limit: int | None = None,
    seconds: float = 0,
) -> str | None:
    return reason_to_stop(
        found,
        num_examples=num_examples,
        next_bytes=predicted,
        limit_bytes=limit,
        seconds=seconds,
    )


# How far it grows.


def test_the_size_grows_while_no_rule_stops_it() -> None:
    found = points(DISPATCHED, PEAKS, doubled(4))
    assert stopped(found, predicted=800 * MIB, limit=1001 * MIB) is None


def test_the_probe_ends_at_the_number_of_examples() -> None:
    reason = stopped(points(DISPATCHED, PEAKS, [1, 2, 3]), num_examples=3)
    assert reason is not None
    assert "no more than 3 examples" in reason


def test_the_probe_ends_before_a_size_close_to_the_limit() -> None:
    found = points(DISPATCHED, PEAKS, doubled(4))
    limit = 1000 * MIB
    assert stopped(found, predicted=SAFE_SHARE * limit, limit=limit) is None
    reason = stopped(found, predicted=SAFE_SHARE * limit + 1, limit=limit)
    assert reason == "the next would take 839 MB, above 80% of the limit of 1.05 GB"


def test_three_doublings_without_a_gain_end_the_probe_and_two_do_not() -> None:
    flat = Line(base=0, each=0.01)
    assert stopped(points(flat, PEAKS, [1, 2, 4])) is None
    assert stopped(points(flat, PEAKS, [1, 2, 4, 8])) == "no faster than with 1"


def test_a_short_micro_batch_is_doubled_even_without_a_gain() -> None:
    quick = Line(base=0, each=DISPATCH_SECONDS / 100)
    assert stopped(points(quick, PEAKS, doubled(7))) is None
    assert stopped(points(quick, PEAKS, doubled(8))) == "no faster than with 1"


def test_the_probe_ends_after_its_time_but_measures_two_sizes() -> None:
    slow = Line(base=1.0, each=1.0)
    assert stopped(points(slow, PEAKS, [1]), seconds=10 * PROBE_SECONDS) is None
    reason = stopped(points(slow, PEAKS, [1, 2]), seconds=PROBE_SECONDS)
    assert reason is not None
    assert "it took" in reason


# What it foresees.


@given(
    st.floats(100 * MIB, 1000 * MIB),
    st.floats(0, 50 * MIB),
    st.floats(1, 100 * MIB),
    st.integers(1, 8),
    st.lists(st.floats(0, 1), min_size=8, max_size=8),
)
def test_no_measured_peak_exceeds_the_line_whose_slope_includes_the_saved_activations(
    base: float, each: float, kept: float, count: int, noise: list[float]
) -> None:
    found = tuple(
        ProbePoint(
            size=size,
            seconds=1,
            usual_seconds=1,
            least_seconds=1,
            peak_bytes=int(base + each * size + more * NOISE_BYTES),
        )
        for size, more in zip(doubled(count), noise, strict=False)
    )
    line = peak_line(found, kept)
    assert all(line.at(p.size) >= p.peak_bytes * (1 - 1e-9) for p in found)
    assert line.each >= kept
    assert line.base >= 0


def test_a_slope_within_the_noise_is_that_of_the_activations() -> None:
    found = points(DISPATCHED, Line(base=300 * MIB, each=0), doubled(9))
    kept = 800.0
    assert peak_line(found, kept).each == WORKING_FACTOR * kept


def test_a_slope_beyond_the_noise_is_that_of_the_peaks() -> None:
    found = points(DISPATCHED, PEAKS, doubled(6))
    noise = NOISE_BYTES / 31
    assert abs(peak_line(found, 1 * MIB).each - PEAKS.each) <= noise * (1 + 1e-9)
    assert abs(peak_line(found, 6 * MIB).each - PEAKS.each) <= noise * (1 + 1e-9)


def test_a_single_size_has_the_slope_of_its_activations() -> None:
    found = points(DISPATCHED, PEAKS, [1])
    line = peak_line(found, 3 * MIB)
    assert line.each == WORKING_FACTOR * 3 * MIB
    assert line.at(1) == found[0].peak_bytes


@pytest.mark.parametrize("sizes", [[1], [1, 2], [1, 2, 4, 8]])
def test_peaks_on_a_line_predict_at_least_the_next_peak(sizes: list[int]) -> None:
    found = points(DISPATCHED, PEAKS, sizes)
    size = 2 * sizes[-1]
    predicted = predicted_bytes(found, size, 4 * MIB, rest_bytes=PEAKS.base)
    assert PEAKS.at(size) <= predicted <= PEAKS.at(size) + NOISE_BYTES * size


def test_peaks_that_bend_upwards_are_predicted_by_the_last_two() -> None:
    """A buffer of fixed size hides small sizes; then the peak grows by 8 MiB each."""
    bent = tuple(
        ProbePoint(size=size, seconds=1, usual_seconds=1, least_seconds=1, peak_bytes=peak * MIB)
        for size, peak in ((1, 400), (2, 400), (4, 400), (8, 432))
    )
    assert predicted_bytes(bent, 16, 1 * MIB, rest_bytes=300 * MIB) >= (432 + 8 * 8) * MIB


# What it says of the speed.


def probed(found: tuple[ProbePoint, ...]) -> ProbeFit:
    return ProbeFit(points=found, rest_bytes=0, kept_bytes=1, stopped="")


def test_seconds_on_a_line_give_that_line_and_no_fastest_size() -> None:
    speed = probed(points(DISPATCHED, PEAKS, doubled(9))).speed
    assert speed.seconds_per_micro_batch == pytest.approx(DISPATCHED.base)
    assert speed.seconds_per_example == pytest.approx(DISPATCHED.each)
    assert speed.fastest_micro_batch_size is None


def test_the_fastest_size_is_the_last_with_a_gain() -> None:
    seconds = {1: 0.010, 2: 0.016, 4: 0.030, 8: 0.030 * 2 * (1 - GAIN / 2), 16: 0.3}
    found = tuple(
        ProbePoint(size=n, seconds=s, usual_seconds=s, least_seconds=s, peak_bytes=1)
        for n, s in seconds.items()
    )
    assert probed(found).speed.fastest_micro_batch_size == 4


@pytest.mark.parametrize(("usual", "fastest"), [(1.4, 4), (1.6, None)])
def test_the_fastest_size_is_unknown_on_a_busy_machine(usual: float, fastest: int | None) -> None:
    """Sizes above 4 take no less; the least seconds are those of a machine left alone."""
    seconds = {1: 0.010, 2: 0.016, 4: 0.030, 8: 0.060, 16: 0.3}
    found = tuple(
        ProbePoint(size=n, seconds=s, usual_seconds=usual * s, least_seconds=s, peak_bytes=1)
        for n, s in seconds.items()
    )
    assert probed(found).speed.fastest_micro_batch_size == fastest


def test_interruptions_scale_the_line_and_keep_its_shape() -> None:
    found = tuple(
        ProbePoint(
            size=size,
            seconds=DISPATCHED.at(size),
            usual_seconds=3 * DISPATCHED.at(size),
            least_seconds=DISPATCHED.at(size),
            peak_bytes=1,
        )
        for size in doubled(5)
    )
    speed = probed(found).speed
    assert speed.seconds_per_micro_batch == pytest.approx(3 * DISPATCHED.base)
    assert speed.seconds_per_example == pytest.approx(3 * DISPATCHED.each)


# On this machine.


@pytest.mark.parametrize(
    ("num_examples", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (24, [1, 2, 4, 8, 16, 24])]
)
def test_a_small_model_is_measured_up_to_all_examples(num_examples: int, sizes: list[int]) -> None:
    found = probe(training_context(examples(num_examples)))
    measured = [p.size for p in found.points]
    assert measured == sizes[: len(measured)]
    assert len(measured) == len(sizes) or num_examples > 2
    assert found.speed.seconds_per_micro_batch >= 0
    assert found.speed.seconds_per_example > 0
    line = found.peaks.now
    assert line.each >= found.kept_bytes > 0
    assert line.base > MIB


@pytest.mark.parametrize("kind", [NAN_LOSS, RAISES_FORWARD, RAISES_BACKWARD])
@pytest.mark.parametrize("position", [0, 1, 5])
def test_a_failing_example_does_not_prevent_the_measurement(kind: int, position: int) -> None:
    kinds = [0] * position + [kind]
    found = probe(training_context(examples(24, kinds=kinds)))
    assert found.speed.seconds_per_example > 0


def test_after_a_failing_example_the_gradients_are_still_slices_of_the_vector() -> None:
    context = training_context(examples(24, kinds=[RAISES_FORWARD]))
    probe(context)
    context.accumulator.check_views()


def test_a_slow_example_is_measured_once_and_larger_sizes_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.client.trainer.probe.PROBE_SECONDS", 0.0)
    for module in ("probe", "probe_fit"):
        monkeypatch.setattr(f"headwater.client.trainer.{module}.SLOW_SECONDS", 0.0)
    task = TwoLayers()
    found = probe(training_context(examples(8), task))
    assert task.seen == [1, 1]  # the second pass, forward alone, counts what is kept
    assert [point.size for point in found.points] == [1]
    assert found.speed.fastest_micro_batch_size == 1
    assert found.speed.seconds_per_example == pytest.approx(found.points[0].seconds)
    line = found.peaks.line
    assert line.base + line.each >= 0.999 * found.points[0].peak_bytes


def test_a_first_pass_that_is_slow_for_once_does_not_make_the_example_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.client.trainer.probe.SLOW_SECONDS", 1.5)
    task = TwoLayers()

    def loss_sum(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        if not task.seen:
            time.sleep(1.5)  # as an import in it
        return TwoLayers.loss_sum(task, model, batch)

    task.loss_sum = loss_sum  # type: ignore[method-assign]
    found = probe(training_context(examples(8), task))
    assert [point.size for point in found.points][:2] == [1, 2]


def test_running_out_of_memory_at_eight_examples_ends_the_probe_at_four() -> None:
    found = probe(training_context(examples(24), TwoLayers(max_micro_batch=4)))
    assert [p.size for p in found.points] == [1, 2, 4]
    assert found.stopped == "memory ran out at 8 examples"


def test_a_device_on_which_no_example_fits_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match="one example alone"):
        probe(training_context(examples(24), TwoLayers(max_micro_batch=0)))


def test_a_task_that_fails_on_all_first_examples_is_named() -> None:
    with pytest.raises(TaskFailed):
        probe(training_context(examples(24, kinds=[RAISES_FORWARD] * 24)))


class Wide(TwoLayers):
    """One large activation, kept by the squares' backward pass."""

    width = 1000

    def new_model(self) -> nn.Module:
        return nn.Linear(3, self.width)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().sum(), len(batch[0])


def test_activation_bytes_include_the_widest_activation() -> None:
    kept = ExampleProbe(training_context(examples(4), Wide())).activation_bytes()
    inputs, activation = 4 * 3, 4 * Wide.width
    assert activation <= kept <= 2 * (inputs + activation)
    assert kept > 4 * NUM_HIDDEN


class Wider(TwoLayers):
    """An activation of 4 MB for each example, after a small layer."""

    width = 1_000_000

    def new_model(self) -> nn.Module:
        return nn.Linear(3, 8)

    def loss_sum(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).repeat(1, self.width // 8).square().sum(), len(batch[0])


@pytest.mark.slow
def test_a_large_activation_is_part_of_the_line() -> None:
    found = probe(training_context(examples(16), Wider()))
    line = found.peaks.line
    assert len(found.points) >= 2
    assert line.each >= found.kept_bytes >= 4 * Wider.width
    assert all(line.at(p.size) >= p.peak_bytes * (1 - 1e-9) for p in found.points)
    assert found.points[0].peak_bytes >= found.rest_bytes + 4 * Wider.width - NOISE_BYTES


CONFINED = """
import json, resource, sys
import torch
from pathlib import Path
torch.set_num_threads(1)
from headwater.client.device.hardware import ThisMachine
from headwater.client.memory.peak_model import PeakMeter
from headwater.client.trainer.probe import ExampleProbe
from tests.client.trainer.test_probe import Wider, training_context
from tests.tasks import examples

context = training_context(examples(256), Wider())
rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
data = int(rows["VmData"].split()[0]) * 1024
room = int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (data + room, data + room))
machine = ThisMachine()
least = machine.limits.lowest()
peak = PeakMeter()
found = ExampleProbe(context).fit(machine.limits.lowest_bytes, cores=2.0)
machine.memory.known = found.peaks
print(json.dumps({
    "source": least.source,
    "limit": least.num_bytes,
    "peak": peak.peak_bytes(),
    "stopped": found.stopped,
    "fitting": machine.memory.fitting(1),
    "line": [machine.memory.line.base, machine.memory.line.each],
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts on Linux")
@pytest.mark.parametrize("room_mib", [150, 400])
def test_a_confined_process_is_probed_within_its_limit(room_mib: int) -> None:
    """8 to 16 MB per example under a real RLIMIT_DATA; an allocation beyond it would fail."""
    done = python("-c", CONFINED, room_mib)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["source"] == "RLIMIT_DATA"
    assert said["peak"] <= said["limit"]
    assert "memory ran out" not in said["stopped"]
    assert 0 < said["fitting"] < 256
    base, each = said["line"]
    assert base + each * said["fitting"] <= said["limit"]


def test_a_cpu_quota_slows_the_measured_speed() -> None:
    """A pass takes at least its CPU time over the cores: of a thousandth of one, a thousand times.

    The walls of both probes differ by what else the machine does, and never by a hundred.
    """
    free = probe(training_context(examples(24)), cores=1.0)
    held = probe(training_context(examples(24)), cores=1e-3)
    assert held.points[0].seconds > 100 * free.points[0].seconds
