"""The model that another one is compared with: it comes first, and is kept until the round is over.

A process keeps it once, whatever the number of its clients: 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwater.client.node_features import NodeFeature
from headwater.common.errors import CorruptUpdate, FeatureMissing
from headwater.common.evaluation.terms import EvaluationTerms
from headwater.common.messages import EvaluateReport, Plan
from headwater.common.model.parameters import ModelImage
from headwater.common.model.vectors import CHUNK


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
    """Exchange the kept model and the loaded one, piece by piece, and then back."""
    other_P = _kept[image].values_P
    _exchange(image.values_P, other_P)
    try:
        yield
    finally:
        _exchange(image.values_P, other_P)


def _exchange(one_P: Tensor, two_P: Tensor) -> None:
    for one, two in zip(torch.split(one_P, CHUNK), torch.split(two_P, CHUNK), strict=True):
        before = one.clone()
        one.copy_(two)
        two.copy_(before)


class KeptModel(NodeFeature):
    """Lets go of the model at the end of its run, of which a device that waits has no use."""

    def left(self) -> None:
        """Forget the model."""
        _kept.pop(self.node.trainer.image, None)
