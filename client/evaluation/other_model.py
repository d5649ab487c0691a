"""The model that another one is compared with: it comes first, and is kept until the round is over.

A process keeps it once, whatever the number of its clients: 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor

from headwater.common.errors import CorruptUpdate, FeatureMissing
from headwater.common.evaluation.terms import EvaluationTerms
from headwater.common.messages import EvaluateReport, Plan
from headwater.common.model.parameters import ModelImage


class OtherModel(NamedTuple):
    """A model's digest and its parameters."""

    digest: str
    values_P: Tensor


_kept: WeakKeyDictionary[ModelImage, OtherModel] = WeakKeyDictionary()


def take_model(image: ModelImage, plan: Plan, *, name: str) -> EvaluateReport:
    """Keep the loaded model for the plan that follows; return a report without any figure.

    Raises:
        CorruptUpdate: it is not the one that the plan names.
    """
    terms = plan.of(EvaluationTerms)
    assert terms is not None  # see client.features
    digest = image.digest.hex()
    if digest != terms.other:
        raise CorruptUpdate(
            f"{name}, round {plan.round}: the model that came is not the one that the plan "
            "compares with",
            remedy="use a server of this version",
        )
    if (known := _kept.get(image)) is None or known.digest != digest:
        _kept[image] = OtherModel(digest, image.values_P.clone())
    return EvaluateReport(name=name, weight=0, loss_sum=0.0)


def check_kept(image: ModelImage, terms: EvaluationTerms, *, name: str) -> None:
    """Check that the model that a plan compares with is here.

    Raises:
        FeatureMissing: it is not.
    """
    known = _kept.get(image)
    if terms.other is not None and (known is None or known.digest != terms.other):
        raise FeatureMissing(
            f"{name}: the model to compare with has not come to this process",
            remedy="compare on an engine whose devices stay in one process: no SuperNodes, no "
            "worker processes; or test the two models one after the other",
        )


@contextmanager
def swapped(image: ModelImage) -> Iterator[None]:
    """Put the kept model in the place of the loaded one, and take it back."""
    own_P = image.values_P.clone()
    image.values_P.copy_(_kept[image].values_P)
    try:
        yield
    finally:
        image.values_P.copy_(own_P)
