"""What a spool's file holds: float32 tensors, plain data, and the totals of a window."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from torch import Tensor

from headwater.client.training.accumulator import Accumulator
from headwater.client.training.window_sum import WindowSum
from headwater.common.messages import Step


class SpoolContent(Protocol):
    """What of a window is on disk beside its totals: float32 tensors, and plain data."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors to write; they are written one after another."""

    def plain(self) -> dict[str, Any]:
        """Return the plain data to write."""

    def room(self, plain: Mapping[str, Any], num_values: int) -> Tensor:
        """Return the memory [N] that the tensors of a file with this plain data are read into.

        Raises:
            ValueError: the file has another number of values than that.
        """

    def take(self, plain: Mapping[str, Any], read: Tensor) -> None:
        """Continue from what was read; the file's digest was right."""


class SummedVector:
    """The content of an exact sum: the accumulator's vector, and the tensors without a gradient."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    def tensors(self) -> list[Tensor]:
        return [self._accumulator.memory]

    def plain(self) -> dict[str, Any]:
        return {"unused": self._accumulator.unused()}

    def room(self, plain: Mapping[str, Any], num_values: int) -> Tensor:
        check_room(self._accumulator.memory.numel(), num_values)
        return self._accumulator.memory

    def take(self, plain: Mapping[str, Any], read: Tensor) -> None:
        """Note which tensors have a gradient; the vector was read into its place."""
        self._accumulator.mark_used(plain.get("unused", ()))


def check_room(expected: int, num_values: int) -> None:
    """Check the number of values in a file before memory is taken for them.

    Raises:
        ValueError: it is not the expected one.
    """
    if expected != num_values:
        raise ValueError(f"it has {num_values:,} values, expected {expected:,}")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous float32 tensor, without a copy."""
    return tensor.detach().numpy().reshape(-1).data.cast("B")


def digest_of(state: str, tensors: Iterable[Tensor]) -> str:
    """Return SHA-256 of the state and of the tensors, one after another."""
    digest = hashlib.sha256(state.encode())
    for tensor in tensors:
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


# The keys of the file's state; they stay the same from version to version.


def plain_totals(total: WindowSum) -> dict[str, Any]:
    """Return a window's totals as plain data; reading restores every float to the bit."""
    return {
        "loss_sum": total.loss_sum,
        "weight": total.weight,
        "metric_sums": total.metric_sums,
        "steps": [asdict(step) for step in total.steps],
        "taken": total.done,
        "left": list(total.remaining),
        "refused": total.refused,
        "num_cut_smaller": total.num_reductions,
        "micro_batch_size": total.micro_batch_size,
        "apart": total.are_apart,
    }


def totals_of(state: Mapping[str, Any]) -> WindowSum:
    """Return the totals that ``plain_totals`` gave."""
    done = [tuple(group) for group in state["taken"]]
    return WindowSum(
        loss_sum=state["loss_sum"],
        weight=state["weight"],
        num_examples=sum(map(len, done)),
        metric_sums=state["metric_sums"],
        steps=[Step(**step) for step in state["steps"]],
        done=done,
        remaining=deque(tuple(group) for group in state["left"]),
        refused=state["refused"],
        num_reductions=state["num_cut_smaller"],
        micro_batch_size=state["micro_batch_size"],
        needs_check=bool(done),
        are_apart=state.get("apart", False),
    )
