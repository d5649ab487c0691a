"""A server that asks for a sum of the time before the device's owner set masks or a budget."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.client.flower.state_file import OFFLINE
from headwater.common.errors import MaskingRequired, PrivacyRequired, UnexpectedUpdate
from headwater.common.privacy.terms import PrivacyTerms
from tests.masked import FlowerDevice, NodeDevice, model, plan

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

WINDOWS: dict[str, Any] = {"offline_windows": 5}
PLAIN: dict[str, Any] = {"is_masked": False, "max_windows": 5}


def keep_windows(folder: Path, number: int, **changes: Any) -> int:
    """Sum windows of a plain plan without a link; return how many there are."""
    device = NodeDevice(0, folder, asynchronous=WINDOWS)
    head = plan(1, **PLAIN, **changes).model_dump_json()
    answer = device.answer("train", head, memoryview(model()))
    further = device.node.no_link(head, answer)
    assert further is not None
    reports = [json.loads(kept.head_json) for kept in itertools.islice(further, number)]
    return max(int(report.get("num_windows", 1)) for report in reports)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"secure": {"aggregation": "semi-honest"}}, MaskingRequired),
        ({"privacy": {"budget": 8.0}}, PrivacyRequired),
    ],
)
def test_a_sum_is_not_delivered_once_the_owner_requires_masks_or_noise(
    tmp_path: Path, settings: dict[str, Any], refusal: type[Exception]
) -> None:
    assert keep_windows(tmp_path, 3) == 3
    device = NodeDevice(0, tmp_path, asynchronous=WINDOWS, **settings)
    with pytest.raises(refusal):
        device.send("train", plan(2, **PLAIN).model_dump_json(), memoryview(model()))


def test_no_window_is_added_to_a_private_update(tmp_path: Path) -> None:
    terms = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)
    assert keep_windows(tmp_path, 3, privacy=terms) == 1


def test_a_server_app_asks_no_supernode_for_windows_without_a_link(tmp_path: Path) -> None:
    """It wrote into the state folder of a resident client on the same machine."""
    device = FlowerDevice(0, tmp_path)
    parts = {"plan": plan(1, **PLAIN).model_dump_json(), "report": "{}"}
    with pytest.raises(UnexpectedUpdate, match="only the device itself"):
        device.send(f"query.{OFFLINE}", json.dumps(parts), bytes(model()))
    assert not list(tmp_path.glob("*.offline"))


@pytest.mark.parametrize(
    "settings", [{"secure": {"aggregation": "semi-honest"}}, {"privacy": {"budget": 8.0}}]
)
def test_a_device_adds_no_window_in_clear_where_its_owner_requires_masks_or_noise(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The update before it is of the time when the owner did not."""
    plain = NodeDevice(0, tmp_path, asynchronous=WINDOWS)
    head = plan(1, **PLAIN).model_dump_json()
    answer = plain.answer("train", head, memoryview(model()))
    device = NodeDevice(0, tmp_path, asynchronous=WINDOWS, **settings)
    kept = list(device.node.no_link(head, answer) or ())
    assert all(json.loads(one.head_json)["num_windows"] == 1 for one in kept)
    assert not list(tmp_path.glob("*.offline"))
