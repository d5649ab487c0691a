"""Top-k in few bits: the largest coordinates, their positions in few bits, and nothing lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.common.compression.encoding import Coding
from headwater.common.compression.sorted_positions import (
    CHUNK_POSITIONS,
    decoded_positions,
    encode_positions,
    positions_bytes,
)
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import CorruptUpdate, HeadwaterError, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector

LENGTHS = (1, 2, 4096, 4097, CHUNK + 12_293)


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


@pytest.mark.parametrize(("fraction", "bits"), [(0.01, 10.7), (0.03, 9.2), (0.1, 7.4), (1.0, 4.1)])
def test_a_coordinate_takes_few_bits(fraction: float, bits: float) -> None:
    number, chosen = 1_000_000, terms(fraction=fraction)
    assert 8 * chosen.num_bytes(number) / chosen.num_sent(number) < bits


def test_the_positions_of_many_chunks_come_back() -> None:
    length, chosen = 3 * CHUNK_POSITIONS, terms("int4", 0.7)
    values_P = vector(length)
    sent_P = read(coding(chosen).encode(values_P.clone(), "pi"), chosen, length).tensor()
    largest = values_P.abs().topk(chosen.num_sent(length)).indices
    assert chosen.num_sent(length) > 2 * CHUNK_POSITIONS
    assert torch.equal(sent_P[largest].sign(), values_P[largest].sign())
    assert not sent_P[values_P.abs() < values_P[largest].abs().min()].any()


def test_a_part_is_decoded_as_the_whole_is() -> None:
    length, chosen = LENGTHS[-1], terms(fraction=0.03)
    found = read(coding(chosen).encode(vector(length), "pi"), chosen, length)
    cuts = (0, 1, 4095, 4101, CHUNK, CHUNK + 1, length)
    parts = [found[low:high] for low, high in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), found.tensor().numpy())


def hostile(change: str) -> bytearray:
    """Return a valid encoding of 5,000 coordinates, of which 50 are sent, with one change."""
    data = coding(terms()).encode(vector(5000), "pi")
    end = positions_bytes(50, 5000)
    lower, upper = slice(0, 38), slice(38, end)  # 50 times 6 bits; 128 bits, of which 50 are set
    match change:
        case "one byte less":
            return data[:-1]
        case "one position more":
            data[upper] = bytes(one | (one + 1) for one in data[upper])
        case "no position":
            data[upper] = bytes(end - 38)
        case "position out of range":
            data[upper] = bytes(9) + b"\xfc" + bytes([255] * 6)
            data[lower] = bytes(range(38))
        case "position twice":
            data[upper] = bytes([255] * 6) + b"\3" + bytes(end - 38 - 7)
            data[lower] = bytes(38)
        case "NaN scale":
            np.frombuffer(data, "<f4", 1, offset=end)[0] = np.nan
    return data


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("one byte less", CorruptUpdate),
        ("one position more", CorruptUpdate),
        ("no position", CorruptUpdate),
        ("position out of range", CorruptUpdate),
        ("position twice", CorruptUpdate),
        ("NaN scale", NonFiniteUpdate),
    ],
)
def test_a_hostile_encoding_is_refused_by_name(change: str, error: type[HeadwaterError]) -> None:
    with pytest.raises(error, match="pi: "):
        read(hostile(change), terms(), 5000)


@settings(max_examples=60)
@given(data=st.binary(min_size=11, max_size=11))
def test_any_bytes_are_positions_in_order_or_refused(data: bytes) -> None:
    number, length = 10, 700  # 10 times 6 bits, and 20 bits of which 10 are set
    try:
        found = decoded_positions(memoryview(data), number, length, name="pi")
    except CorruptUpdate:
        return
    assert len(found) == number
    assert (np.diff(found) > 0).all()
    assert 0 <= found[0] <= found[-1] < length


@given(st.data())
def test_positions_come_back_in_the_planned_length(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 3000))
    chosen = data.draw(st.sets(st.integers(0, length - 1), max_size=200))
    positions = np.array(sorted(chosen), dtype=np.int64)
    encoded = encode_positions(positions, length)
    assert len(encoded) == positions_bytes(len(positions), length)
    assert np.array_equal(
        decoded_positions(memoryview(encoded), len(positions), length, name="pi"), positions
    )
