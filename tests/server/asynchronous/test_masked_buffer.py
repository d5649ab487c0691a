"""Which masked updates may be opened together: only those of one model, and enough of them."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.common.messages import Plan
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.settings.schema import SecureSettings
from headwater.server.asynchronous.masked_buffer import (
    in_sessions,
    joined,
    with_graphs,
    without_company,
)
from tests.plans import plan_of


def plans_of(**versions: int) -> Mapping[str, Plan]:
    return {
        name: plan_of(
            round=version + 1,
            run_seed=0,
            model_version=version,
            quota=8,
            micro_batch_size=4,
            is_masked=True,
            num_invited=1,
        )
        for name, version in versions.items()
    }


PLANS = plans_of(a=0, b=0, c=0, d=4, e=4, f=5, g=5, h=5, i=5)


def test_updates_are_in_a_session_if_enough_of_their_model_are_ready() -> None:
    assert in_sessions(["a", "d", "e", "f", "g", "h"], PLANS, least=3) == ["f", "g", "h"]
    assert in_sessions(["c", "b", "a", "i", "h", "g"], PLANS, least=3) == [*"cbaihg"]
    assert in_sessions([], PLANS, least=3) == []


def test_the_updates_that_came_last_wait_if_there_is_no_graph_of_all() -> None:
    early, late = [f"a{number}" for number in range(64)], ["b", "c"]
    plans = plans_of(x=2, y=2, z=2, **dict.fromkeys([*early, *late], 1))
    ready = [*early[:32], "x", "y", *early[32:], *late, "z"]
    secure = SecureSettings(aggregation="semi-honest", corrupted=0.5, dropout=0.5)
    assert with_graphs(ready, plans, secure=secure) == [*early, "x", "y", "z"]
    usual = SecureSettings(aggregation="semi-honest")
    assert set(with_graphs(ready, plans, secure=usual)) == set(ready)


def test_an_update_has_company_as_long_as_enough_of_its_model_are_ready_or_at_work() -> None:
    ready = ["a", "d", "f"]
    assert without_company(ready, ["b", "c", "e", "g", "h"], PLANS, least=3) == ["d", "e"]
    assert without_company(ready, ["b"], PLANS, least=3) == ["a", "b", "d", "f"]
    assert without_company(ready, ["b", "c"], PLANS, least=4) == ["a", "b", "c", "d", "f"]


def test_new_plans_say_how_many_clients_have_a_plan_of_their_model() -> None:
    new, earlier = plans_of(x=5, y=5), plans_of(f=5, d=4)
    sent = joined(new, earlier, least=3)
    assert {name: plan.of(MaskingTerms) for name, plan in sent.items()} == {
        "x": MaskingTerms(num_invited=3),
        "y": MaskingTerms(num_invited=3),
    }


def test_no_plan_is_sent_of_which_no_session_could_come() -> None:
    assert joined(plans_of(x=5, y=5), plans_of(d=4, e=4), least=3) == {}
    assert joined({}, PLANS, least=3) == {}
