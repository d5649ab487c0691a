"""Plans of which two are out at a time, with what would keep a state that is pending once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.common.overlap.terms import OverlapTerms
from headwater.common.privacy.terms import PrivacyTerms
from tests.client.transport.test_exchange import Device
from tests.plans import plan_of

REFUSED: dict[str, dict[str, Any]] = {
    "masks": {"is_masked": True},
    "noise": {"privacy": PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)},
    "windows without a link": {"max_windows": 3},
    "a state of the local optimizer": {
        "local_steps": 2,
        "local_learning_rate": 0.1,
        "local": {"keeps_state": True},
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_device_refuses_by_name_what_a_server_may_not_ask_in_the_overlap(
    case: str, tmp_path: Path
) -> None:
    device = Device(tmp_path)
    plan = plan_of(
        round=1, run_seed=0, model_version=0, quota=4, micro_batch_size=2, **REFUSED[case]
    ).asking(OverlapTerms())
    answer = device.node.answer(
        message_id="1",
        message_type="train",
        head_json=plan.model_dump_json(exclude_none=True),
        payload=memoryview(device.model),
    )
    assert answer.error is not None
    assert answer.error.code == "SettingsError"
    assert "--overlap" in str(answer.error)
    assert not answer.vector
