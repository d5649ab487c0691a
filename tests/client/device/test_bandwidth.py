"""The link's rates: learned from transfers and reported to the server."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.app import app
from headwater.client.device.bandwidth import (
    DOWNLOAD,
    LATEST,
    TIMED_BYTES,
    UPLOAD,
    Bandwidth,
    read_bandwidth,
)
from headwater.client.flower.node import Node
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.messages import DescribeRequest, DeviceReport, Vitals
from headwater.common.settings.sources import load

MIB = 2**20


def test_the_first_transfer_sets_the_rate_and_later_ones_count_half() -> None:
    link = Bandwidth().sent(4 * MIB, 2.0)
    assert link == Bandwidth(upload_bytes_per_second=2 * MIB)
    slower = link.sent(4 * MIB, 8.0)
    assert slower.upload_bytes_per_second == pytest.approx(MIB / (LATEST * 2 + (1 - LATEST) * 0.5))


def test_each_direction_has_its_own_rate() -> None:
    link = Bandwidth().sent(MIB, 1.0).received(MIB, 0.25)
    assert link == Bandwidth(upload_bytes_per_second=MIB, download_bytes_per_second=4 * MIB)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [(TIMED_BYTES - 1, 1.0), (0, 0.0), (MIB, -1.0), (MIB, math.nan), (MIB, math.inf)],
)
def test_a_transfer_that_cannot_be_timed_keeps_the_rate(num_bytes: int, seconds: float) -> None:
    known = Bandwidth(upload_bytes_per_second=3.0, download_bytes_per_second=4.0)
    for link in (Bandwidth(), known):
        assert link.sent(num_bytes, seconds) == link
        assert link.received(num_bytes, seconds) == link


@given(st.lists(st.tuples(st.integers(0, 2**50), st.floats(0, 1e9)), max_size=10))
def test_any_transfers_give_valid_vitals(transfers: list[tuple[int, float]]) -> None:
    link = Bandwidth()
    for num_bytes, seconds in transfers:
        link = link.sent(num_bytes, seconds)
    Vitals(upload_bytes_per_second=link.upload_bytes_per_second)
    assert read_bandwidth(link.as_config()) == link


@pytest.mark.parametrize("absurd", [math.nan, math.inf, -1.0, 0.0, 1e300, "fast", True, 7])
def test_an_invalid_configuration_gives_no_rate(absurd: object) -> None:
    assert read_bandwidth({UPLOAD: absurd, DOWNLOAD: absurd}) == Bandwidth()


def described(node: Node, trainer: Trainer) -> Vitals:
    layout = trainer.image.layout
    request = DescribeRequest(
        run_seed=0,
        wants_speed=False,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
    )
    answer = node.answer(
        message_id="1",
        message_type="query.describe",
        head_json=request.model_dump_json(),
        payload=None,
    )
    assert answer.error is None
    return DeviceReport.model_validate(json.loads(answer.head_json)).vitals


def test_a_node_reports_its_measured_rates(tmp_path: Path) -> None:
    spec = "tests/tasks.py:TwoLayers"
    settings = load(None, {"task": spec, "check_task": False})
    trainer = Trainer(spec, batch_norm=None, check_task=False)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    node = Node(app, trainer, identity, settings, tmp_path)
    node.enter(7)
    before = described(node, trainer)
    assert (before.upload_bytes_per_second, before.download_bytes_per_second) == (None, None)
    node.link = node.link.sent(MIB, 0.5).received(MIB, 0.125)
    after = described(node, trainer)
    assert (after.upload_bytes_per_second, after.download_bytes_per_second) == (2 * MIB, 8 * MIB)
