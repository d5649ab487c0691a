"""Checks one private update as it arrives, by the terms of its plan."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from headwater.common.errors import CountOutOfRange
from headwater.common.messages import Update
from headwater.common.model.vectors import squared_norm
from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.terms import Terms

log = logging.getLogger(__name__)


def admit(update: Update, terms: Terms) -> Tensor:
    """Check an update's bit on the clip norm; return its vector, clipped.

    Raises:
        CountOutOfRange: it has no bit and should have one, or the reverse; or its sums are longer
            than the plan allows.
    """
    assert isinstance(terms, PrivacyTerms)
    _check_bit(update, terms)
    _check_sums(update, terms)
    return _clipped(update, terms)


def _check_sums(update: Update, terms: PrivacyTerms) -> None:
    """Check the sums beside the model's of a private update, which the same noise hides.

    Raises:
        CountOutOfRange: together they are longer than what it is for.
    """
    norm = math.sqrt(math.fsum(squared_norm(values) for values in update.sums.values()))
    if norm > terms.norm_bound:
        raise CountOutOfRange(
            f"{update.name}: its sums have a norm of {norm:.6g}, its plan allows "
            f"{terms.norm_bound:.6g}"
        )


def _check_bit(update: Update, terms: PrivacyTerms) -> None:
    """Check that a private update tells what its plan asks for.

    Raises:
        CountOutOfRange: it has no bit on the clip norm and should have one, or the reverse.
    """
    if (update.report.clip_bit is None) != (terms.bit_multiplier is None):
        raise CountOutOfRange(
            f"{update.name}: expected {'no' if terms.bit_multiplier is None else 'a'} bit on the "
            f"clip norm, found {update.report.clip_bit}"
        )


def _clipped(update: Update, terms: PrivacyTerms) -> Tensor:
    """Return a private update's vector, clipped if its device should have clipped it and did not.

    The noise hides a vector of this norm, and no longer one.
    """
    if squared_norm(update.values_P) <= terms.norm_bound**2:
        return update.values_P
    log.warning("%s: its update is longer than its plan allows, and is clipped", update.name)
    values_P = update.values_P.clone()
    clip_to_norm(values_P, terms.norm_bound)
    return values_P
