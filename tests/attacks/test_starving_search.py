"""A lying server's plans are searched for a way to make nine members add hardly anything.

The devices are real. The gradient of an example of part p has ones in row p of the model and zeros
elsewhere, so an opened sum shows how many examples each member added.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from headwater.client.enrolment.signing_identity import make_identity
from headwater.client.secagg.plan_policy import LEAST_TIME
from headwater.common.compression.encoding import coding_of
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import HeadwaterError, RoundAborted
from headwater.common.messages import DescribeRequest, Plan
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.masked_numbers import bounds_of
from headwater.common.settings.schema import SecureSettings
from tests.masked import NodeDevice, opening_of, plan, play, sum_of, train, trainer

PARTS, WIDTH, OWNED = 10, 24, 32
SECONDS = 0.2e-3
"""Of one example: long enough for a lack of time to be no jitter."""
MAX_SHARE = SecureSettings().max_share
LARGEST_SHARE = MAX_SHARE / (MAX_SHARE + LEAST_TIME * (1 - MAX_SHARE))
"""Where the others have as little time as a device accepts."""
Mode = Literal["semi-honest", "active"]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(PARTS, WIDTH))

    def forward(self, parts: Tensor) -> Tensor:
        return self.values[parts]


class Parts:
    """The gradient says whose examples were summed."""

    def new_model(self) -> nn.Module:
        return Rows()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> TensorDataset:
        return TensorDataset(torch.full((OWNED,), part))

    def loss_sum(self, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        (parts,) = batch
        time.sleep(SECONDS * len(parts))
        return model(parts).sum(), len(parts)


TASK = "./tests/attacks/test_starving_search.py:Parts"
VALUES: dict[str, tuple[Any, ...]] = {
    "quota": (1, 8, 12, 16, 32, 1000),
    "micro_batch_size": (1, 4, 16, 32),
    "answer_seconds": (1e-6, 1e-3, 4e-3, 0.01),
    "deadline_seconds": (1e-6, 1e-3, 0.01, 9.0),
    "finish_seconds": (1e-6, 1e-3, 0.01, 9.0),
    "share": (0.01, 1.0),
    "counted_round": (0, 3),
    "weigh_as": (1, 16, 32, 2**40),
    "frozen": ("0" * 64,),
    "reason": ("none",),
    "round": (2,),
    "run_seed": (9,),
    "model_version": (5,),
    "max_tokens": (1,),
    "precision": ("bfloat16",),
    "held_out_fraction": (0.5, 0.99),
    "held_out": ("last",),
    "num_invited": (2, 3, 10**6),
    "local_steps": (2, 16),
    "local_learning_rate": (1e-30, 1.0),
    "own_learning_rate": (1e-30,),
    "max_windows": (5,),
    "compression": (
        CompressionTerms(method="random-k", fraction=0.25, feedback=False),
        CompressionTerms(method="random-k", fraction=0.9),
    ),
    "privacy": (PrivacyTerms(norm_bound=1e-3, noise_multiplier=0.01),),
}


class Lie(NamedTuple):
    """Another value of a field in the plans of some of the members."""

    members: frozenset[int]
    field: str
    value: Any


@st.composite
def lies(draw: st.DrawFn) -> Lie:
    name = draw(st.sampled_from(sorted(VALUES)))
    some = st.frozensets(st.integers(0, PARTS - 1), min_size=1)
    members = draw(st.one_of(st.just(frozenset(range(1, PARTS))), st.just(frozenset({0})), some))
    return Lie(members, name, draw(st.sampled_from(VALUES[name])))


OTHERS = frozenset(range(1, PARTS))


def plan_of(part: int, told: list[Lie]) -> Plan | None:
    """Return the plan of a member; None if it is no plan."""
    fields: dict[str, Any] = {"quota": OWNED, "micro_batch_size": 1, "answer_seconds": 0.02}
    fields |= {lie.field: lie.value for lie in told if part in lie.members}
    try:
        return plan(**fields)
    except ValueError:
        return None


class Cohort:
    """Ten devices, with the keys and the state in a folder; they have told their speed."""

    def __init__(self, folder: Path, mode: Mode) -> None:
        self.mode = mode
        self.devices = []
        for part in range(PARTS):
            secure: dict[str, Any] = {"aggregation": mode}
            if mode == "active":
                secure |= {"identity": folder / f"d{part}", "allow_list": folder / "allow-list"}
            self.devices.append(NodeDevice(part, folder / "state", task=TASK, secure=secure))

    def counts(
        self, plans: Mapping[int, Plan], *, shown: int, weights: Mapping[int, int]
    ) -> NDArray[np.float64] | None:
        """Return what each part has in the sum that the server opens; None if it opens none.

        All members are shown the digest of the plan ``shown``.
        """
        image = bytes(trainer(TASK).image.buffer())
        there = []
        for part, one in plans.items():
            try:
                train(self.devices[part], one, image)
                there.append(self.devices[part])
            except HeadwaterError:
                pass
        if not there or shown not in plans:
            return None
        shared, most = plans[shown], max(one.max_examples for one in plans.values())
        coding = None if shared.of(CompressionTerms) is None else coding_of(shared)
        num_values = PARTS * WIDTH
        setup = opening_of(
            there,
            shared,
            mode=self.mode,
            task=trainer(TASK).task_code,
            model_digest=hashlib.sha256(image).digest(),
            num_values=num_values if coding is None else coding.terms.num_sent(num_values),
            planned_weights={device.name: weights[int(device.name[1:])] for device in there},
            bounds=bounds_of((), largest_weight=most, max_examples=most),
            privacy=shared.of(PrivacyTerms),
        )
        try:
            total = sum_of(play(there, setup).sum)
        except RoundAborted:
            return None
        whole = np.zeros(num_values)
        places = (
            slice(None) if coding is None else coding.positions(num_values).positions(0, len(total))
        )
        whole[places] = total
        counts: NDArray[np.float64] = np.abs(whole).reshape(PARTS, WIDTH).sum(1)
        return counts


@pytest.fixture(scope="module")
def told_speeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of devices that told their speed before they held a server's model."""
    folder = tmp_path_factory.mktemp("devices")
    keys = [folder / f"d{part}" for part in range(PARTS)]
    lines = [make_identity(key, key.name)[0].line for key in keys]
    (folder / "allow-list").write_text("\n".join(lines))
    layout = trainer(TASK).image.layout
    wanted = DescribeRequest(
        run_seed=0,
        wants_speed=True,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
    )
    first, *others = Cohort(folder, "semi-honest").devices
    first.send("query.describe", wanted.model_dump_json())
    for device in others:  # alike machines
        shutil.copy(first.path, device.path)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["semi-honest", "active"])
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    told=st.lists(lies(), max_size=3),
    shown=st.sampled_from([0, 1]),
    says=st.sampled_from(["planned", "most"]),
)
@example(told=[], shown=0, says="planned")
@example(told=[Lie(OTHERS, "answer_seconds", 1e-6)], shown=0, says="planned")
@example(told=[Lie(OTHERS, "quota", 8), Lie(frozenset({0}), "quota", 32)], shown=0, says="planned")
def test_no_member_is_more_of_an_opened_sum_than_max_share(
    mode: Mode, told: list[Lie], shown: int, says: str, told_speeds: Path
) -> None:
    """Up to what a plan's time may be less than a device needs by its own figures.

    A busy machine may starve a session once, a lie does each time: that is looked at three times.
    """
    planned = {part: plan_of(part, told) for part in range(PARTS)}
    plans = {part: one for part, one in planned.items() if one is not None}
    weights = {part: one.weigh_as or one.max_examples for part, one in plans.items()}
    if says == "most":
        weights = dict.fromkeys(weights, max(weights.values(), default=1))
    shares = []
    for _ in range(3):
        with TemporaryDirectory() as folder:
            shutil.copytree(told_speeds, folder, dirs_exist_ok=True)
            counts = Cohort(Path(folder), mode).counts(plans, shown=shown, weights=weights)
        if counts is None:
            assert told, "the honest session was not opened"
            event("refused")
            return
        if not counts.any():  # a rate that moves no member's model is of all, or in no session
            event("opened, and nothing in it")
            return
        shares.append(counts.max() / counts.sum())
        if shares[-1] <= LARGEST_SHARE:
            event("opened")
            return
    raise AssertionError(f"a member is {shares} of the sum")
