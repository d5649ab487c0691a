"""Parameters that stay on the device: cut windows, algorithms, faults, and the refusal by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headwater.client.algorithms.trial import try_algorithm
from headwater.client.device.hardware import ThisMachine
from headwater.client.flower.state_file import local_file
from headwater.client.local_training.local_work import LocalWork
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState
from headwater.client.training.spool import Spool
from headwater.common.errors import LocalParametersMismatch, ModelMismatch, NonFiniteUpdate
from headwater.common.messages import DescribeRequest, Update
from headwater.common.model.local_state import LocalStore
from headwater.common.model.parameters import build_model
from tests.plans import plan_of
from tests.tasks import TwoLayers

PI = Identity(name="pi", data=None, part=0, num_parts=1)


def trainer(patterns: str | None = "1.*") -> Trainer:
    return Trainer(
        "tests/tasks.py:TwoLayers",
        batch_norm=None,
        check_task=False,
        local_parameters=patterns,
    )


def done(home: Trainer, store: LocalStore, **more: Any) -> Update:
    fields = {"round": 1, "run_seed": 3, "model_version": 0, "quota": 12, "micro_batch_size": 4}
    plan = plan_of(**{**fields, "own_learning_rate": 2.0**-6, **more.pop("plan", {})})
    return home.train(PI, ThisMachine(), plan, SamplerState(), store=store, **more)[0]


def pending(home: Trainer, store: LocalStore) -> Tensor:
    state = store.read(home.image.layout)
    assert state is not None
    assert state.pending_L is not None
    return state.pending_L


def test_a_window_cut_by_a_power_failure_goes_on_with_the_local_gradient(tmp_path: Path) -> None:
    whole, cut = local_file(tmp_path / "whole"), local_file(tmp_path / "cut")
    home = trainer()
    expected = done(home, whole).values_P.clone()

    def spool() -> Spool:
        return Spool(tmp_path, name="pi", run_id=1, every_seconds=0.0, max_share=1e9)

    broken, num_seen = trainer(), 0
    plain = broken.task.loss_sum

    def power_failure(model: Any, batch: Any) -> Any:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 3:
            raise KeyboardInterrupt
        return plain(model, batch)

    broken.task.loss_sum = power_failure  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        done(broken, cut, spool=spool())
    assert spool().path.exists()
    assert not (tmp_path / "cut").exists()
    again = trainer()
    assert torch.equal(done(again, cut, spool=spool()).values_P, expected)
    assert torch.equal(pending(again, cut), pending(home, whole))


class Twice:
    """Sends twice the sum; the device's own parameters step as ever."""

    def train(self, work: LocalWork) -> Tensor:
        return 2 * work.sum()


def test_a_client_algorithm_leaves_the_local_step_as_it_is(tmp_path: Path) -> None:
    plain, doubled = local_file(tmp_path / "a"), local_file(tmp_path / "b")
    home = trainer()
    once = done(home, plain).values_P.clone()
    assert torch.equal(done(home, doubled, algorithm=Twice()).values_P, 2 * once)
    assert torch.equal(pending(home, doubled), pending(home, plain))


def test_the_trial_of_an_algorithm_begins_each_time_with_the_same_local_parameters() -> None:
    home = trainer()
    before = home.image.local_L.clone()
    try_algorithm(Twice(), home.context(home.examples(PI), "pi", ThisMachine()))
    assert torch.equal(home.image.local_L, before)


def test_local_parameters_that_diverge_refuse_the_update_and_stay_as_they_were(
    tmp_path: Path,
) -> None:
    store, home = local_file(tmp_path / "own"), trainer()
    with pytest.raises(NonFiniteUpdate, match="stay on the device diverged"):
        done(home, store, plan={"own_learning_rate": 3e38})
    state = store.read(home.image.layout)
    assert state is not None
    for counted in (None, 1):  # masked, the round may count with weight 0
        assert torch.equal(state.settle(counted).values_L, home.image.local_L)
    assert bool(home.image.local_L.isfinite().all())


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("1.*", None, "stay no parameters in the server's model, and 1.weight, 1.bias in this"),
        (None, "1.*", "stay 1.weight, 1.bias in the server's model, and no parameters in this"),
        ("1.*", "0.bias", "stay 0.bias in the server's model, and 1.weight, 1.bias in this"),
    ],
)
def test_a_device_with_other_patterns_is_refused_and_both_are_named(
    ours: str | None, theirs: str | None, said: str
) -> None:
    with pytest.raises(LocalParametersMismatch) as caught:
        trainer(ours).describe(PI, ThisMachine(), request_of(theirs))
    assert f"on a device {said}" in caught.value.message
    assert "the same --local-parameters" in caught.value.remedy


def test_other_words_for_the_same_parameters_agree_and_another_model_is_named() -> None:
    home = trainer("1.weight,1.bias")
    request = request_of("1.*")
    assert home.describe(PI, ThisMachine(), request).layout_digest == request.layout_digest
    other = request.layout.replace("[2,3]", "[7,3]")
    with pytest.raises(ModelMismatch, match=r"0.weight has shape \(7, 3\) in the server's model"):
        home.describe(
            PI, ThisMachine(), request.model_copy(update={"layout_digest": "", "layout": other})
        )


def request_of(patterns: str | None) -> DescribeRequest:
    layout = build_model(TwoLayers(), seed=0, local_parameters=patterns).layout
    return DescribeRequest(
        run_seed=0,
        wants_speed=False,
        layout_digest=layout.digest,
        num_parameters=layout.num_parameters,
        layout=layout.text,
    )
