"""The server steps by a user's rule or optimizer class, and resumes it to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwater
from examples.extensions.server_rules import Lion, signum
from headwater.common.errors import SettingsError, TaskFailed
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import OptimizerSettings, ScheduleSettings
from headwater.common.user_code.run_scope import run_scope
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from headwater.server.rounds.round_row import RoundRow
from tests.python_tasks import Signs

FILE = Path(__file__).parents[3] / "examples" / "extensions" / "server_rules.py"


def optimizer_of(rule: object, arguments: dict[str, Any] | None = None) -> ServerOptimizer:
    chosen = OptimizerSettings(name="python:it", learning_rate=0.5, arguments=arguments or {})
    with run_scope({"python:it": rule}):
        return ServerOptimizer(build_model(Signs(), seed=0), chosen, ScheduleSettings())


def means(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(26, generator=generator) for _ in range(number)]


def bytes_of(run: headwater.Run) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in run.model.parameters()]


def test_a_rule_moves_the_model_by_minus_the_rate_times_its_step() -> None:
    image = build_model(Signs(), seed=0)
    before_P, (first_P, second_P) = image.values_P.clone(), means(2)
    chosen = OptimizerSettings(name="python:signum", learning_rate=0.25, arguments={"beta": 0.5})
    with run_scope({"python:signum": signum}):
        optimizer = ServerOptimizer(image, chosen, ScheduleSettings())
    optimizer.step(first_P)
    optimizer.step(second_P)
    expected_P = before_P - 0.25 * first_P.sign()
    expected_P -= 0.25 * (0.25 * first_P + 0.5 * second_P).sign()
    torch.testing.assert_close(image.values_P, expected_P, rtol=0, atol=1e-6)


def test_a_rule_that_knows_the_model_s_layout_is_tried_on_a_vector_of_its_size() -> None:
    def by_layer(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
        first, second = mean_P[:16], mean_P[16:]
        return torch.cat([first.view(4, 4).flatten(), 2 * second])

    optimizer_of(by_layer).step(means(1)[0])


def test_the_mean_itself_as_a_step_is_sgd_to_the_bit() -> None:
    def mean(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
        return mean_P

    given: dict[str, Any] = {"clients": 3, "rounds": 3, "learning_rate": 0.5, "progress": False}
    ours = headwater.simulate(Signs, optimizer=mean, **given)
    assert bytes_of(ours) == bytes_of(headwater.simulate(Signs, optimizer="sgd", **given))


def test_a_rule_s_state_is_restored_as_it_was() -> None:
    def counting(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
        state["number"] = state.get("number", 0) + 1
        state["seen_P"] = state.get("seen_P", torch.zeros(26, dtype=torch.int64)) + 2**40
        return mean_P if len(mean_P) == 26 else torch.zeros_like(mean_P)

    first, second = optimizer_of(counting), optimizer_of(counting)
    first.step(means(1)[0])
    second.restore(*first.state())
    tensors, plain = second.state()
    assert tensors["0.seen_P"].dtype == torch.int64
    assert tensors["0.seen_P"].tolist() == [2**40] * 26
    assert plain == first.state()[1]


@pytest.mark.parametrize(
    "optimizer",
    [signum, Lion, f"{FILE}:Lion", f"{FILE}:signum", "examples.extensions.server_rules:Lion"],
)
def test_a_run_resumes_to_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    def interrupt(row: RoundRow) -> None:
        if row.round == 2:
            raise KeyboardInterrupt

    given: dict[str, Any] = {"clients": 3, "rounds": 4, "learning_rate": 0.01, "progress": False}
    given |= {"optimizer": optimizer, "settings": {"schedule.name": "StepLR"}}
    given["settings"]["schedule.arguments.step_size"] = 1
    whole = headwater.simulate(Signs, **given)
    with pytest.raises(KeyboardInterrupt):
        headwater.simulate(Signs, out=tmp_path / "run", observer=interrupt, **given)
    rest = headwater.simulate(Signs, out=tmp_path / "run", resume=True, **given)
    assert bytes_of(rest) == bytes_of(whole)


def test_masked_rounds_step_by_a_rule() -> None:
    given: dict[str, Any] = {"clients": 3, "rounds": 2, "progress": False, "optimizer": signum}
    run = headwater.simulate(Signs, secure_aggregation="semi-honest", **given)
    assert [row.learning_rate for row in run.history] == [0.01, 0.01]


def test_a_rule_that_raises_before_the_first_round_shows_the_user_s_line() -> None:
    def broken(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
        norm: float = state["norm"]  # the user's line
        return mean_P / norm

    with pytest.raises(SettingsError) as refused:
        optimizer_of(broken)
    said = str(refused.value)
    assert "python:it cannot step: KeyError: 'norm'" in said
    assert "the user's line" in said
    assert "schedule" not in said


def test_other_rules_are_refused_at_resume() -> None:
    first = optimizer_of(signum)
    first.step(means(1)[0])
    with pytest.raises(SettingsError, match="the run was started with the optimizer signum"):
        optimizer_of(Lion).restore(*first.state())


def half(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
    return mean_P[:2]


def nothing(mean_P: Tensor, state: dict[str, Any]) -> Any:
    mean_P.mul_(2)


def hoarding(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
    state["all"] = [mean_P]
    return mean_P


class NoOptimizer:
    pass


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        (half, {}, r"must return a step like the mean gradient.*found torch.float32 \(2,\)"),
        (nothing, {}, "found NoneType"),
        (hoarding, {}, "a state that no checkpoint can hold"),
        (signum, {"betta": 0.5}, "the server rule signum has no argument betta"),
        (signum, {"state": 1}, "has no argument state"),
        (Lion, {"betta": 0.5}, "Lion has no argument betta"),
        (NoOptimizer, {}, "neither a class of optimizers nor a function"),
        (3, {}, "neither a class of optimizers nor a function"),
    ],
)
def test_what_is_wrong_with_a_rule_is_named(
    rule: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        optimizer_of(rule, arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:Lion", "the optimizer absent.py:Lion: there is no"),
        (f"{FILE}:Tiger", "has no Tiger"),
        ("no.such.module:Lion", "the optimizer no.such.module:Lion:"),
        ("lion", "torch.optim has no 'lion'"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        headwater.simulate(Signs, clients=2, optimizer=name, progress=False)


def previous_step(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
    """Step along the previous round's mean, which is kept without a copy."""
    step_P: Tensor = state.get("previous", torch.zeros_like(mean_P))
    state["previous"] = mean_P
    return step_P


class PreviousStep(torch.optim.Optimizer):
    """Steps along the previous round's gradient, which it keeps without a copy."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if "previous" in self.state[parameter]:
                parameter.sub_(self.state[parameter]["previous"], alpha=self.param_groups[0]["lr"])
            self.state[parameter]["previous"] = parameter.grad


@pytest.mark.parametrize("kind", [previous_step, PreviousStep])
def test_a_kept_mean_survives_the_next_sum_in_the_same_memory(kind: object) -> None:
    image = build_model(Signs(), seed=0)
    before_P, rounds = image.values_P.clone(), means(3)
    chosen = OptimizerSettings(name="python:it", learning_rate=0.5)
    with run_scope({"python:it": kind}):
        optimizer = ServerOptimizer(image, chosen, ScheduleSettings())
    sum_P = torch.zeros(26)
    for mean_P in rounds:
        optimizer.step(sum_P.copy_(mean_P))
    expected_P = before_P - 0.5 * rounds[0] - 0.5 * rounds[1]
    torch.testing.assert_close(image.values_P, expected_P, rtol=0, atol=1e-6)


class FailsAtOnes(PreviousStep):
    """Raises at a gradient of ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if all(bool((p.grad == 1).all()) for p in self.param_groups[0]["params"]):
            raise KeyError("no such moment")


def fails_at_ones(mean_P: Tensor, state: dict[str, Any]) -> Tensor:
    if bool((mean_P == 1).all()):
        raise KeyError("no such moment")
    return mean_P


@pytest.mark.parametrize(
    ("kind", "name"),
    [(FailsAtOnes, "optimizer FailsAtOnes"), (fails_at_ones, "server rule fails_at_ones")],
)
def test_a_step_that_raises_in_a_round_shows_the_user_s_line(kind: object, name: str) -> None:
    optimizer = optimizer_of(kind)
    with pytest.raises(TaskFailed, match=f"the {name} failed: KeyError") as caught:
        optimizer.step(torch.ones(26))
    assert 'raise KeyError("no such moment")' in caught.value.message


def test_a_resumed_rule_has_its_changed_rate_and_arguments() -> None:
    first_P, second_P = means(2)
    chosen = [
        OptimizerSettings(name="python:it", learning_rate=rate, arguments={"beta": beta})
        for rate, beta in ((0.5, 0.5), (0.125, 0.25))
    ]
    with run_scope({"python:it": signum}):
        images = [build_model(Signs(), seed=0) for _ in chosen]
        first, second = (
            ServerOptimizer(image, one, ScheduleSettings())
            for image, one in zip(images, chosen, strict=True)
        )
        first.step(first_P)
        images[1].load(bytes(images[0].buffer()))
        second.restore(*first.state(), before=(chosen[0], ScheduleSettings()), num_steps=1)
    before_P = images[1].values_P.clone()
    second.step(second_P)
    step_P = (0.25 * 0.5 * first_P + 0.75 * second_P).sign()
    torch.testing.assert_close(images[1].values_P, before_P - 0.125 * step_P, rtol=0, atol=1e-6)
