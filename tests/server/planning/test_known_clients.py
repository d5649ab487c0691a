"""What a run learns of its clients is the same from reports in columns and from single ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.common.errors import LateUpdate
from headwater.common.messages import Step, UpdateReport, Vitals
from headwater.common.stats.linear_fit import Line
from headwater.server.planning.device_estimates import DeviceEstimate
from headwater.server.planning.known_clients import KnownClients, ToldBlock
from tests.server.rounds.test_open_round import Reports

VITALS = Vitals(memory_limit_bytes=10**9)
NAMES = "abcd"


def report(name: str, seconds: float, vitals: Vitals) -> UpdateReport:
    steps = tuple(
        Step(num_examples=size, weight=size, loss=0.0, seconds=seconds * size, peak_bytes=0)
        for size in (4, 4, 2)
    )
    return UpdateReport(
        name=name, round=1, num_examples=10, weight=10, loss_sum=0.0, metric_sums={},
        micro_batch_size=4, num_refused=0, seconds=1.0, steps=steps, reason="quota", vitals=vitals,
    )  # fmt: skip


@pytest.mark.parametrize("is_k_set", [False, True])
@given(
    paces=st.lists(st.sampled_from([0.5, 0.5, 0.6]), min_size=4, max_size=4),
    others=st.sets(st.sampled_from(NAMES)),
    late=st.sets(st.sampled_from(NAMES)),
    unknown=st.sets(st.sampled_from(NAMES)),
    refused=st.sets(st.sampled_from(NAMES)),
)
def test_reports_in_columns_teach_what_single_ones_do(
    is_k_set: bool, paces: list[float], others: set[str], **known: set[str]
) -> None:
    changed = VITALS.model_copy(update={"memory_limit_bytes": 10**8})
    reports = [
        report(name, pace, changed if name in others else VITALS)
        for name, pace in zip(NAMES, paces, strict=True)
    ]
    one, other = (KnownClients(is_k_set=is_k_set, is_by_data=False) for _ in range(2))
    for clients in (one, other):
        for name in NAMES:
            estimate = DeviceEstimate(
                num_examples=50,
                line=None if is_k_set or name in known["unknown"] else Line(base=0.0, each=0.5),
                vitals=VITALS,
                is_outdated=False,
            )
            was_late = name in known["late"]
            clients.estimates[name] = estimate.after_late_update() if was_late else estimate
    told: dict[str, Any] = {
        "exceptions": (),
        "accepted": {one.name: one for one in reports},
        "ready": {},
        "refused": {name: LateUpdate(f"{name} was late") for name in known["refused"]},
    }
    one.learn(NAMES, **told)
    block = Reports(*reports)
    other.learn(
        NAMES, **told, blocks=[ToldBlock(NAMES, [one.vitals for one in reports], *block.timing)]
    )
    assert one.estimates == other.estimates
