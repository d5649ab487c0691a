"""A device masks a count of 2^62: the rounds go on, the device is named and left out."""

from __future__ import annotations

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
from headwater.common.secagg.protocol import MaskReply
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


def train(
    folder: Path,
    *,
    clients: int,
    liars: set[str],
    rounds: int = 8,
    resume: bool = False,
    **secure: Any,
) -> tuple[list[RoundRow], FalseCounts]:
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
    fleet = FalseCounts(grid, frozenset(liars))
    rows: list[RoundRow] = []
    run(Training(settings, run_id=RUN), fleet, on_round=rows.append, resume=resume)
    return rows, fleet


@pytest.mark.slow
@pytest.mark.parametrize("ring_bits", [16, 32])
def test_a_count_of_2_to_the_62_costs_one_round_and_names_its_device(
    tmp_path: Path, ring_bits: int
) -> None:
    rows, fleet = train(tmp_path, clients=12, liars={"5"}, ring_bits=ring_bits)
    assert [row.round for row in rows] == list(range(1, 9))
    assert [row.num_aborted for row in rows] == [1, *[0] * 7]
    assert set(rows[-1].left_out) == {"5"}
    assert "SumOutOfRange" in rows[-1].left_out["5"]
    assert rows[-1].num_clients == 11
    assert min(fleet.sizes) >= 3


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
