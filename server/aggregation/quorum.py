"""Checks that a round has updates of enough clients before it changes the model."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.common.errors import (
    DeviceRefused,
    EmptyUpdate,
    HeadwaterError,
    MaskingRequired,
    NonFiniteUpdate,
    NothingWeighed,
    OutlierUpdate,
    OutOfMemory,
    TooFewClients,
)
from headwater.common.wording import counted

NOTHING_FINITE = "lower --learning-rate if the model diverged, or look at the devices' data"
DIVERGED = (EmptyUpdate, NonFiniteUpdate, OutlierUpdate)
"""If all clients' updates are like these, the model is what they have in common."""


def check_quorum(
    num_included: int,
    *,
    needed: int,
    num_invited: int,
    num_left_out: int,
    errors: Mapping[str, HeadwaterError],
    round_number: int,
) -> None:
    """Abort a round that includes fewer clients than it needs, or none.

    ``num_left_out`` clients were too slow to be invited. ``errors`` say why invited clients are not
    included.

    Raises:
        TooFewClients: with the first clients' errors.
    """
    if num_included >= max(needed, 1):
        return
    some = list(errors.items())[:3]
    why = "; ".join(f"{name}: {error.code}: {error}" for name, error in some)
    left_out = f", {num_left_out} left out as too slow"
    raise TooFewClients(
        f"round {round_number}: {num_included} of {counted(num_invited, 'client')} "
        f"gave a usable answer in time{left_out if num_left_out else ''}, at least {needed} "
        f"{'is' if needed == 1 else 'are'} needed" + (f" ({why})" if why else ""),
        remedy=_common_remedy(errors),
    )


def _common_remedy(errors: Mapping[str, HeadwaterError]) -> str | None:
    """Return the remedy for errors that all clients have, and that the operator can mend."""
    if errors and all(type(error) in DIVERGED for error in errors.values()):
        return NOTHING_FINITE
    if len({type(error) for error in errors.values()}) != 1:
        return None
    error = next(iter(errors.values()))
    is_known = isinstance(error, DeviceRefused | MaskingRequired | OutOfMemory | NothingWeighed)
    return error.remedy or None if is_known else None
