"""Encodings: what is read is what was sent, part by part, and what is left out stays behind."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.common.compression.encoding import Coding
from headwater.common.compression.terms import BLOCK, SPAN, CompressionTerms, Method
from headwater.common.errors import CorruptUpdate, HeadwaterError, NonFiniteUpdate
from headwater.common.model.vectors import CHUNK
from headwater.common.sums.encoded_vector import EncodedVector

METHODS: tuple[Method, ...] = ("bfloat16", "int8", "int4", "int2", "int1", "top-k", "random-k")
LENGTHS = (1, 2, BLOCK - 1, BLOCK + 1, CHUNK + SPAN + 3)
EPS = 2.0**-23


def vector(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator) * torch.logspace(-6, 3, length)


def coding(terms: CompressionTerms, number: int = 2) -> Coding:
    return Coding(terms=terms, run_seed=1, round=number)


def sent_and_left(values_P: Tensor, terms: CompressionTerms) -> tuple[bytearray, Tensor]:
    left_P = values_P.clone()
    return coding(terms).encode(left_P, "pi"), left_P


def encoded(data: bytes | bytearray, terms: CompressionTerms, length: int) -> EncodedVector:
    return coding(terms).read(data, "pi", length)


def read(data: bytes | bytearray, terms: CompressionTerms, length: int) -> Tensor:
    return encoded(data, terms, length).tensor()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_sent_and_what_is_left_add_up_to_the_vector(method: Method, length: int) -> None:
    values_P, terms = vector(length), CompressionTerms(method=method, fraction=0.03)
    data, left_P = sent_and_left(values_P, terms)
    difference = (read(data, terms, length).double() + left_P.double() - values_P.double()).abs()
    # Integers round what is left: once, and its product with the scale once.
    rounds = method.startswith("int")
    assert difference.max() <= (2 * EPS * values_P.abs().max() if rounds else 0.0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", METHODS)
def test_an_encoding_has_the_bytes_that_its_terms_say(method: Method, length: int) -> None:
    terms = CompressionTerms(method=method, fraction=0.03)
    data, _ = sent_and_left(vector(length), terms)
    assert len(data) == terms.num_bytes(length)


@pytest.mark.parametrize("method", METHODS)
def test_a_part_is_decoded_as_the_whole_is(method: Method) -> None:
    length, terms = LENGTHS[-1], CompressionTerms(method=method, fraction=0.03)
    data, _ = sent_and_left(vector(length), terms)
    vector_P = encoded(data, terms, length)
    whole = vector_P.tensor().numpy()
    cuts = (0, 1, BLOCK, SPAN - 1, SPAN + 5, CHUNK, CHUNK + 1, length)
    parts = [vector_P[low:high] for low, high in pairwise(cuts)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert vector_P.squared_norm() == pytest.approx(float((whole.astype(float) ** 2).sum()))


def test_a_step_of_int8_is_a_127th_of_the_blocks_largest_coordinate() -> None:
    values_P, terms = vector(5 * BLOCK), CompressionTerms(method="int8")
    _, left_P = sent_and_left(values_P, terms)
    largest = values_P.view(5, BLOCK).abs().amax(1)
    assert (left_P.view(5, BLOCK).abs().amax(1) <= largest / 127 * (1 + 2 * 127 * EPS)).all()


def test_the_rounding_of_int8_has_no_bias() -> None:
    """A third of a step, 40,000 times: the mean lies within five standard deviations."""
    number, third = 40 * BLOCK, 1 / 3
    values_P = torch.full((number,), third / 127)
    values_P[::BLOCK] = 1.0
    terms = CompressionTerms(method="int8")
    data, _ = sent_and_left(values_P, terms)
    steps = read(data, terms, number)[values_P < 1] * 127
    assert abs(steps.mean() - third) < 5 * (third * (1 - third) / len(steps)) ** 0.5


def test_top_k_sends_the_largest_coordinates_and_the_first_of_equal_ones() -> None:
    values_P = torch.tensor([1.0, -5.0, 2.0, 2.0, -2.0, 0.0])
    terms = CompressionTerms(method="top-k", fraction=0.5)
    data, left_P = sent_and_left(values_P, terms)
    assert read(data, terms, 6).tolist() == [0.0, -5.0, 2.0, 2.0, 0.0, 0.0]
    assert left_P.tolist() == [1.0, 0.0, 0.0, 0.0, -2.0, 0.0]


def test_top_k_finds_the_largest_of_many_as_sorting_does() -> None:
    length = LENGTHS[-1]
    values_P, terms = vector(length), CompressionTerms(method="top-k", fraction=0.01)
    data, _ = sent_and_left(values_P, terms)
    expected = torch.zeros(length, dtype=torch.bool)
    expected[values_P.abs().topk(terms.num_sent(length)).indices] = True
    assert torch.equal(read(data, terms, length) != 0, expected)


def test_random_k_sends_each_coordinate_about_equally_often_over_the_rounds() -> None:
    length, rounds = 40, 400
    terms = CompressionTerms(method="random-k", fraction=0.25)
    times = torch.zeros(length)
    for number in range(rounds):
        left_P = torch.ones(length)
        coding(terms, number).encode(left_P, "pi")
        times += left_P == 0
    assert times.sum() == rounds * terms.num_sent(length)
    spread = (rounds * 0.25 * 0.75) ** 0.5
    assert (times - rounds * 0.25).abs().max() < 5 * spread


def test_devices_send_the_same_random_coordinates_in_a_round() -> None:
    terms = CompressionTerms(method="random-k", fraction=0.1)
    left = [torch.ones(500), torch.ones(500)]
    for name, left_P in zip(("pi", "mini"), left, strict=True):
        coding(terms).encode(left_P, name)
    assert torch.equal(*left)


def test_the_number_sent_does_not_depend_on_the_binary_fraction() -> None:
    assert CompressionTerms(method="top-k", fraction=0.07).num_sent(100) == 7


def hostile(method: Method, change: str) -> bytearray:
    """Return a valid encoding of 2,000 coordinates with one change."""
    data, _ = sent_and_left(vector(2000), CompressionTerms(method=method, fraction=0.01))
    scales, positions = np.frombuffer(data, "<f4", 1), np.frombuffer(data, "<u2")[2:22]
    match change:
        case "one byte more":
            return data + b"\0"
        case "one byte less":
            return data[:-1]
        case "empty":
            return bytearray()
        case "NaN scale":
            scales[0] = np.nan
        case "infinite scale":
            scales[0] = np.inf
        case "negative scale":
            scales[0] = -1.0
        case "scale that overflows":
            scales[0] = 1e38
        case "wrong count":
            np.frombuffer(data, "<u4", 1)[0] = 21
        case "position out of range":
            positions[-1] = 2000
        case "position twice":
            positions[1] = positions[0]
        case "positions out of order":
            positions[[0, 1]] = positions[[1, 0]]
    return data


@pytest.mark.parametrize(
    ("method", "change", "error"),
    [
        *[
            (method, change, CorruptUpdate)
            for method in METHODS
            for change in ("one byte more", "one byte less", "empty")
        ],
        ("int8", "NaN scale", NonFiniteUpdate),
        ("int8", "infinite scale", NonFiniteUpdate),
        ("int8", "negative scale", CorruptUpdate),
        ("int8", "scale that overflows", CorruptUpdate),
        *[
            (method, change, error)
            for method in ("int4", "int2", "int1")
            for change, error in (
                ("NaN scale", NonFiniteUpdate),
                ("infinite scale", NonFiniteUpdate),
                ("scale that overflows", CorruptUpdate),
            )
        ],
        ("int1", "negative scale", CorruptUpdate),
        ("top-k", "wrong count", CorruptUpdate),
        ("top-k", "position out of range", CorruptUpdate),
        ("top-k", "position twice", CorruptUpdate),
        ("top-k", "positions out of order", CorruptUpdate),
    ],
)
def test_a_hostile_encoding_is_refused_by_name(
    method: Method, change: str, error: type[HeadwaterError]
) -> None:
    terms = CompressionTerms(method=method, fraction=0.01)
    with pytest.raises(error, match="pi: "):
        read(hostile(method, change), terms, 2000)


@pytest.mark.parametrize("method", METHODS)
def test_a_part_that_ends_before_it_begins_is_empty(method: Method) -> None:
    """As of a list, whose slices never fail."""
    terms = CompressionTerms(method=method, fraction=0.5)
    data, _ = sent_and_left(vector(10), terms)
    parts = [encoded(data, terms, 10)[part] for part in (slice(3, 2), slice(10, 20), slice(20, 3))]
    assert [len(part) for part in parts] == [0, 0, 0]
