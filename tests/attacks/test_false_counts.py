"""A device masks a false number or vector: the rounds go on, it is named and left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.client.app import client_app
from headwater.common.errors import SumOutOfRange
from headwater.common.messages import WireMessage
from headwater.common.phases import Phase
from headwater.common.secagg.masked_numbers import SQUARED_NORM
from headwater.common.secagg.protocol import MaskReply, Roster
from headwater.common.settings.schema import Settings
from headwater.server.fleet import Dropout, Reply
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

RUN = 2**61 + 7
HUGE = 2**62


class FalseCounts(GridFleet):
    """Simulated devices; the liars add 2^62 to their masked weight."""

    def __init__(self, grid: InProcessGrid, liars: frozenset[str]) -> None:
        super().__init__(grid)
        self._liars = liars
        self.sizes: list[int] = []
        """How many devices each session asked to mask."""

    def converse(
        self, phase: Phase, requests: Mapping[str, WireMessage], **rest: Any
    ) -> Iterator[Reply | Dropout]:
        if phase.action == "masked_update":
            self.sizes.append(len(requests))
        for reply in super().converse(phase, requests, **rest):
            is_lie = isinstance(reply, Reply) and reply.name in self._liars
            if is_lie and isinstance(reply, Reply) and isinstance(reply.message, MaskReply):
                elements = np.frombuffer(reply.message.scalars, "<u8").copy()
                elements[:1] += np.uint64(HUGE)  # the weight
                lie = reply.message.model_copy(update={"scalars": elements.tobytes()})
                reply = replace(reply, message=lie)
            yield reply


class FalseVectors(GridFleet):
    """The liars add the largest value that the ring has room for to each coordinate.

    If they begin after the first round, they also mask the squared norm of such a vector.
    """

    def __init__(self, grid: InProcessGrid, liars: frozenset[str], first: int) -> None:
        super().__init__(grid)
        self._liars, self._first = liars, first

    def converse(
        self, phase: Phase, requests: Mapping[str, WireMessage], **rest: Any
    ) -> Iterator[Reply | Dropout]:
        for request in requests.values():
            if isinstance(request, Roster):
                self._roster = request
        for reply in super().converse(phase, requests, **rest):
            is_mask = isinstance(reply, Reply) and isinstance(reply.message, MaskReply)
            if is_mask and isinstance(reply, Reply) and reply.name in self._liars:
                reply = self._lie(reply) if self._roster.parameters.round >= self._first else reply
            yield reply

    def _lie(self, reply: Reply) -> Reply:
        parameters = self._roster.parameters
        encoding = parameters.encoding
        weight = next(m.planned_weight for m in self._roster.members if m.name == reply.name)
        values = np.frombuffer(reply.vector or b"", f"<u{encoding.ring_bits // 8}").copy()
        values += values.dtype.type(encoding.bound(weight))
        scalars = np.frombuffer(reply.message.scalars, "<u8").copy()
        if self._first > 1:
            each = math.ldexp(encoding.bound(weight), -encoding.scale_bits)
            for place, scalar in enumerate(parameters.scalars):
                if scalar.name.endswith(SQUARED_NORM):
                    told = min(len(values) * each**2, scalar.bound)
                    false = int(scalars[place]) + int(math.ldexp(told, scalar.scale_bits))
                    scalars[place] = np.uint64(false % 2**64)
        message = reply.message.model_copy(update={"scalars": scalars.tobytes()})
        return replace(reply, message=message, vector=values.tobytes())


def train(
    folder: Path,
    *,
    clients: int,
    liars: set[str],
    rounds: int = 8,
    resume: bool = False,
    vectors_from: int | None = None,
    **secure: Any,
) -> tuple[list[RoundRow], Any]:
    settings = Settings.model_validate(
        {
            "task": "tests/tasks.py:TwoLayers",
            "rounds": rounds,
            "out": folder,
            "threads": 1,
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            "secure": {"aggregation": "semi-honest", **secure},
            "simulation": {"clients": clients},
        }
    )
    grid = InProcessGrid(client_app(virtual_hardware), settings)
    grid.enter_run(RUN)
    fleet: GridFleet = FalseCounts(grid, frozenset(liars))
    if vectors_from is not None:
        fleet = FalseVectors(grid, frozenset(liars), vectors_from)
    rows: list[RoundRow] = []
    run(Training(settings, run_id=RUN), fleet, on_round=rows.append, resume=resume)
    return rows, fleet


@pytest.mark.slow
def test_a_count_of_2_to_the_62_costs_one_round_and_names_its_device(tmp_path: Path) -> None:
    rows, fleet = train(tmp_path, clients=12, liars={"5"}, ring_bits=16)
    assert [row.round for row in rows] == list(range(1, 9))
    assert [row.num_aborted for row in rows] == [1, *[0] * 7]
    assert set(rows[-1].left_out) == {"5"}
    assert "SumOutOfRange" in rows[-1].left_out["5"]
    assert rows[-1].num_clients == 11
    assert min(fleet.sizes) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("first", "ring_bits"), [(1, 16), (5, 32)])
def test_a_vector_of_the_ring_s_largest_values_moves_no_model_and_names_its_device(
    tmp_path: Path, first: int, ring_bits: int
) -> None:
    """At first its norm does not fit the vector; later it fits, but not the sums before it."""
    rows, _ = train(
        tmp_path, clients=5, liars={"2"}, rounds=30, vectors_from=first, ring_bits=ring_bits
    )
    assert len(rows) == 30
    assert any("SumOutOfRange" in row.left_out.get("2", "") for row in rows)
    assert not set().union(*(row.left_out for row in rows)) - {"2"}
    assert rows[-1].loss < rows[0].loss


@pytest.mark.slow
def test_the_search_goes_on_after_the_server_was_restarted(tmp_path: Path) -> None:
    first, _ = train(tmp_path, clients=12, liars={"5"}, rounds=2)
    assert not first[-1].left_out
    rows, fleet = train(tmp_path, clients=12, liars={"5"}, resume=True)
    assert [row.num_aborted for row in rows] == [0] * 6
    assert max(fleet.sizes[:2]) < 12  # it begins with groups
    assert set(rows[-1].left_out) == {"5"}


@pytest.mark.slow
def test_three_lying_devices_of_fifteen_are_named_and_no_honest_one(tmp_path: Path) -> None:
    liars = {"1", "6", "11"}
    rows, fleet = train(tmp_path, clients=15, liars=liars, rounds=14)
    assert len(rows) == 14
    assert set(rows[-1].left_out) <= liars, "no honest device"
    named = {name for row in rows for name in row.left_out}
    assert named == liars
    assert min(fleet.sizes) >= 3


@pytest.mark.slow
def test_one_lying_device_of_four_is_named(tmp_path: Path) -> None:
    rows, fleet = train(tmp_path, clients=4, liars={"2"})
    assert len(rows) == 8
    assert set(rows[-1].left_out) == {"2"}
    assert min(fleet.sizes) >= 3


@pytest.mark.slow
def test_of_three_devices_none_can_be_named_and_the_run_ends_with_the_reason(
    tmp_path: Path,
) -> None:
    with pytest.raises(SumOutOfRange) as ended:
        train(tmp_path, clients=3, liars={"2"})
    assert "secure.min_members" in str(ended.value.remedy)
