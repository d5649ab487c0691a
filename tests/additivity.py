"""The comparison of a task's check alone, without its survey of the data and its memory limits."""

from __future__ import annotations

from torch import nn

from headwater.common.additivity.comparison import Comparison
from headwater.common.additivity.example_cache import ExampleCache
from headwater.common.additivity.single_examples import NUM_TRIED, MayTrainOn, SingleExamples
from headwater.common.additivity.trial_state import as_it_was
from headwater.common.task import Examples, Task


def check_additive(
    task: Task, model: nn.Module, examples: Examples, *, may_train_on: MayTrainOn = lambda _: True
) -> tuple[str, ...]:
    """Check on up to four examples that what a task returns is a sum; return the notes."""
    with as_it_was(model):
        singles = SingleExamples(task, model, ExampleCache(task, examples))
        comparison = Comparison(singles)
        singles.add(range(min(NUM_TRIED, len(examples))), may_train_on)
        comparison.run(may_train_on)
    return tuple(comparison.notes)
