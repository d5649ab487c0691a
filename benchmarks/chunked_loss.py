"""CPU time and peak memory of the chunked cross-entropy, against torch's over all logits.

A forward and a backward pass of a head alone: 512 tokens, 1,024 features, 50,257 words, one thread.
``chunked`` is ``headwater.chunked_cross_entropy`` with the weight's gradient added in place, as the
clients' training adds it; ``in_torch`` is ``torch.nn.functional.linear_cross_entropy`` in chunks,
where torch has it. Each is held against ``cross_entropy(linear(...))``: ``cpu`` is the median of
the ratios of CPU seconds in turn; ``peak_mb`` what a process of its own takes beyond its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import (
    Figures,
    arguments,
    child,
    memory_of,
    ratio,
    report,
    reset_peak,
    take_turns,
)
from headwater.common.model.chunked_cross_entropy import adding_in_place, chunked_cross_entropy

WAYS = ("whole", "chunked", "in_torch")


class Head:
    """The tensors of a head, with gradients to add to."""

    def __init__(self, num_tokens: int, num_features: int, num_words: int) -> None:
        self.hidden = torch.randn(num_tokens, num_features, requires_grad=True)
        self.weight = (0.02 * torch.randn(num_words, num_features)).requires_grad_()
        self.targets = torch.randint(num_words, (num_tokens,))
        for leaf in (self.hidden, self.weight):
            leaf.grad = torch.ones_like(leaf)  # zeros would have no memory before they are changed

    def run(self, way: str) -> None:
        """Add the gradients of the summed loss."""
        with adding_in_place():
            self._loss(way).backward()  # type: ignore[no-untyped-call]

    def _loss(self, way: str) -> Tensor:
        if way == "chunked":
            return chunked_cross_entropy(self.hidden, self.weight, self.targets)
        if way == "whole":
            logits = functional.linear(self.hidden, self.weight)
            return functional.cross_entropy(logits, self.targets, reduction="sum")
        found: Tensor = functional.linear_cross_entropy(
            *(self.hidden, self.weight, self.targets),
            reduction="sum",
            options=nn.LinearCrossEntropyOptions(),
        )
        return found


def ways() -> list[str]:
    """Return the ways that this version of torch has."""
    return [way for way in WAYS if way != "in_torch" or hasattr(nn, "LinearCrossEntropyOptions")]


def peak_mb(way: str, *, is_quick: bool) -> float:
    """Measure a process of its own; see ``main``."""
    flags = ["--way", way, "--json", *(["--quick"] if is_quick else [])]
    return float(child("benchmarks.chunked_loss", *flags)["peak_mb"])


def main() -> None:
    given = arguments(__doc__, way=WAYS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = (64, 32, 2000) if given.quick else (512, 1024, 50_257)
    head = Head(*sizes)
    if given.way:
        Head(2, 8, 100).run(given.way)
        reset_peak()
        before = memory_of()["VmRSS"]
        head.run(given.way)
        report({"peak_mb": (memory_of()["VmHWM"] - before) / 1e6}, as_json=True, doc=None)
        return
    loops: dict[str, Callable[[], None]] = {way: partial(head.run, way) for way in ways()}
    _, cpu = take_turns(loops, turns=2 if given.quick else 3, seconds_each=0.01)
    figures: Figures = {
        way: {
            "cpu": ratio(cpu[way], cpu["whole"]),
            "peak_mb": peak_mb(way, is_quick=given.quick),
        }
        for way in loops
    }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
