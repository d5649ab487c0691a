"""The bytes that a round moves for a device, as planned from a run's settings and its model."""

from __future__ import annotations

from headwater.common.compression.low_rank import matrices_of
from headwater.common.compression.terms import (
    CompressionTerms,
    Matrix,
    few_bits_bytes,
    planned_difference_bytes,
    terms_of,
    update_bytes,
)
from headwater.common.model.layout import ModelLayout
from headwater.common.settings.rounds import MIN_MASKED_FRACTION
from headwater.common.settings.schema import Settings


def download_bytes(settings: Settings, layout: ModelLayout) -> int:
    """Return the bytes of the model for a device that has been in a round, or about.

    If only some devices are in a round, most hold an older version: the differences of two rounds
    in bfloat16 are as long as the model.
    """
    method, num_values = settings.compression.down, layout.num_parameters
    if method == "off" or (method == "bfloat16" and settings.cohort.size is not None):
        return 4 * num_values
    return planned_difference_bytes(method, num_values)


def upload_bytes(settings: Settings, layout: ModelLayout) -> int:
    """Return the bytes of a device's update, masked or not; of low rank the mean of both sides."""
    num_values = layout.num_parameters
    is_masked = settings.secure.aggregation != "off"
    if settings.compression.up == "low-rank":
        number, values = _mean_factors(settings, layout), settings.compression.values
        if is_masked:
            return settings.secure.ring_bits // 8 * number
        return 2 * number if values == "bfloat16" else few_bits_bytes(values, number)
    terms = terms_of(settings.compression)
    return (
        masked_bytes(settings, terms, num_values) if is_masked else update_bytes(terms, num_values)
    )


def masked_bytes(settings: Settings, terms: CompressionTerms | None, num_values: int) -> int:
    """Return the bytes of a masked update under these terms; None: of all coordinates."""
    num_sent = num_values if terms is None else terms.num_sent(num_values)
    return num_sent * settings.secure.ring_bits // 8


def low_rank_matrices(settings: Settings, layout: ModelLayout) -> tuple[Matrix, ...]:
    """Return the matrices of which a run's updates have factors; devices mask no smaller ones."""
    least = 0.0 if settings.secure.aggregation == "off" else MIN_MASKED_FRACTION
    return matrices_of(layout, settings.compression.rank, least_share=least)


def _mean_factors(settings: Settings, layout: ModelLayout) -> int:
    rank = settings.compression.rank
    saved = sum(
        one.rows * one.columns - one.rank(rank) * (one.rows + one.columns) // 2
        for one in low_rank_matrices(settings, layout)
    )
    return layout.num_parameters - saved
