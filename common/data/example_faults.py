"""Why an example is left out: a NaN in its input or target, an unusable loss, or an exception.

The check, the start of a run and the rounds report these faults in the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from headwater.common.data.batches import SubsetView
from headwater.common.data.nested_values import parts_by_name, stored_tensors
from headwater.common.task import Examples
from headwater.common.user_code.failures import described

# So many positions are named for each kind of fault.
MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ExampleFault:
    """Why one example is left out; ``detail`` has an exception's text and the user's own lines."""

    kind: str
    detail: str = ""


def exception_fault(error: BaseException) -> ExampleFault:
    """Return the fault of an example whose forward or backward pass raised this exception."""
    return ExampleFault(f"it raised {type(error).__name__}", described(error))


def loss_fault(batch: Any) -> ExampleFault:
    """Return why the loss of a batch of one example is not finite; None if it is not known."""
    parts = [text for name, value in _parts(batch) if (text := _non_finite(name, value))]
    if parts:
        return ExampleFault(" and ".join(parts))
    if batch is None:
        return ExampleFault("its loss is NaN or infinite")
    return ExampleFault("its loss is NaN or infinite, though the example itself is finite")


def summary(faults: Mapping[int, ExampleFault], examples: Examples) -> str:
    """Return how many examples have each kind of fault, a line each, with positions and details."""
    lines = []
    for kind, positions in _by_kind(faults):
        lines.append(_counted(kind, positions, examples))
        lines += [f"  {line}" for line in faults[positions[0]].detail.splitlines()]
    return "\n".join(f"  {line}" for line in lines)


def short_summary(faults: Mapping[int, ExampleFault], examples: Examples) -> str:
    """Return ``summary`` on one line, without details."""
    return "; ".join(_counted(kind, at, examples) for kind, at in _by_kind(faults))


def details(faults: Mapping[int, ExampleFault]) -> dict[str, str]:
    """Return the first details of each kind of fault that has some."""
    first = {kind: faults[positions[0]].detail for kind, positions in _by_kind(faults)}
    return {kind: detail for kind, detail in first.items() if detail}


def _by_kind(faults: Mapping[int, ExampleFault]) -> list[tuple[str, list[int]]]:
    """Return the positions of each kind of fault, the most frequent first."""
    by_kind: dict[str, list[int]] = {}
    for position, fault in sorted(faults.items()):
        by_kind.setdefault(fault.kind, []).append(position)
    return sorted(by_kind.items(), key=lambda item: -len(item[1]))


def _counted(kind: str, positions: Sequence[int], examples: Examples) -> str:
    """Return a kind with its number, and its first positions in the data set of the task."""
    named = ", ".join(str(own_position(examples, p)) for p in positions[:MAX_NAMED])
    more = ", ..." if len(positions) > MAX_NAMED else ""
    return f"{len(positions):,}: {kind} (position {named}{more})"


def own_position(examples: Examples, position: int) -> int:
    """Return an example's position in the data set of which ``examples`` may be a subset."""
    while isinstance(examples, SubsetView | Subset):
        if isinstance(examples, SubsetView):
            position, examples = int(examples.positions[position]), examples.whole
        else:
            position, examples = examples.indices[position], examples.dataset  # type: ignore[assignment]
    return position


def whole_of(examples: Examples) -> Examples:
    """Return the data set of which ``examples`` may be a subset."""
    while isinstance(examples, SubsetView | Subset):
        examples = examples.whole if isinstance(examples, SubsetView) else examples.dataset  # type: ignore[assignment]
    return examples


def _parts(batch: Any, name: str = "the example", depth: int = 3) -> Iterable[tuple[str, Tensor]]:
    """Yield a batch's tensors, each with what it is; of a pair the input and the target."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, np.ndarray) and batch.dtype.kind in "fc":
        yield name, torch.from_numpy(batch)
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _parts(value, f"its {key!r}", depth)
    elif isinstance(batch, list | tuple):
        names = (
            ("its input", "its target")
            if len(batch) == 2
            else [f"its element {at}" for at in range(len(batch))]
        )
        for one, value in zip(names, batch, strict=True):
            yield from _parts(value, one, depth)
    elif depth > 0:  # objects may hold each other
        for key, value in parts_by_name(batch).items():
            yield from _parts(value, f"its {key!r}", depth - 1)


def _non_finite(name: str, values: Tensor) -> str | None:
    if not values.is_floating_point() and not values.is_complex():
        return None
    parts = [part for part in stored_tensors(values) if part.dtype == values.dtype]
    if any(part.isnan().any() for part in parts):
        return f"{name} has a NaN"
    is_finite = all(part.isfinite().all() for part in parts)
    return None if is_finite else f"{name} has an infinity"
