"""One step from many micro-batches, beside the step of the whole batch; and ways to break it.

Each way is the loop that people write, on the project's digits. The error is the relative distance
of its gradient from that of the whole batch in one pass, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwater.client.training.accumulator import Accumulator
from headwater.common.model.parameters import build_model
from headwater.examples.digits import Digits

MAX_EXAMPLES = 512
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to accumulate: its name, its loop as text, and why it is right or wrong."""

    name: str
    code: str
    why: str
    gradient: Callable[[nn.Module, Sequence[Batch]], Tensor]


def compare(num_examples: int, micro_batch_size: int) -> dict[str, Any]:
    """Return the micro-batches' sizes, of which the last may be short, and each way's error."""
    batch = _examples(num_examples)
    parts = cut(batch, micro_batch_size)
    found = []
    for way in WAYS:
        if way is BATCH_NORM and len(parts[-1][1]) < 2:
            found.append(_row(way, None))  # it cannot normalise a single example
            continue
        wanted = _reference(batch, has_norm=way is BATCH_NORM)
        model = digits_model(has_norm=way is BATCH_NORM)
        error = (way.gradient(model, parts).double() - wanted).norm() / wanted.norm()
        found.append(_row(way, float(error)))
    return {"sizes": [len(labels) for _, labels in parts], "ways": found}


def _row(way: Way, error: float | None) -> dict[str, Any]:
    return {"name": way.name, "code": way.code, "why": way.why, "error": error}


def cut(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into micro-batches; the last one is what is left."""
    images, labels = batch
    return list(zip(torch.split(images, size), torch.split(labels, size), strict=True))


def _exact(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    """Accumulate as a device does, into the project's own vector; divide once."""
    image = build_model(_Given(model), seed=0)
    accumulator = Accumulator(image)
    weight = 0
    for images, labels in parts:
        _backward(functional.cross_entropy(image.model(images), labels, reduction="sum"))
        weight += len(labels)
    return accumulator.values_P / weight


def _with_batch_norm(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    """Sum as above; the project itself refuses such a model."""
    for images, labels in parts:
        _backward(functional.cross_entropy(model(images), labels, reduction="sum"))
    return _gradient_of(model) / sum(len(labels) for _, labels in parts)


def _divided_by_k(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    for images, labels in parts:
        loss = functional.cross_entropy(model(images), labels)
        _backward(loss / len(parts))
    return _gradient_of(model)


def _zeroed_inside(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    weight = sum(len(labels) for _, labels in parts)
    for images, labels in parts:
        model.zero_grad()
        _backward(functional.cross_entropy(model(images), labels, reduction="sum"))
    return _gradient_of(model) / weight


def _mean_left_in(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    weight = sum(len(labels) for _, labels in parts)
    for images, labels in parts:
        _backward(functional.cross_entropy(model(images), labels))
    return _gradient_of(model) / weight


def _in_bfloat16(model: nn.Module, parts: Sequence[Batch]) -> Tensor:
    weight, total = 0, None
    for images, labels in parts:
        model.zero_grad()
        _backward(functional.cross_entropy(model(images), labels, reduction="sum"))
        found = _gradient_of(model).bfloat16()
        total = found if total is None else total + found
        weight += len(labels)
    assert total is not None
    return total.float() / weight


EXACT = Way(
    name="Headwater: sum, divide once",
    code="""for images, labels in micro_batches:
    loss = cross_entropy(model(images), labels, reduction="sum")
    loss.backward()              # adds into the vector
    weight += len(labels)
gradient = vector / weight       # once, on the server""",
    why="Sums add up however the examples are cut. What is left is float32's rounding.",
    gradient=_exact,
)
DIVIDED = Way(
    name="Divide each loss by K",
    code="""for images, labels in micro_batches:
    loss = cross_entropy(model(images), labels)     # a mean
    (loss / K).backward()""",
    why="Right only if all micro-batches are equally large: an example of a short one counts more.",
    gradient=_divided_by_k,
)
MEAN = Way(
    name="A mean left in",
    code="""for images, labels in micro_batches:
    cross_entropy(model(images), labels).backward()  # a mean
gradient = vector / weight""",
    why="It is divided twice: the step is smaller by the size of a micro-batch.",
    gradient=_mean_left_in,
)
ZEROED = Way(
    name="Zero inside the loop",
    code="""for images, labels in micro_batches:
    model.zero_grad()
    cross_entropy(model(images), labels, reduction="sum").backward()
gradient = vector / weight""",
    why="Only the last micro-batch is left of all the work.",
    gradient=_zeroed_inside,
)
BFLOAT16 = Way(
    name="Sum in bfloat16",
    code="""total = zeros(P, dtype=bfloat16)
for images, labels in micro_batches:
    total += gradient_sum(images, labels).bfloat16()""",
    why="bfloat16 has about 2.4 digits: small gradients vanish beside the sum.",
    gradient=_in_bfloat16,
)
BATCH_NORM = Way(
    name="BatchNorm in the model",
    code="""model = Sequential(Linear(64, 128), BatchNorm1d(128), ReLU(), Linear(128, 10))
for images, labels in micro_batches:
    cross_entropy(model(images), labels, reduction="sum").backward()""",
    why="It normalises by the micro-batch's own mean, so examples depend on their neighbours.",
    gradient=_with_batch_norm,
)
WAYS = (EXACT, DIVIDED, MEAN, ZEROED, BFLOAT16, BATCH_NORM)


class _Given(Digits):
    """The digits with a model that exists already."""

    def __init__(self, model: nn.Module) -> None:
        self._given = model

    def new_model(self) -> nn.Module:
        return self._given


def digits_model(*, has_norm: bool) -> nn.Module:
    """Return the digits' model with the same first weights each time, perhaps with BatchNorm."""
    return copy.deepcopy(_fresh_model(has_norm))


@cache
def _fresh_model(has_norm: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = Digits().new_model()
        assert isinstance(plain, nn.Sequential)
        layers = [*plain]
        if has_norm:
            layers.insert(1, nn.BatchNorm1d(128))
        return nn.Sequential(*layers)


def _reference(batch: Batch, *, has_norm: bool) -> Tensor:
    """Return the mean gradient of the whole batch in one pass, in float64."""
    model = digits_model(has_norm=has_norm).double()
    images, labels = batch
    loss = functional.cross_entropy(model(images.double()), labels, reduction="sum")
    _backward(loss)
    return _gradient_of(model) / len(labels)


def _gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([grad.flatten() for grad in _gradients(model)])


def _backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


@cache
def _examples(number: int) -> Batch:
    images, labels = Digits().train_examples(data=None, part=0, num_parts=1).tensors
    return images[:number], labels[:number]
