"""The training loop line by line: the project's own code, traced while it sums a small window.

Each step is a line that was executed, and the vector as it was before it.
"""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.memory.peak_model import ProcessMemory
from headwater.client.training.accumulator import Accumulator
from headwater.client.training.context import TrainingContext
from headwater.client.training.gradient_pass import add_micro_batch
from headwater.client.training.sampler import ExampleOrder, SamplerPosition, Window
from headwater.client.training.stop_rules import StopRules
from headwater.client.training.window import sum_window
from headwater.common.messages import Plan
from headwater.common.model.parameters import build_model

EXAMPLES, INPUTS = 7, 4
SHOWN = (sum_window, add_micro_batch)
MAX_STEPS = 400


@lru_cache(maxsize=16)
def trace(micro_batch_size: int) -> dict[str, Any]:
    """Return the sources of the loop, and its steps over a window of ``EXAMPLES`` examples."""
    task = _SmallTask()
    context, window, plan = _prepared(task, micro_batch_size)
    steps: list[dict[str, Any]] = []
    names = {function.__code__: name for function, name in _named().items()}

    def note(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and len(steps) < MAX_STEPS:
            steps.append(
                {
                    "function": names[frame.f_code],
                    "line": frame.f_lineno,
                    "vector": [round(v, 5) for v in context.accumulator.values_P.tolist()],
                    "done": context.progress.num_steps,
                }
            )
        return note

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        code: CodeType = frame.f_code
        return note if code in names else None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        total = sum_window(plan, window, context, StopRules(plan, context, 0.0))
    finally:
        sys.settrace(before)
    return {
        "sources": {name: _source(function) for function, name in _named().items()},
        "steps": steps,
        "vector": [round(v, 5) for v in context.accumulator.values_P.tolist()],
        "weight": total.weight,
        "k": len(total.steps),
        "sizes": [len(part) for part in total.done],
    }


def _named() -> dict[Any, str]:
    return {function: function.__name__ for function in SHOWN}


def _source(function: Any) -> dict[str, Any]:
    """Return a function's file, first line and lines, without its docstring."""
    lines, first = inspect.getsourcelines(function)
    module = inspect.getmodule(function)
    file = (module.__name__ if module else "").removeprefix("headwater.").replace(".", "/")
    return {"file": f"{file}.py", "first": first, "lines": [line.rstrip() for line in lines]}


class _SmallTask:
    """A linear regression of four inputs: a vector that fits on a page."""

    def new_model(self) -> nn.Module:
        return nn.Linear(INPUTS, 1)

    def train_examples(self, *, data: object, part: int, num_parts: int) -> TensorDataset:
        random = torch.Generator().manual_seed(1)
        inputs = torch.randn(EXAMPLES, INPUTS, generator=random)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, wanted = batch
        return ((model(inputs) - wanted) ** 2).sum(), len(inputs)


class _Clock:
    """A clock that stands still: the loop's time is not shown."""

    def seconds(self) -> float:
        return 0.0

    def worked(self, size: float) -> None:
        """Do nothing."""


def _prepared(task: _SmallTask, micro_batch_size: int) -> tuple[TrainingContext, Window, Plan]:
    data = task.train_examples(data=None, part=0, num_parts=1)
    image = build_model(task, seed=0)
    context = TrainingContext(
        task=task,
        image=image,
        accumulator=Accumulator(image),
        examples=data,
        name="guide",
        clock=_Clock(),
        memory=ProcessMemory(),
        should_stop=lambda: False,
    )
    plan = Plan(
        round=1,
        run_seed=0,
        model_version=0,
        quota=EXAMPLES,
        micro_batch_size=micro_batch_size,
    )
    positions = tuple(range(EXAMPLES))
    order = ExampleOrder(0, context.name, EXAMPLES)
    return context, Window(positions=positions, place=SamplerPosition(), order=order), plan
