"""The answers of several clients as those of single ones, to be compared with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwater.common.errors import HeadwaterError
from headwater.common.messages import Update, UpdateReport
from headwater.server.fleet import Answer, Dropout, UpdateBlock

FIELDS = (
    *("name", "round", "num_examples", "weight", "loss_sum", "metric_sums", "micro_batch_size"),
    *("num_refused", "num_joined", "num_left", "seconds", "steps", "reason", "local_steps"),
    *("vitals", "is_checkpointed", "num_windows", "clip_bit", "num_steps", "summed_weight"),
    "has_norms",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Single:
    """A client's vector and all that its report says; or why it dropped out."""

    name: str
    values_P: Tensor = field(default_factory=lambda: torch.zeros(0))
    report: dict[str, Any] = field(default_factory=dict)
    error: HeadwaterError | None = None


def singles(answers: Iterable[Answer]) -> Iterator[Single]:
    """Yield each client's answer by itself, with a vector of its own."""
    for answer in answers:
        if isinstance(answer, UpdateBlock):
            for values_P, report in zip(answer.vectors, answer.reports, strict=True):
                yield _single(values_P, report)
        elif isinstance(answer, Update):
            yield _single(answer.values_P, answer.report)
        else:
            assert isinstance(answer, Dropout)
            yield Single(name=answer.name, error=answer.error)


def _single(values_P: Tensor, report: UpdateReport) -> Single:
    fields = {name: getattr(report, name) for name in FIELDS}
    return Single(name=report.name, values_P=values_P.clone(), report=fields)


def assert_same(found: Sequence[Single], expected: Sequence[Single]) -> None:
    """Assert that the clients sent the same bits and reports, or dropped out alike."""
    for one, other in zip(found, expected, strict=True):
        assert one.name == other.name
        assert one.report == other.report
        assert torch.equal(one.values_P, other.values_P)
        assert type(one.error) is type(other.error)
        assert one.error is None or other.error is None or one.error.message == other.error.message
