"""Trains a model on one device's examples: a plain PyTorch loop that ends when it stops to help.

Each step is along the gradient of the mean loss of a batch, plus the task's penalty. After
each epoch the loss on the examples that are kept for it is compared with the best so far (Prechelt
1998, "Early stopping - but when?"); the parameters of the best epoch are those of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from headwater.client.adaptation.batch_steps import BatchSteps
from headwater.client.adaptation.data_split import DataSplit
from headwater.client.training.sampler import permutation, split
from headwater.common.errors import SettingsError
from headwater.common.model.tensor_file import without_wrappers
from headwater.common.optimizers.named_optimizer import (
    check_steps_on_sums,
    in_groups,
    instance_of,
    optimizer_class,
)
from headwater.common.optimizers.torch_compiler_stub import without_dynamo
from headwater.common.task import Examples, Task

ORDER = "adapt"
"""Of the examples: ``permutation(seed, epoch, ORDER, number)``."""
MAX_NAMED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTuning:
    """How a model is trained further."""

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    epochs: int = 20
    patience: int = 3
    """Epochs in a row without a better loss after which the training ends."""
    batch_size: int = 16
    seed: int = 0
    only: str | None = None
    """Patterns of the parameters that train; None: all that are not frozen."""

    def check(self) -> None:
        """Check the numbers.

        Raises:
            SettingsError: one is out of range.
        """
        least = {"epochs": self.epochs, "patience": self.patience, "batch-size": self.batch_size}
        for name, number in least.items():
            if number < 1:
                raise SettingsError(
                    f"--{name}: expected 1 or more, found {number}", remedy=f"give another --{name}"
                )
        if not 0 < self.learning_rate < math.inf:
            raise SettingsError(
                f"--learning-rate: expected a number above 0, found {self.learning_rate}",
                remedy="give another --learning-rate, as in 0.001",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """How far the training has come."""

    epoch: int = 0
    best_epoch: int = 0
    """0: the model as it was."""
    num_steps: int = 0
    steps_per_epoch: int = 0
    stop_losses: tuple[float, ...] = ()
    """The mean loss on the examples that end the training, before it and after each epoch."""
    ended: str = ""
    """Why the training ended; empty while it runs."""


@dataclass(kw_only=True, slots=True)
class _Best:
    loss: float
    values: dict[str, Tensor] = field(default_factory=dict)

    def take(self, loss: float, parameters: Mapping[str, nn.Parameter]) -> None:
        self.loss = loss
        self.values = {name: one.detach().clone() for name, one in parameters.items()}


def chosen_parameters(model: nn.Module, only: str | None) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name: those that patterns name, or all.

    Raises:
        SettingsError: a pattern names no parameter that can train; or the model has none.
    """
    own = {name: one for name, one in model.named_parameters() if one.requires_grad}
    plain = without_wrappers(model, own)
    if only is None:
        if not own:
            raise SettingsError("the model has no parameter that can train: all are frozen")
        return own
    chosen: dict[str, nn.Parameter] = {}
    for pattern in (one.strip() for one in only.split(",")):
        named = {
            name: one
            for name, one in own.items()
            if fnmatchcase(name, pattern) or fnmatchcase(plain[name], pattern)
        }
        if not named:
            names = [*plain.values()]
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            raise SettingsError(
                f"--only: {pattern!r} names no parameter that trains",
                remedy=f"name some of {', '.join(names[:MAX_NAMED])}{more}, as in --only 'head.*'",
            )
        chosen |= named
    return {name: one for name, one in own.items() if name in chosen}


def fine_tune(
    task: Task,
    model: nn.Module,
    examples: Examples,
    data: DataSplit,
    chosen: FineTuning,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[TrainingState], None] = lambda _: None,
) -> TrainingState:
    """Train a model in place, and leave it with its best parameters, in evaluation mode.

    ``should_stop`` is called before each step; the best parameters so far are the result then. The
    random state of torch is left as it was.

    Raises:
        SettingsError: the optimizer cannot be made, or no parameter is named.
        OutOfMemory: one example alone does not fit.
        TaskFailed, TaskError: the task raised, or breaks a rule.
    """
    parameters = chosen_parameters(model, chosen.only)
    kind = optimizer_class(chosen.optimizer)
    check_steps_on_sums(kind)
    with torch.random.fork_rng(devices=[]), without_dynamo(), _only(model, parameters):
        torch.manual_seed(chosen.seed)
        optimizer = instance_of(
            kind, in_groups(kind, parameters.values(), model), {"lr": chosen.learning_rate}
        )
        steps = BatchSteps(task, model, examples, optimizer, chosen.batch_size)
        best = _Best(loss=math.inf)
        best.take(steps.mean_loss(data.stop), parameters)
        state = TrainingState(
            steps_per_epoch=math.ceil(len(data.train) / chosen.batch_size),
            stop_losses=(best.loss,),
        )
        while not state.ended:
            state = _epoch(state, steps, data, chosen, should_stop, on_step)
            if state.ended:
                break
            loss = steps.mean_loss(data.stop)
            state = replace(state, stop_losses=(*state.stop_losses, loss))
            if loss < best.loss:
                best.take(loss, parameters)
                state = replace(state, best_epoch=state.epoch)
            state = replace(state, ended=_end(state, chosen))
            on_step(state)
    put(parameters, best.values)
    model.eval()
    return state


def put(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    """Overwrite parameters with values of the same names."""
    with torch.no_grad():
        for name, one in parameters.items():
            one.copy_(values[name])


def _end(state: TrainingState, chosen: FineTuning) -> str:
    if state.epoch - state.best_epoch >= chosen.patience:
        return f"no better loss in {chosen.patience} epochs"
    return "all epochs are done" if state.epoch == chosen.epochs else ""


def _epoch(
    state: TrainingState,
    steps: BatchSteps,
    data: DataSplit,
    chosen: FineTuning,
    should_stop: Callable[[], bool],
    on_step: Callable[[TrainingState], None],
) -> TrainingState:
    """Train on each example once, in a new order; ``ended`` is set if that was cut short."""
    epoch = state.epoch + 1
    order = permutation(chosen.seed, epoch, ORDER, len(data.train))
    for places in split(order.tolist(), chosen.batch_size):
        if should_stop():
            return replace(state, ended="it was stopped")
        if not steps.take([data.train[place] for place in places]):
            return replace(state, ended="the loss is no finite number any more: it diverged")
        state = replace(state, num_steps=state.num_steps + 1)
        on_step(state)
    return replace(state, epoch=epoch)


@contextmanager
def _only(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Compute no gradients but those of ``parameters``; afterwards all is as it was."""
    others = [
        one
        for name, one in model.named_parameters()
        if one.requires_grad and name not in parameters
    ]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)
        model.zero_grad()
