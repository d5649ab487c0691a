"""SCAFFOLD and client momentum: equal to plain loops, and the same on every way of running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import headwater
from headwater.client.features import work_of
from headwater.client.local_state.state_rounds import state_rounds
from headwater.client.training.round import sum_round
from headwater.common.errors import ProtocolMismatch, SettingsError
from headwater.common.local_state.terms import ScaffoldTerms
from headwater.common.local_training.terms import LocalPlan
from headwater.common.model.local_state import LocalStore
from headwater.common.optimizers.muon import Muon
from headwater.common.settings.schema import Settings
from headwater.common.terms import named
from headwater.server.local_training.local_round import local_round
from headwater.server.rounds import checkpoint
from tests.local_state.plain_rounds import Cohorts, kept_optimizers, scaffold
from tests.local_state.quadratics import (
    Quadratics,
    UnlikeHeads,
    fixed_point_of_fedavg,
    optimum,
    scaffold_of_heads,
)
from tests.own_feature.plain import CLIENTS, LOCAL, RATE, vector
from tests.own_feature.test_own_features import scaffold_by_a_plain_loop
from tests.python_tasks import SIGNS, Signs
from tests.training_contexts import plan, training_context, whole

ALGORITHMS = ("scaffold", "client-momentum")
EVERYBODY = range(CLIENTS)
MASKED: dict[str, Any] = {"secure_aggregation": "semi-honest", "clients": 5}


def cohorts_of(run: headwater.Run) -> Cohorts:
    return [[int(one.name) for one in row.clients] for row in run.history]


def test_scaffold_is_that_of_a_plain_loop() -> None:
    run = headwater.simulate(Signs, **LOCAL, rounds=4, algorithm="scaffold")
    torch.testing.assert_close(vector(run.model), scaffold_by_a_plain_loop(4), rtol=2e-5, atol=2e-6)
    plain = headwater.simulate(Signs, **LOCAL, rounds=4)
    assert not torch.allclose(vector(run.model), vector(plain.model), atol=1e-4)


OPTIMIZERS: Mapping[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({}, lambda of: torch.optim.SGD(of, lr=RATE, momentum=0.9)),
    "nesterov": (
        {"local.arguments": {"nesterov": True, "momentum": 0.5}},
        lambda of: torch.optim.SGD(of, lr=RATE, momentum=0.5, nesterov=True),
    ),
    "adamw": ({"local.optimizer": "adamw"}, lambda of: torch.optim.AdamW(of, lr=RATE)),
    "muon": ({"local.optimizer": "muon"}, lambda of: Muon(of, lr=RATE)),
    "adafactor": (
        {"local.optimizer": "adafactor"},
        lambda of: torch.optim.Adafactor(of, lr=RATE),
    ),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_kept_optimizer_is_that_of_a_plain_loop(case: str) -> None:
    settings, make = OPTIMIZERS[case]
    given: dict[str, Any] = {**LOCAL, "rounds": 4, "settings": settings}
    run = headwater.simulate(Signs, **given, algorithm="client-momentum")
    expected = kept_optimizers([EVERYBODY] * 4, make)
    # AdamW divides by the root of a mean of squares, which begins at nothing.
    atol = 2e-4 if case in ("adamw", "muon") else 2e-6
    torch.testing.assert_close(vector(run.model), expected, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_devices_that_miss_rounds_go_on_from_their_last(algorithm: str) -> None:
    given: dict[str, Any] = {**LOCAL, "clients": 5, "cohort_size": 2, "rounds": 8}
    run = headwater.simulate(Signs, **given, algorithm=algorithm)
    cohorts = cohorts_of(run)
    assert {len(one) for one in cohorts} == {2}
    _, make = OPTIMIZERS["sgd"]
    is_scaffold = algorithm == "scaffold"
    expected = scaffold(cohorts) if is_scaffold else kept_optimizers(cohorts, make, num_parts=5)
    torch.testing.assert_close(vector(run.model), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [5, 2])
def test_scaffold_steps_what_a_device_s_examples_do_not_use(size: int) -> None:
    """A round's devices may all leave out one head, which what is left of others then moves."""
    given: dict[str, Any] = {**LOCAL, "clients": 5, "cohort_size": size, "rounds": 12}
    given |= {"micro_batch_size": 2, "algorithm": "scaffold", "fleet": "equal"}
    run = headwater.simulate(UnlikeHeads, **given)
    expected = scaffold_of_heads(cohorts_of(run), RATE, 4)
    torch.testing.assert_close(vector(run.model), torch.tensor(expected), rtol=2e-5, atol=2e-6)


def point_of(algorithm: str, rounds: int, **more: Any) -> float:
    given: dict[str, Any] = {"clients": 3, "rounds": rounds, "progress": False, "fleet": "equal"}
    given |= {"local_epochs": 1, "local_learning_rate": 0.1, "local_batch_size": 2} | more
    run = headwater.simulate(Quadratics, **given, algorithm=algorithm)
    return float(vector(run.model))


@pytest.mark.slow
def test_scaffold_goes_to_the_optimum_of_unlike_devices_where_fedavg_does_not() -> None:
    """Numbers of examples, and so of steps, differ: c has the weights that the updates have."""
    biased = fixed_point_of_fedavg(0.1, steps=(4, 8, 12))
    assert abs(biased - optimum()) > 0.5
    assert point_of("fedavg", 60) == pytest.approx(biased, abs=1e-4)
    assert point_of("scaffold", 150) == pytest.approx(optimum(), abs=1e-4)
    normalized = point_of("scaffold", 150, step_correction="normalized")
    assert normalized == pytest.approx(optimum(), abs=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_and_one_in_worker_processes_have_the_same_bits(
    algorithm: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {**LOCAL, "algorithm": algorithm}
    headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / "whole")
    headwater.simulate(SIGNS, **given, rounds=2, out=tmp_path / "resumed")
    headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / "resumed", resume=True)
    assert_same_models(tmp_path, "whole", "resumed")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_workers_and_devices_over_sockets_have_the_same_bits(
    algorithm: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {**LOCAL, "algorithm": algorithm}
    headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / "whole")
    workers = {"simulation.workers": 2}
    headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / "workers", settings=workers)
    sockets = {"simulation.engine": "grpc"}
    for rounds in (2, 4):  # the devices are new processes, which find their state in its folder
        headwater.simulate(
            SIGNS,
            **given,
            rounds=rounds,
            out=tmp_path / "sockets",
            resume=rounds == 4,
            settings=sockets,
        )
    assert_same_models(tmp_path, "whole", "workers")
    assert_same_models(tmp_path, "whole", "sockets")


def assert_same_models(folder: Path, first: str, other: str) -> None:
    found = [load_file(folder / name / "model.safetensors") for name in (first, other)]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_masked_rounds_are_those_in_clear(algorithm: str) -> None:
    given: dict[str, Any] = {**LOCAL, **MASKED, "rounds": 3, "algorithm": algorithm}
    masked = headwater.simulate(Signs, **given)
    plain = headwater.simulate(Signs, **given | {"secure_aggregation": "off"})
    torch.testing.assert_close(vector(masked.model), vector(plain.model), rtol=1e-3, atol=1e-4)


WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weighting": "dataset"},
    "compressed": {"compress": "int8"},
    "aggregators": {"settings": {"simulation.aggregators": 2}},
    "masked": MASKED,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_server_s_sums_are_those_of_what_the_devices_keep(way: str, tmp_path: Path) -> None:
    """Each device's weight x c_i is in the server's sum once, whichever rounds it was in."""
    given: dict[str, Any] = {**LOCAL, "clients": 5, "rounds": 6, "out": tmp_path, **WAYS[way]}
    headwater.simulate(SIGNS, **given, algorithm="scaffold")
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    sum_P, weight = (
        saved.features["control_variates"]["variates"],
        saved.progress.features["control_variates"],
    )
    counted = [
        settled(load_file(path)) for path in tmp_path.glob("local/*.algorithm.scaffold.safetensors")
    ]
    assert weight["weight"] == sum(float(one["weight"]) for one in counted) > 0
    expected_P = torch.stack([one["variate"].double() * one["weight"] for one in counted]).sum(0)
    torch.testing.assert_close(sum_P, expected_P, rtol=1e-5, atol=1e-5)


def test_asynchronous_rounds_count_each_device_once(tmp_path: Path) -> None:
    buffered = {"asynchronous.is_on": True, "asynchronous.buffer": 2}
    given: dict[str, Any] = {**LOCAL, "clients": 5, "rounds": 6, "out": tmp_path}
    run = headwater.simulate(SIGNS, **given, algorithm="scaffold", settings=buffered)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    names = [one.name for row in run.history for one in row.clients]
    assert len({*names}) < len(names)
    assert saved.progress.features["control_variates"]["weight"] == 40.0 * len({*names})


def settled(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the pending state, which the last round counted, where there is one."""
    pending = {name[1:]: one for name, one in tensors.items() if name.startswith(".")}
    return pending or tensors


def test_a_mean_of_another_length_than_the_model_s_is_refused() -> None:
    data = Signs().train_examples(data=None, part=0, num_parts=1)
    terms = ScaffoldTerms(variate=torch.ones(3), first_round=0)
    asked = plan(4, 2).model_copy(update={"terms": named(terms, LocalPlan(steps=2))})
    store = LocalStore("here", lambda: None, lambda _: None)
    own = state_rounds(asked, lambda _: store)
    work = work_of(asked, whole(data, 4), training_context(Signs(), data), own=own)
    with pytest.raises(ProtocolMismatch, match="a mean of 3 values, the model has"):
        sum_round(work)


def test_the_planner_counts_what_devices_keep() -> None:
    found = {
        name: local_round(
            Settings.model_validate({"local": {"algorithm": name}}), num_parameters=10
        )
        for name in ("fedavg", "scaffold", "client-momentum")
    }
    # The start; the start, state twice, mean and sum; the start, the momentum and its state twice.
    assert [one.held_bytes for one in found.values() if one] == [40, 40 + 160, 40 + 40 + 80]


def test_a_run_that_turns_to_scaffold_begins_its_sums_anew(tmp_path: Path) -> None:
    given: dict[str, Any] = {**LOCAL, "out": tmp_path}
    headwater.simulate(SIGNS, **given, rounds=2, algorithm="scaffold")
    headwater.simulate(SIGNS, **given, rounds=3, algorithm="fedavg", resume=True)
    headwater.simulate(SIGNS, **given, rounds=4, algorithm="scaffold", resume=True)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert saved.progress.features["control_variates"] == {
        "weight": 40.0 * CLIENTS,
        "first_round": 3,
    }


def test_worker_processes_need_a_folder_for_the_state() -> None:
    with pytest.raises(SettingsError, match="share what the devices keep as files"):
        headwater.simulate(
            SIGNS, **LOCAL, rounds=1, algorithm="scaffold", settings={"simulation.workers": 2}
        )
