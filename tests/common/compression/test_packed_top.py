"""Top-k in few bits: the largest coordinates, positions of 12 bits, and nothing lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.common.compression.encoding import Coding
from headwater.common.compression.terms import SHORT_SPAN, CompressionTerms
from headwater.common.errors import CorruptUpdate, HeadwaterError, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector

LENGTHS = (1, 2, SHORT_SPAN, SHORT_SPAN + 1, CHUNK + 3 * SHORT_SPAN + 5)


def terms(values: str = "int2", fraction: float = 0.01) -> CompressionTerms:
    return CompressionTerms.model_validate(
        {"method": "top-k", "fraction": fraction, "values": values}
    )


def vector(length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(0))


def coding(chosen: CompressionTerms) -> Coding:
    return Coding(terms=chosen, run_seed=0, round=1)


def read(data: bytearray, chosen: CompressionTerms, length: int) -> EncodedVector:
    return coding(chosen).read(data, "pi", length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("values", ["int4", "int2", "int1"])
def test_the_largest_are_sent_and_what_is_left_makes_up_the_rest(values: str, length: int) -> None:
    chosen, values_P = terms(values), vector(length)
    left_P = values_P.clone()
    data = coding(chosen).encode(left_P, "pi")
    assert len(data) == chosen.num_bytes(length)
    sent_P = read(data, chosen, length).tensor()
    largest = values_P.abs().topk(chosen.num_sent(length)).indices
    beside = torch.ones(length, dtype=torch.bool)
    beside[largest] = False
    assert not sent_P[beside].any()
    assert torch.equal(left_P[beside], values_P[beside])
    assert left_P.norm() < values_P.norm()
    torch.testing.assert_close(sent_P + left_P, values_P, rtol=1e-6, atol=1e-6)


def test_a_coordinate_of_a_hundred_takes_fourteen_bits() -> None:
    number = 1_000_000
    assert 8 * terms().num_bytes(number) / terms().num_sent(number) < 14.5


def test_a_part_is_decoded_as_the_whole_is() -> None:
    length, chosen = LENGTHS[-1], terms(fraction=0.03)
    found = read(coding(chosen).encode(vector(length), "pi"), chosen, length)
    cuts = (0, 1, SHORT_SPAN - 1, SHORT_SPAN + 5, CHUNK, CHUNK + 1, length)
    parts = [found[low:high] for low, high in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), found.tensor().numpy())


def hostile(change: str) -> bytearray:
    """Return a valid encoding of 5,000 coordinates, of which 50 are sent, with one change."""
    data = coding(terms()).encode(vector(5000), "pi")
    positions = np.frombuffer(data, np.uint8, 75, offset=4)
    match change:
        case "one byte less":
            return data[:-1]
        case "wrong count":
            np.frombuffer(data, "<u2", 1)[0] += 1
        case "position out of range":
            positions[-2:] = 255
        case "position twice":
            first = positions[0] | (positions[1] & 15) << 8
            positions[1] = (positions[1] & 15) | (first & 15) << 4
            positions[2] = first >> 4
        case "NaN scale":
            np.frombuffer(data, "<f4", 1, offset=4 + 75)[0] = np.nan
    return data


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("one byte less", CorruptUpdate),
        ("wrong count", CorruptUpdate),
        ("position out of range", CorruptUpdate),
        ("position twice", CorruptUpdate),
        ("NaN scale", NonFiniteUpdate),
    ],
)
def test_a_hostile_encoding_is_refused_by_name(change: str, error: type[HeadwaterError]) -> None:
    with pytest.raises(error, match="pi: "):
        read(hostile(change), terms(), 5000)
