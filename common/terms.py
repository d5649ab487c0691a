"""What features ask of a round: each in a model of its own, under its name in ``Plan.terms``.

The core reads the few properties below, which say what it does otherwise, and no feature's name.
Terms that are missing are the weaker request: what an owner demands is checked in every plan, not
only in plans that have the terms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from headwater.common.errors import FeatureMissing


@dataclass(frozen=True, kw_only=True, slots=True)
class SumOf:
    """One sum beside the model's that a round adds up."""

    length: int
    is_mean: bool = False
    """Whether it is divided by the round's weight; else it is the sum itself."""
    limit: float = 2.0**20
    """The largest magnitude of a value in one update; an update beyond it is refused."""
    least: float | None = None
    """The least value in a plain update, as 0 of counts; None: ``-limit``."""
    scale_bits: int = 32
    """It is added up in whole numbers of 2^-scale_bits."""


class Terms(BaseModel):
    """What one feature asks of a device; a subclass has ``NAME`` and the fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    NAME: ClassVar[str]
    CODING: ClassVar[str | type | None] = None
    """The ``VectorCoding`` of these terms, a class or module:Class; None: they have none."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the name: a user's class is made anew in each process.

        A tensor goes as an array, as torch would send it to another process as an open file.
        """
        plain = {key: one.numpy() if isinstance(one, Tensor) else one for key, one in self}
        return _rebuilt, (self.NAME, plain)

    def shared_text(self) -> str:
        """Return what all members of a secure session must have in common: by default every field.

        What is left out may differ from device to device, and a server can single one out by it.
        Members of two versions agree on a field that is new where it is as it is by default, so a
        default keeps its meaning for ever.
        """
        return json.dumps(self.written(), sort_keys=True)

    def written(self) -> dict[str, Any]:
        """Return the fields as JSON has them, without what is so by default.

        Of a user's own terms all: their two sides may have files with unlike defaults.
        """
        is_own = self.NAME in _own
        found: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=not is_own)
        return found

    @property
    def asks_model(self) -> bool:
        """Whether the update has the model's sum; a round without it computes no gradient."""
        return True

    @property
    def subject(self) -> bytes | None:
        """The digest of what a round without the model's sum is of; None: of the model."""
        return None

    @property
    def other_subjects(self) -> Sequence[bytes]:
        """The digests of what else such a round's sums are of: a device gives no example twice."""
        return ()

    @property
    def repeats_examples(self) -> bool:
        """Whether a quota beyond the device's examples passes over them again."""
        return False

    @property
    def moves_model(self) -> bool:
        """Whether the model moves on the device, so that the update is no gradient at one model."""
        return False

    @property
    def uses_whole_window(self) -> bool:
        """Whether all planned examples, and no more, count as used, whatever was summed."""
        return False

    @property
    def has_planned_weight(self) -> bool:
        """Whether the update has the weight that the quota has at most, whatever was summed."""
        return False

    @property
    def carries_state(self) -> bool:
        """Whether what a device keeps of one round enters its update of a later one."""
        return False

    @property
    def is_private(self) -> bool:
        """Whether the model's sum is under noise, which other sums have none of."""
        return False

    @property
    def vector_bound(self) -> float | None:
        """The L2 norm that no update's vector exceeds; None: there is none."""
        return None

    @property
    def hides_pace(self) -> bool:
        """Whether the server may not know how far the device is."""
        return False

    @property
    def hides_data(self) -> bool:
        """Whether nothing that the server sees of the answer may depend on the device's data."""
        return False

    def unfit_for_masks(self, quota: int) -> str | None:
        """Return what could make a member's part of a masked sum other than its weight says."""
        return None

    @property
    def keeps_update(self) -> bool:
        """Whether the device answers with a ``ReadyReport``, and gives its update later."""
        return False

    @property
    def why_alone(self) -> str | None:
        """Why a simulator computes each device by itself; None: as for a plan without terms."""
        return f"the feature {self.NAME} acts on each device"

    @property
    def has_columns(self) -> bool:
        """Whether it can all the same compute many devices in one pass, each by itself."""
        return False

    @property
    def answers_after(self) -> float | None:
        """The seconds after which the plan is answered in any case; None: as it is done."""
        return None

    @property
    def max_windows(self) -> int:
        """The most windows that one update may be the sum of."""
        return 1

    @property
    def overlaps(self) -> bool:
        """Whether the client's next plan may be carried out while this one's update is sent."""
        return False

    @property
    def after_round(self) -> int | None:
        """The round of an earlier plan of the client that is still out: this one follows it.

        Its examples come after that plan's, and its update counts only if that one's did.
        """
        return None

    def sums(self, num_values: int) -> Mapping[str, SumOf]:
        """Return the sums beside the model's that each update brings, by their names.

        ``num_values`` is the number of the model's parameters.
        """
        return {}

    def num_sent(self, num_values: int) -> int:
        """Return how many coordinates of a vector are sent."""
        return num_values

    @property
    def tensor_bytes(self) -> int:
        """The bytes of tensors, or of as long fields, that the plan brings beside the model."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return sum(4 * one.numel() for one in values if isinstance(one, Tensor))

    def update_bytes(self, num_values: int) -> int | None:
        """Return the bytes of the update's vector; None: as of the other terms, or of float32."""
        return None


TermsT = TypeVar("TermsT", bound=Terms)

KINDS: dict[str, str] = {
    "compression": "headwater.common.compression.terms:CompressionTerms",
    "control_variates": "headwater.common.local_state.terms:ScaffoldTerms",
    "evaluation": "headwater.common.evaluation.terms:EvaluationTerms",
    "local_training": "headwater.common.local_training.terms:LocalPlan",
    "offline": "headwater.common.offline.terms:OfflineTerms",
    "overlap": "headwater.common.overlap.terms:OverlapTerms",
    "own_parameters": "headwater.common.own_parameters.terms:OwnStepTerms",
    "privacy": "headwater.common.privacy.terms:PrivacyTerms",
    "secagg": "headwater.common.secagg.terms:MaskingTerms",
    "statistics": "headwater.common.statistics.terms:StatisticsTerms",
}
"""The models by their names; each is imported when a plan has its terms."""


_own: dict[str, type[Terms]] = {}


def register(kind: type[Terms]) -> None:
    """Make the terms of a feature of the user's known in this process."""
    _own[kind.NAME] = kind


def kind_of(name: str) -> type[Terms]:
    """Return the model of a feature's terms.

    Raises:
        FeatureMissing: nothing of the feature is here.
    """
    if name in _own:
        return _own[name]
    if name not in KINDS:
        raise FeatureMissing(f"the plan asks for the feature {name[:80]!r}, and it is not here")
    module, _, kind = KINDS[name].partition(":")
    found: type[Terms] = getattr(import_module(module), kind)
    return found


def _rebuilt(name: str, fields: dict[str, Any]) -> Terms:
    values: dict[str, Any] = {
        key: torch.from_numpy(one) if isinstance(one, np.ndarray) else one
        for key, one in fields.items()
    }
    return kind_of(name).model_construct(**values)


def named(*terms: Terms) -> dict[str, Terms]:
    """Return terms by their names, as ``Plan.terms``."""
    return {one.NAME: one for one in terms}


def read_terms(found: Any) -> Any:
    """Return a plan's terms as their models.

    Raises:
        FeatureMissing: nothing of a feature is here.
    """
    if not isinstance(found, Mapping):
        return found
    return {
        name: one if isinstance(one, Terms) else _read(str(name), one)
        for name, one in found.items()
    }


def _read(name: str, found: Any) -> Terms:
    kind = kind_of(name)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        if name not in _own:
            raise
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise FeatureMissing(
            f"the feature {name} is another one on the other side: {where}: {first['msg'].lower()}"
        ) from None


def written_terms(terms: Mapping[str, Terms]) -> dict[str, Any]:
    """Return a plan's terms as JSON has them."""
    return {name: one.written() for name, one in terms.items()}


def shared_texts(terms: Mapping[str, Terms]) -> Sequence[str]:
    """Return what all members of a session must have in common, one text for each name."""
    return [f"{name} {terms[name].shared_text()}" for name in sorted(terms)]
