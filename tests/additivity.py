"""The comparison of a task's check alone, without its survey of the data and its memory limits."""

from __future__ import annotations

from torch import nn

from headwater.common.data.additivity import NUM_TRIED, Comparison, MayTrainOn
from headwater.common.data.example_cache import ExampleCache
from headwater.common.data.trial_state import as_it_was
from headwater.common.task import Examples, Task


def check_additive(
    task: Task, model: nn.Module, examples: Examples, *, may_train_on: MayTrainOn = lambda _: True
) -> tuple[str, ...]:
    """Check on up to four examples that what a task returns is a sum; return the notes."""
    with as_it_was(model):
        comparison = Comparison(task, model, ExampleCache(task, examples))
        comparison.add_singles(range(min(NUM_TRIED, len(examples))), may_train_on)
        comparison.run(may_train_on)
    return tuple(comparison.notes)
