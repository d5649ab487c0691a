"""A client algorithm makes the vector of a window; masks, spool, resume and weights honour it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import headwater
from examples.extensions.clipped_steps import ClippedSteps
from examples.extensions.clipped_update import ClippedUpdate
from examples.extensions.fedprox import FedProx
from headwater.client.algorithms.lookup import algorithm_for
from headwater.client.commands import connection_of
from headwater.client.local_training.local_work import ClientAlgorithm, LocalWork
from headwater.client.training.round import update_of
from headwater.client.training.spool import Spool
from headwater.common.errors import (
    AlgorithmBroken,
    AlgorithmMismatch,
    SettingsError,
    TaskFailed,
)
from headwater.common.messages import Update
from headwater.common.settings.schema import AlgorithmSettings
from headwater.common.settings.sources import load
from headwater.common.user_code.run_scope import run_scope
from headwater.server.rounds.round_row import RoundRow
from tests.python_tasks import SIGNS, Signs
from tests.tasks import TwoLayers, examples, gradient_sum
from tests.training_contexts import plan, sum_gradients, training_context, whole

EXTENSIONS = Path(__file__).parents[3] / "examples" / "extensions"
SMALL: dict[str, Any] = {"clients": 3, "rounds": 3, "micro_batch_size": 4, "progress": False}


class WholeSum:
    """The exact sum, as without an algorithm."""

    def train(self, work: LocalWork) -> Tensor:
        return work.sum()


class PlainSteps:
    """Plain local steps, as without an algorithm."""

    def train(self, work: LocalWork) -> Tensor:
        for mean_P in work.steps():
            work.parameters_P.sub_(mean_P, alpha=work.learning_rate)
        return work.weight * (work.start_P - work.parameters_P)


def updated(algorithm: ClientAlgorithm | None, spool: Spool | None = None, **work: Any) -> Update:
    data = examples(24)
    context = training_context(TwoLayers(), data)
    chosen, part = plan(24, 4, **work), whole(data, 24)
    before_P = context.image.values_P.clone()
    local_sum = sum_gradients(chosen, part, context, spool, algorithm)
    update = update_of(local_sum)
    assert torch.equal(context.image.values_P, before_P)
    return update


def bytes_of(run: headwater.Run) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in run.model.parameters()]


@pytest.mark.parametrize("masked", ["off", "semi-honest"])
def test_the_whole_sum_as_an_algorithm_changes_no_bit(masked: Any) -> None:
    given: dict[str, Any] = {**SMALL, "accumulation_steps": 2, "secure_aggregation": masked}
    ours = headwater.simulate(Signs, client_algorithm=WholeSum, **given)
    assert bytes_of(ours) == bytes_of(headwater.simulate(Signs, **given))


def test_plain_steps_as_an_algorithm_are_the_built_in_local_steps() -> None:
    work: dict[str, Any] = {"local_steps": 3, "local_learning_rate": 0.01}
    ours, built_in = updated(PlainSteps(), **work), updated(None, **work)
    torch.testing.assert_close(ours.values_P, built_in.values_P, rtol=1e-5, atol=1e-5)
    assert ours.report.weight == built_in.report.weight == 24


def test_fedprox_takes_the_steps_of_its_formula() -> None:
    data, rate, mu = examples(24), 0.01, 0.5
    start_P = training_context(TwoLayers(), data).image.values_P.double()
    model_P = start_P.clone()
    for positions in (range(12), range(12, 24)):
        sum_P = torch.from_numpy(gradient_sum(model_P.float(), data, [*positions]))
        model_P = model_P - rate * (sum_P / 12 + mu * (model_P - start_P))
    update = updated(FedProx(mu), local_steps=2, local_learning_rate=rate)
    expected_P = 24 * (start_P - model_P)
    torch.testing.assert_close(update.values_P.double(), expected_P, rtol=1e-3, atol=1e-3)


def test_a_clipped_update_has_the_direction_of_the_sum_and_at_most_the_norm() -> None:
    whole_P = updated(None).values_P
    clipped_P = updated(ClippedUpdate(0.5)).values_P
    assert float(clipped_P.norm()) == pytest.approx(24 * 0.5, rel=1e-5)
    torch.testing.assert_close(clipped_P / clipped_P.norm(), whole_P / whole_P.norm())
    assert torch.equal(updated(ClippedUpdate(1e6)).values_P, whole_P)


def test_clipped_steps_move_no_further_than_their_norms() -> None:
    update = updated(ClippedSteps(0.25), local_steps=3, local_learning_rate=0.1)
    assert 0 < float(update.values_P.norm()) <= 24 * 3 * 0.1 * 0.25 * (1 + 1e-5)


def test_the_weight_of_a_plan_scales_the_vector() -> None:
    own, scaled = updated(FedProx(), local_steps=2), updated(FedProx(), local_steps=2, weigh_as=48)
    assert scaled.report.weight == 48
    torch.testing.assert_close(scaled.values_P, 2 * own.values_P)


def test_a_sum_that_was_cut_off_goes_on_from_the_spool(tmp_path: Path) -> None:
    class PowerCut(BaseException):
        pass

    class CutOff(TwoLayers):
        def loss_sum(self, model: torch.nn.Module, batch: Any) -> tuple[Tensor, int]:
            if len(self.seen) == 4:
                raise PowerCut
            return super().loss_sum(model, batch)

    data, chosen = examples(24), plan(24, 4)
    part = whole(data, 24)

    def spool() -> Spool:
        return Spool(tmp_path, name="pi", run_id=1, every_seconds=0.0, max_share=float("inf"))

    context = training_context(CutOff(), data)
    with pytest.raises(PowerCut):
        sum_gradients(chosen, part, context, spool(), ClippedUpdate(0.5))
    task = TwoLayers()
    found = sum_gradients(chosen, part, training_context(task, data), spool(), ClippedUpdate(0.5))
    assert task.seen == [4, 4]
    assert torch.equal(found.values_P, updated(ClippedUpdate(0.5)).values_P)


def test_the_steps_of_an_algorithm_are_not_spooled_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, chosen = examples(12), plan(12, 4, local_steps=3, local_learning_rate=2.0**-6)
    for _ in range(2):
        spool = Spool(tmp_path, name="pi", run_id=1, every_seconds=0.0)
        context = training_context(TwoLayers(), data)
        sum_gradients(chosen, whole(data, 12), context, spool, FedProx())
    assert not any(tmp_path.iterdir())
    assert sum("not spooled" in text for text in caplog.messages) <= 1


@pytest.mark.parametrize("algorithm", [FedProx(0.1), f"{EXTENSIONS}/fedprox.py:FedProx"])
def test_a_run_resumes_to_the_same_bits(algorithm: Any, tmp_path: Path) -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 1:
            raise KeyboardInterrupt

    given: dict[str, Any] = {**SMALL, "accumulation_steps": 4, "local_steps": 2, "optimizer": "sgd"}
    given |= {"client_algorithm": algorithm, "learning_rate": 1.0}
    whole_run = headwater.simulate(Signs, **given)
    with pytest.raises(KeyboardInterrupt):
        headwater.simulate(Signs, out=tmp_path / "run", observer=interrupt, **given)
    rest = headwater.simulate(Signs, out=tmp_path / "run", resume=True, **given)
    assert bytes_of(rest) == bytes_of(whole_run)


def test_masked_rounds_sum_what_the_algorithm_gives() -> None:
    given: dict[str, Any] = {**SMALL, "accumulation_steps": 4, "local_steps": 2, "optimizer": "sgd"}
    given |= {"client_algorithm": FedProx(0.1), "learning_rate": 1.0}
    plain = headwater.simulate(Signs, **given)
    masked = headwater.simulate(Signs, secure_aggregation="semi-honest", **given)
    for one, other in zip(plain.model.parameters(), masked.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_many_devices_are_computed_one_by_one_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {**SMALL, "clients": 34, "rounds": 1, "progress": True}
    headwater.simulate(Signs, client_algorithm=ClippedUpdate(1.0), **given)
    said = " ".join(capsys.readouterr().out.split())
    assert "devices are computed one by one: the client algorithm ClippedUpdate" in said


def test_arguments_come_from_the_settings() -> None:
    name = f"{EXTENSIONS}/clipped_update.py:ClippedUpdate"
    chosen = AlgorithmSettings(name=name, arguments={"max_norm": 0.5})
    made = algorithm_for(plan(24, 4, algorithm="ClippedUpdate(max_norm=0.5)"), chosen, name="pi")
    assert made is not None
    assert torch.equal(updated(made).values_P, updated(ClippedUpdate(0.5)).values_P)


@pytest.mark.slow
@pytest.mark.parametrize("masked", ["off", "semi-honest"])
def test_own_steps_of_unlike_numbers_are_corrected_as_the_built_in_ones_are(masked: Any) -> None:
    given: dict[str, Any] = {
        "clients": 6,
        "rounds": 3,
        "local_steps": 5,
        "local_learning_rate": 0.3,
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "secure_aggregation": masked,
        "settings": {"local.batch_size": 4},
        "progress": False,
    }
    own = headwater.simulate(Signs, client_algorithm=FedProx(0.0), **given)
    built_in = headwater.simulate(Signs, **given)
    steps = {client.num_examples // 4 for row in own.history for client in row.clients}
    assert len(steps) > 1 or masked != "off"
    for ours, theirs in zip(own.model.parameters(), built_in.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    plain = headwater.simulate(
        Signs, client_algorithm=FedProx(0.0), **given, step_correction="none"
    )
    assert masked != "off" or plain.history[0].loss == own.history[0].loss
    changed = zip(plain.model.parameters(), own.model.parameters(), strict=True)
    assert masked != "off" or not all(torch.allclose(*pair, atol=1e-4) for pair in changed)


@pytest.mark.parametrize(("planned", "own"), [("FedProx", None), (None, "x.py:FedProx")])
def test_a_plan_for_another_algorithm_is_refused(planned: str | None, own: str | None) -> None:
    chosen = AlgorithmSettings(name=own)
    with pytest.raises(AlgorithmMismatch, match=r"the server's run has .*, this device has "):
        algorithm_for(plan(24, 4, algorithm=planned), chosen, name="pi")


@pytest.mark.parametrize(
    ("planned", "own"), [({"mu": 0.2}, {"mu": 0.1}), ({"mu": 0.2}, {}), ({}, {"mu": 0.2})]
)
def test_a_plan_with_other_arguments_is_refused_and_both_are_named(
    planned: dict[str, Any], own: dict[str, Any]
) -> None:
    server = load(None, {"algorithm.name": "FedProx", "algorithm.arguments": planned})
    device = AlgorithmSettings(name=f"{EXTENSIONS}/fedprox.py:FedProx", arguments=own)
    sent = plan(24, 4, algorithm=server.algorithm.label)
    with pytest.raises(AlgorithmMismatch) as refused:
        algorithm_for(sent, device, name="pi")
    for arguments in (planned, own):
        shown = f"FedProx(mu={arguments['mu']})" if arguments else "FedProx"
        assert shown in str(refused.value)


def test_equal_arguments_are_equal_in_any_order_and_as_whole_or_decimal_numbers() -> None:
    one = AlgorithmSettings(name="A", arguments={"mu": 1, "norms": [1.0, 2.5], "kind": "l2"})
    other = AlgorithmSettings(name="x.py:A", arguments={"kind": "l2", "norms": [1, 2.5], "mu": 1.0})
    assert one.label == other.label == "A(kind='l2', mu=1, norms=[1, 2.5])"


def test_arguments_without_an_algorithm_are_refused() -> None:
    with pytest.raises(SettingsError, match="name it with --client-algorithm"):
        load(None, {"algorithm.arguments.mu": 0.1})


def test_arguments_that_no_plan_has_room_for_are_refused_before_the_first_round() -> None:
    settings = {"algorithm.arguments": {"layers": "x" * 2000}}
    with pytest.raises(SettingsError, match="a plan has room for 1,024 characters"):
        headwater.simulate(Signs, client_algorithm=WholeSum, settings=settings, **SMALL)


class Half:
    def train(self, work: LocalWork) -> Tensor:
        return work.sum()[:3]


class Nothing:
    def train(self, work: LocalWork) -> Any:
        work.sum()


class Idle:
    def train(self, work: LocalWork) -> Tensor:
        return work.start_P


class Twice:
    def train(self, work: LocalWork) -> Tensor:
        work.sum()
        return work.sum()


class Broken:
    def train(self, work: LocalWork) -> Tensor:
        return work.sum() / dict[str, float]()["norm"]


class Remembering:
    def __init__(self) -> None:
        self.number = 0

    def train(self, work: LocalWork) -> Tensor:
        self.number += 1
        return work.sum() * self.number


class NoAlgorithm:
    pass


@pytest.mark.parametrize(
    ("algorithm", "error", "message"),
    [
        (
            Half,
            AlgorithmBroken,
            r"Half must return torch.float32 \(26,\), found torch.float32 \(3,\)",
        ),
        (Nothing, AlgorithmBroken, "found <class 'NoneType'>"),
        (Idle, AlgorithmBroken, r"called neither work.sum\(\) nor work.steps\(\)"),
        (Twice, AlgorithmBroken, "twice in one round"),
        (Broken, TaskFailed, "the client algorithm Broken failed: KeyError"),
        (Remembering, AlgorithmBroken, "made two vectors from the same examples"),
        (NoAlgorithm, SettingsError, r"has no method train"),
        ("absent.py:FedProx", SettingsError, "the client algorithm absent.py:FedProx"),
    ],
)
def test_the_trial_names_what_is_wrong(
    algorithm: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        headwater.simulate(Signs, client_algorithm=algorithm, **SMALL)


@pytest.mark.parametrize("masked", ["off", "semi-honest"])
def test_masked_and_plain_rounds_have_the_same_trial(masked: Any) -> None:
    with pytest.raises(AlgorithmBroken, match="made two vectors from the same examples"):
        headwater.simulate(Signs, client_algorithm=Remembering, secure_aggregation=masked, **SMALL)


@pytest.mark.parametrize("masked", ["off", "semi-honest"])
def test_without_the_check_there_is_no_trial_and_a_line_that_says_so(
    masked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {**SMALL, "settings": {"check_task": False}}
    run = headwater.simulate(
        Signs, client_algorithm=Remembering, secure_aggregation=masked, **given
    )
    assert len(run.history) == SMALL["rounds"]
    assert "Remembering is not tried. What it keeps in its object is lost" in caplog.text


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_client_tries_its_algorithm_with_the_check_of_its_task(
    is_checked: bool, tmp_path: Path
) -> None:
    chosen = {
        "task": "python:Signs",
        "check_task": is_checked,
        "algorithm.name": "python:Remembering",
        "client.state": tmp_path,
    }
    fails = pytest.raises(AlgorithmBroken, match="made two vectors")
    with (
        run_scope({"python:Signs": Signs, "python:Remembering": Remembering}),
        fails if is_checked else nullcontext(),
        connection_of(load(None, chosen)),
    ):
        pass


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are mirrored at random each time they are read."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = self._data[index]
        return inputs.flip(0) if random.random() < 0.5 else inputs, label


class FlippedSigns(Signs):
    def train_examples(self, **given: Any) -> Any:
        return Flipped(super().train_examples(**given))


def test_random_augmentation_is_no_fault_of_the_algorithm() -> None:
    run = headwater.simulate(FlippedSigns, client_algorithm=WholeSum, **SMALL)
    assert len(run.history) == SMALL["rounds"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"settings": {"plan.follow_noise_scale": True}},
            "the noise scale is estimated",
        ),
        ({"settings": {"simulation.compute": "fused"}}, "--compute fused is not possible"),
        ({"settings": {"algorithm.arguments.nu": 1}}, "has no argument"),
        ({"settings": {"simulation.workers": 2}}, "the client algorithm is a Python object"),
    ],
)
def test_what_does_not_go_with_an_algorithm_is_refused(given: Any, message: str) -> None:
    small = {name: value for name, value in SMALL.items() if name != "micro_batch_size"}
    with pytest.raises(SettingsError, match=message):
        headwater.simulate(SIGNS, client_algorithm=FedProx, **small, **given)
