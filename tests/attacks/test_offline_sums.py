"""A server that asks for a sum of the time before the device's owner set masks or a budget."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import MaskingRequired, PrivacyRequired
from headwater.common.privacy.terms import PrivacyTerms
from tests.masked import NodeDevice, model, plan

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

OFFLINE: dict[str, Any] = {"offline_windows": 5}
PLAIN: dict[str, Any] = {"is_masked": False, "max_windows": 5}


def keep_windows(folder: Path, number: int, **changes: Any) -> int:
    """Sum windows of a plain plan without a link; return how many there are."""
    device = NodeDevice(0, folder, asynchronous=OFFLINE)
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
    device = NodeDevice(0, tmp_path, asynchronous=OFFLINE, **settings)
    with pytest.raises(refusal):
        device.send("train", plan(2, **PLAIN).model_dump_json(), memoryview(model()))


def test_no_window_is_added_to_a_private_update(tmp_path: Path) -> None:
    terms = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)
    assert keep_windows(tmp_path, 3, privacy=terms) == 1
