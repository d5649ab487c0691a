"""Features of a device's own that a server could turn against it: a state, a test, a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headwater
from headwater.client.enrolment.signing_identity import make_identity
from headwater.common.errors import FeatureMissing, MaskingTooWeak, SettingsError
from headwater.common.own_feature.found import own_features
from headwater.common.settings.training import FeatureSettings
from tests.client.secagg.cohort import describe
from tests.masked import NodeDevice, plan, train, trainer
from tests.python_tasks import Signs

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

SCAFFOLD = "examples/extensions/scaffold.py:Scaffold"
GUARD = """
import headwater

class Guard:
    class Terms(headwater.Terms):
        pass

    class Device(headwater.DeviceFeature):
        is_required = True
"""


def test_a_state_that_only_one_member_would_bring_is_refused_under_active_masks(
    tmp_path: Path,
) -> None:
    """With models without a gradient the sum would be what one device kept of earlier rounds."""
    key, allow_list = tmp_path / "d0", tmp_path / "allow-list"
    allow_list.write_text(make_identity(key, "d0")[0].line)
    secure = {"aggregation": "active", "identity": key, "allow_list": allow_list}
    device = NodeDevice(0, tmp_path, secure=secure, feature={"name": SCAFFOLD})
    device.send("query.describe", describe())
    (own,) = own_features(FeatureSettings(name=SCAFFOLD))
    kind: Any = own.terms
    terms = kind(variate=torch.zeros(trainer().image.layout.num_parameters))
    given: dict[str, Any] = {
        "local_steps": 1,
        "local_learning_rate": 1.0,
        "local": {},
        "answer_seconds": 0.1,
    }
    with pytest.raises(MaskingTooWeak, match="the feature scaffold keeps a state"):
        train(device, plan(**given).asking(terms))


def test_a_run_with_such_a_feature_does_not_begin() -> None:
    with pytest.raises(SettingsError, match="a state on each device, and devices refuse that"):
        headwater.simulate(
            Signs,
            clients=3,
            rounds=1,
            local_steps=2,
            feature=SCAFFOLD,
            secure_aggregation="active",
            progress=False,
        )


def test_a_device_that_requires_a_feature_tests_no_model_without_it(tmp_path: Path) -> None:
    (tmp_path / "guard.py").write_text(GUARD)
    device = NodeDevice(0, tmp_path, feature={"name": f"{tmp_path}/guard.py:Guard"})
    asked = plan(is_masked=False, held_out_fraction=0.5)
    with pytest.raises(FeatureMissing, match="the device tests no model"):
        device.send("evaluate", asked.model_dump_json(), memoryview(trainer().image.buffer()))
