"""Models as differences: both sides hold the same bits, and what is lost comes with the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.common.compression.model_difference import (
    DifferenceReader,
    checked_method,
    move_towards,
    movement,
    movement_from_zero,
)
from headwater.common.compression.terms import DifferenceMethod, planned_difference_bytes
from headwater.common.errors import CorruptUpdate, ProtocolMismatch
from headwater.common.model.vectors import CHUNK

LENGTH = CHUNK + 1030
METHODS: tuple[DifferenceMethod, ...] = ("bfloat16", "int8", "int4", "int2", "int1")
# The part of a difference that its rounding may lose, of the largest in its block: int8 has steps
# of at most 2/15 of it, and loses half a step.
LOST: dict[DifferenceMethod, float] = {"bfloat16": 2.0**-8, "int8": 1 / 15}
# Of its norm, if its coordinates are normal numbers or what was lost of such.
LOST_OF_NORM: dict[DifferenceMethod, float] = {"int4": 0.6, "int2": 0.7, "int1": 0.8}


def vector(seed: int) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(seed))


def moved(base_P: Tensor, target_P: Tensor, method: DifferenceMethod) -> bytearray:
    data = move_towards(base_P, target_P, method)
    assert data is not None
    return data


def reader_of(values_P: Tensor, method: DifferenceMethod) -> DifferenceReader:
    return DifferenceReader(values_P.numpy().data.cast("B"), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", [1000, CHUNK, 10**7])
def test_a_device_holds_the_servers_bits_in_whatever_parts_a_difference_arrives(
    method: DifferenceMethod, part: int
) -> None:
    server_P = vector(0)
    move_towards(server_P, server_P.clone(), method)
    device_P = server_P.clone()
    data = moved(server_P, vector(1), method)
    assert checked_method(method, len(data), LENGTH) == method
    reader = reader_of(device_P, method)
    for start in range(0, len(data), part):
        assert not reader.is_complete
        reader.add(data[start : start + part])
    assert reader.is_complete
    assert torch.equal(device_P, server_P)


@pytest.mark.parametrize("method", LOST)
def test_what_a_difference_loses_comes_with_the_next(method: DifferenceMethod) -> None:
    base_P, target_P = vector(0), vector(1)
    for _ in range(4):
        before = (target_P - base_P).abs().max()
        move_towards(base_P, target_P, method)
        # A part of what was missing, and the rounding of float32 in both subtractions.
        assert (target_P - base_P).abs().max() <= LOST[method] * before + 2.0**-20


@pytest.mark.parametrize("method", LOST_OF_NORM)
def test_what_few_bits_lose_comes_with_the_next(method: DifferenceMethod) -> None:
    base_P, target_P = vector(0), vector(1)
    for _ in range(4):
        before = (target_P - base_P).norm()
        move_towards(base_P, target_P, method)
        assert (target_P - base_P).norm() <= LOST_OF_NORM[method] * before


def test_a_device_that_missed_rounds_gets_their_sum_and_the_same_bits() -> None:
    values_P = torch.zeros(LENGTH)
    moved(values_P, vector(0), "int8")
    away_P = values_P.clone()
    differences = []
    for number in range(1, 5):
        target_P = values_P + 0.01 * vector(number)
        differences.append(moved(values_P, target_P, "int8"))
    total = movement(differences, LENGTH)
    assert total is not None
    reader_of(away_P, "int8").add(total)
    assert torch.equal(away_P, values_P)
    # Four independent movements are about twice as large as one: a bit more of eight.
    assert len(total) < 1.01 * planned_difference_bytes("int8", LENGTH)
    assert len(total) < 0.4 * sum(map(len, differences))


@pytest.mark.parametrize("method", ["bfloat16", "int4", "int2", "int1"])
def test_differences_in_turn_lead_to_the_same_bits(method: DifferenceMethod) -> None:
    values_P = vector(0)
    away_P, data = values_P.clone(), bytearray()
    for number in range(1, 4):
        data += moved(values_P, vector(number), method)
    reader = reader_of(away_P, method)
    for start in range(0, len(data), 100_003):
        reader.add(data[start : start + 100_003])
    assert reader.is_complete
    assert torch.equal(away_P, values_P)


def test_a_device_that_holds_nothing_gets_the_difference_to_zero() -> None:
    values_P = torch.zeros(LENGTH)
    moved(values_P, vector(0), "int8")
    moved(values_P, values_P + 0.01 * vector(1), "int8")
    data = movement_from_zero(values_P)
    assert data is not None
    assert len(data) < 2 * LENGTH
    device_P = torch.zeros(LENGTH)
    reader_of(device_P, "int8").add(data)
    assert torch.equal(device_P, values_P)


def test_no_sum_gives_a_negative_zero_so_its_model_is_sent_whole() -> None:
    assert movement_from_zero(torch.tensor([1.0, -0.0])) is None
    values_P = torch.tensor([1.0, 1.0])
    moved(values_P, torch.tensor([2.0, -1e-9]), "int8")
    assert movement_from_zero(values_P) is not None


def test_a_difference_that_is_too_long_is_refused() -> None:
    base_P = vector(0)[:10]
    device_P = base_P.clone()
    reader = reader_of(device_P, "int8")
    reader.add(moved(base_P, vector(1)[:10], "int8"))
    with pytest.raises(CorruptUpdate, match="1 bytes too long"):
        reader.add(b"\0")


@pytest.mark.parametrize(
    ("method", "num_bytes", "text"),
    [
        ("float8", 10, "sent a model in 'float8'"),
        ("bfloat16", 19, "has 19 bytes, expected at most 40, in differences of 20 each"),
        ("int4", 0, "has 0 bytes, expected at most 40, in differences of 9 each"),
        ("int2", 6, "has 6 bytes, expected at most 40, in differences of 7 each"),
        ("int1", 42, "has 42 bytes, expected at most 40, in differences of 6 each"),
        ("int8", 41, "has 41 bytes, expected at most 40"),
    ],
)
def test_a_difference_of_another_length_or_method_is_refused(
    method: str, num_bytes: int, text: str
) -> None:
    with pytest.raises(ProtocolMismatch, match=text):
        checked_method(method, num_bytes, 10)
