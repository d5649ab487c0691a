"""What plans say of a test on the devices: which model, which examples, and what is counted.

All that is learned are sums. A whole number, or a real, of up to 2^44 travels in two float32: how
many times 2^20 it is, and the rest. So whole numbers are exact, and a real is off by up to 2^-24 of
itself, under masks too.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from headwater.common.evaluation.kinds import Floats
from headwater.common.task import MAX_METRICS
from headwater.common.terms import SumOf, Terms

MAX_COUNTS = 1 << 20
LARGEST, PART = 2.0**24, 2.0**20
"""Whole numbers up to the first are exact in float32; the second is what larger ones are cut by."""
COUNTS, HIGH, LOW = "evaluation.counts", "evaluation.high", "evaluation.low"
NUM_EXAMPLES, NUM_LEFT_OUT, WEIGHT, LOSS = range(4)
FIRST_METRIC = 4
NUM_FIGURES = FIRST_METRIC + MAX_METRICS
"""Figures of each model: those above, and then the metrics in the order of their names."""
MAX_SEPARATE = 0.5
OTHER = "other "
"""What stands before the names of the second model's figures in a plain report."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def subjects_of(model_digest: bytes, fraction: float) -> tuple[bytes, ...]:
    """Return what the sums of a test are of: a device that masks gives each example to it once.

    Up to half of the examples are a test of the model; its training at that model goes on with all.
    More are the model's own as well, as two sums of all examples would show who is in only one.
    """
    test = hashlib.sha256(b"headwater evaluation " + model_digest).digest()
    return (model_digest, test) if fraction > MAX_SEPARATE else (test,)


class EvaluationTerms(Terms):
    """A round that tests a model, or two on the same examples, and trains nothing."""

    NAME: ClassVar[str] = "evaluation"

    model: Digest
    """The digest of the model that comes with the plan (``ModelImage.digest``)."""
    other: Digest | None = None
    """That of the model that came before, for a comparison."""
    model_round: Annotated[int, Field(ge=1, le=2**53)] = 1
    """The number for the task's ``set_round``: a loss may change from round to round."""
    measures: Digest
    """The digest of what is counted, which device and server must have in common."""
    num_counts: Annotated[int, Field(ge=0, le=MAX_COUNTS)] = 0
    num_reals: Annotated[int, Field(ge=0, le=MAX_COUNTS)] = 0
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a device's examples that is tested; 1: all."""
    held_out: Annotated[str, Field(pattern=r"^(random|last|group:[^\x00-\x1f\x7f]{1,64})$")] = (
        "random"
    )

    @property
    def why_alone(self) -> str | None:
        return "each device tests the model by itself (--test-model)"

    @property
    def asks_model(self) -> bool:
        return False

    @property
    def subject(self) -> bytes | None:
        return subjects_of(bytes.fromhex(self.model), self.fraction)[0]

    @property
    def other_subjects(self) -> Sequence[bytes]:
        """The digests of what else the sums are of, such as the other model's test."""
        models = [self.model] if self.other is None else [self.model, self.other]
        found = [subjects_of(bytes.fromhex(model), self.fraction) for model in models]
        return tuple(itertools.chain.from_iterable(found))[1:]

    @property
    def num_models(self) -> int:
        """How many models are tested: 1 or 2."""
        return 1 if self.other is None else 2

    def sums(self, num_values: int) -> Mapping[str, SumOf]:
        length = self.num_models * (NUM_FIGURES + self.num_reals)
        counts = self.num_models * self.num_counts
        found = {
            HIGH: SumOf(length=length, limit=LARGEST, scale_bits=0),
            LOW: SumOf(length=length, limit=PART, scale_bits=32),
        }
        if counts:
            found[COUNTS] = SumOf(length=counts, limit=LARGEST, least=0, scale_bits=0)
        return found


def in_two(values: Floats) -> tuple[Floats, Floats]:
    """Return each value as a whole number of 2^20, and the rest; both have its sign."""
    high = np.trunc(values / PART)
    return high, values - high * PART


def from_two(high: Floats, low: Floats) -> Floats:
    """Return the values again."""
    return high * PART + low
