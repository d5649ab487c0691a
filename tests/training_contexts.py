"""Training contexts for tests: a clock and a memory of their own, and the exact sums to expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from headwater.client.device.interfaces import Memory
from headwater.client.features import train_round, work_of
from headwater.client.local_training.local_work import ClientAlgorithm
from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.round import Work, sum_round
from headwater.client.training.sampler import ExampleOrder, SamplerPosition, Window
from headwater.client.training.spool import Spool
from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Plan, Update
from headwater.common.model.parameters import build_model
from headwater.common.task import Task
from tests.plans import plan_of
from tests.tasks import gradient_sum


class FakeClock:
    """A micro-batch of n examples takes n seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self) -> float:
        return self.now

    def worked(self, size: float) -> None:
        self.now += size


class FakeMemory:
    """A machine on which n examples take ``base + each x n`` bytes; above the limit it is killed.

    ``limits(n)`` is the limit when the micro-batch n, from 0, is to begin.
    """

    def __init__(
        self, limits: Callable[[int], int | None], *, base: float = 1000.0, each: float = 10.0
    ) -> None:
        self.line: Line | None = Line(base=base, each=each)
        self.begun: list[float] = []
        self.checkpointed_to: list[float | None] = []
        self._limits = limits

    def limit_bytes(self) -> int | None:
        return self._limits(len(self.begun))

    def fitting(self, size: float) -> float | None:
        limit = self.limit_bytes()
        assert self.line is not None
        return None if limit is None else max(int((limit - self.line.base) / self.line.each), 0)

    def begin(self, size: float) -> None:
        limit = self.limit_bytes()
        assert self.line is not None
        assert limit is None or self.line.at(size) <= limit, "killed"
        self.begun.append(size)

    def end(self, size: float) -> int:
        assert self.line is not None
        return int(self.line.at(size))

    def expect(self, *, rest_bytes: int, peak_bytes: int) -> None:
        self.line = Line(base=rest_bytes, each=peak_bytes - rest_bytes)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        before = self.line
        assert before is not None
        self.line = Line(base=before.base + num_bytes, each=before.each)
        try:
            yield
        finally:
            self.line = before

    def use_checkpointing(self, bytes_per_example: float | None) -> None:
        self.checkpointed_to.append(bytes_per_example)
        if self.line is not None and bytes_per_example is not None:
            self.line = Line(base=self.line.base, each=bytes_per_example)


def training_context(
    task: Task,
    data: TensorDataset,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    memory: Memory | None = None,
    **more: Any,
) -> TrainingContext:
    image = build_model(task, seed=3)
    return TrainingContext(
        task=task,
        image=image,
        accumulator=Accumulator(image),
        examples=data,
        name="pi",
        clock=FakeClock(),
        memory=memory or ProcessMemory(),
        should_stop=should_stop,
        **more,
    )


def plan(quota: int, micro_batch_size: int, **changes: Any) -> Plan:
    return plan_of(
        round=1,
        run_seed=0,
        model_version=0,
        quota=quota,
        micro_batch_size=micro_batch_size,
        **changes,
    )


def whole(data: TensorDataset, quota: int) -> Window:
    """Return a window in the order of the data set, in which positions are known."""
    positions = tuple(range(len(data)))[:quota]
    order = ExampleOrder(0, "pi", len(data))
    return Window(positions=positions, place=SamplerPosition(), order=order)


def sums(context: TrainingContext, positions: Sequence[int]) -> Tensor:
    assert isinstance(context.examples, TensorDataset)
    expected = gradient_sum(context.image.values_P, context.examples, positions)
    return torch.from_numpy(expected).float()


def trained(context: TrainingContext, chosen: Plan) -> Update:
    assert isinstance(context.examples, TensorDataset)
    return train_round(chosen, whole(context.examples, chosen.quota), context)


def sum_gradients(
    chosen: Plan,
    part: Window,
    context: TrainingContext,
    spool: Spool | None = None,
    algorithm: ClientAlgorithm | None = None,
) -> Work:
    """Sum a window's gradients with the features that the plan calls for; no update is made."""
    sum_round(work := work_of(chosen, part, context, spool, algorithm))
    return work
