"""A device's own budget: on disk before an update leaves, over all runs, and never exceeded."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headwater.client.flower.request import SIMULATED
from headwater.client.privacy.budget import Spent, SpentFile
from headwater.client.privacy.example_spending import UpdateCost
from headwater.common.compression.terms import CompressionTerms
from headwater.common.errors import PrivacyBudgetSpent, PrivacyRequired, StateError
from headwater.common.privacy.spending import epsilon_of
from headwater.common.privacy.terms import PrivacyTerms, rho_of
from headwater.common.settings.schema import PrivacySettings
from tests.faults import FaultPlan
from tests.masked import AppDevice, NodeDevice, opening_of, plan, play, ready, train

pytestmark = pytest.mark.usefixtures("a_process_of_its_own")

Z = 2.0
TERMS = {"norm_bound": 1.0, "noise_multiplier": Z}
MASKED_TERMS = {**TERMS, "min_survivors": 0.7, "corrupted": 0.1}


def two_updates() -> float:
    """Return an epsilon that allows two updates, and no third."""
    return epsilon_of(2.5 * rho_of(Z), delta=1e-5)


def private(round_number: int = 1, **changes: Any) -> Any:
    return plan(round_number, **{"privacy": TERMS, "is_masked": False, **changes})


def cost(rho: float) -> UpdateCost:
    return UpdateCost(device_rho=rho, example_rho=4 * rho, window=None)


def spent_by(device: NodeDevice, folder: Path) -> Spent:
    return SpentFile(folder / f"{device.name}.privacy.json").read()


def test_a_device_refuses_the_update_that_would_exceed_its_budget(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path, privacy={"budget": two_updates()})
    train(device, private(1))
    train(device, private(2))
    with pytest.raises(PrivacyBudgetSpent, match="in its own log"):
        train(device, private(3))
    spent = spent_by(device, tmp_path)
    assert spent.num_updates == 2
    assert spent.rho == pytest.approx(2 * rho_of(Z))


def test_the_budget_counts_over_runs_and_restarts(tmp_path: Path) -> None:
    for _ in range(2):
        train(NodeDevice(0, tmp_path, privacy={"budget": two_updates()}), private())
    again = NodeDevice(0, tmp_path, privacy={"budget": two_updates()})
    again.node.enter(77)
    with pytest.raises(PrivacyBudgetSpent):
        train(again, private())
    larger = NodeDevice(0, tmp_path, privacy={"budget": 2 * two_updates()})
    train(larger, private())


def test_a_device_with_a_budget_refuses_rounds_without_noise(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path, privacy={"budget": 100.0})
    for refused in (plan(is_masked=False), plan()):
        with pytest.raises(PrivacyRequired, match="without noise"):
            train(device, refused)
    with pytest.raises(PrivacyRequired, match="a loss without noise"):
        device.send("evaluate", private().model_dump_json(), b"")
    assert not (tmp_path / "d0.privacy.json").exists()


@pytest.mark.parametrize("method", ["int1", "top-k"])
def test_a_device_with_a_budget_refuses_a_compressed_update(tmp_path: Path, method: str) -> None:
    """What earlier updates left would enter it: after 60 rounds five times the clip norm."""
    terms = CompressionTerms.model_validate({"method": method} | FRACTION.get(method, {}))
    device = NodeDevice(0, tmp_path, privacy={"budget": 100.0})
    with pytest.raises(PrivacyRequired, match="compressed"):
        train(device, private().asking(terms))
    assert not (tmp_path / "d0.privacy.json").exists()


FRACTION = {"top-k": {"fraction": 0.1}}


def test_a_budget_where_no_file_is_kept_is_refused() -> None:
    with pytest.raises(StateError, match="keeps files"):
        train(AppDevice(0, privacy={"budget": 5.0}), private())


def test_what_is_spent_is_written_down_without_a_budget_too(tmp_path: Path) -> None:
    device = NodeDevice(0, tmp_path)
    train(device, private())
    train(device, private())  # the server's round was aborted: it may have been opened
    assert spent_by(device, tmp_path).num_updates == 2


def test_an_update_that_comes_again_with_less_noise_costs_the_difference(tmp_path: Path) -> None:
    """It was counted and not masked; the next plan of the same examples has less noise."""
    file = SpentFile(tmp_path / "d0.privacy.json")
    for rho in (0.1, 0.5, 0.2):
        file.spend(cost(rho), PrivacySettings(), update_id="one")
    found = file.read()
    assert (found.rho, found.num_updates, found.last_rho) == (0.5, 1, 0.5)
    assert found.examples.cost.rho == pytest.approx(4 * 0.5)
    tight = PrivacySettings(budget=epsilon_of(1.0, delta=1e-5))
    with pytest.raises(PrivacyBudgetSpent):
        file.spend(cost(5.0), tight, update_id="one")


def test_a_node_of_flower_s_writes_down_what_it_spends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration need not name a folder; it then keeps its state where a client does."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    device = AppDevice(0)
    device.context.node_config.pop(SIMULATED)
    train(device, private())
    (found,) = tmp_path.rglob("d0.privacy.json")
    assert SpentFile(found).read().num_updates == 1


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        train(NodeDevice(0, tmp_path), private())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "d0.privacy.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "{}}", '{"rho": -1}', '{"rho": "much"}', '{"other": 1}'])
def test_a_damaged_file_is_an_error_and_not_a_fresh_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "d0.privacy.json").write_text(text)
    device = NodeDevice(0, tmp_path, privacy={"budget": 5.0})
    with pytest.raises(StateError):
        train(device, private())
    assert (tmp_path / "d0.privacy.json").read_text() == text


def test_a_device_that_cannot_write_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "d0.privacy.json.part").mkdir()  # in the place of the next version
    with pytest.raises(StateError):
        train(NodeDevice(0, tmp_path), private())


def masked_cohort(folder: Path, **settings: Any) -> list[Any]:
    first = NodeDevice(0, folder, privacy=settings or {})
    rest = [AppDevice(part) for part in range(1, 5)]
    cohort: list[Any] = [first, *rest]
    for device in cohort:
        ready(device, private(privacy=MASKED_TERMS, is_masked=True))
    return cohort


def test_a_masked_update_counts_when_it_is_masked_and_less_once_it_is_known_who_survived(
    tmp_path: Path,
) -> None:
    cohort = masked_cohort(tmp_path)
    round_plan = private(privacy=MASKED_TERMS, is_masked=True)
    setup = opening_of(cohort, round_plan, privacy=round_plan.of(PrivacyTerms))

    play(cohort, setup, until="check_shares")
    assert not (tmp_path / "d0.privacy.json").exists()
    cohort = masked_cohort(tmp_path)
    setup = opening_of(cohort, round_plan, privacy=round_plan.of(PrivacyTerms), attempt=2)
    play(cohort, setup, FaultPlan().drop(client="d4", after="check_shares"), until="masked_update")
    spent = spent_by(cohort[0], tmp_path)
    assert spent.rho == pytest.approx(rho_of(Z))


def test_an_opened_masked_sum_costs_what_its_survivors_noise_leaves(tmp_path: Path) -> None:
    cohort = masked_cohort(tmp_path)
    round_plan = private(privacy=MASKED_TERMS, is_masked=True)
    opened = play(cohort, opening_of(cohort, round_plan, privacy=round_plan.of(PrivacyTerms))).sum
    assert len(opened.survived) == 5
    # 5 members, of whom 4 must survive and 1 may collude: noise for 3, and there are 4.
    spent = spent_by(cohort[0], tmp_path)
    assert spent.rho == pytest.approx(rho_of(Z) * 3 / 4, rel=1e-5)
    assert spent.num_updates == 1


def test_an_update_that_the_budget_does_not_allow_is_never_masked(tmp_path: Path) -> None:
    cohort = masked_cohort(tmp_path, budget=two_updates())
    file = tmp_path / "d0.privacy.json"
    file.write_text(json.dumps({"rho": 2 * rho_of(Z), "num_updates": 2}))  # another run's
    round_plan = private(privacy=MASKED_TERMS, is_masked=True)
    played = play(cohort, opening_of(cohort, round_plan, privacy=round_plan.of(PrivacyTerms)))
    assert isinstance(played.refused["d0"], PrivacyBudgetSpent)
    assert "d0" not in played.sum.survived
