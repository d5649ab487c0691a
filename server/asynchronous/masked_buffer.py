"""The buffer of masked asynchronous rounds: which waiting updates may be opened together.

A masked update waits on its device, and the server knows no more than that it is ready. A step
opens one secure session for each model that updates in the buffer are of, and counts its sum as
often as an update of that model counts in the clear. So everything that a device checks in a
synchronous session holds unchanged: all members have one model, one plan and one round, and no
factor of the server's choice is in a session. In a session across models, a server could send all
members but one a model whose gradients are zero, and the sum would be that one's update.

The price: a session needs ``secure.min_members`` members, so an update counts only if as many of
its model are ready at the same step. An update that can have no such company any more is refused
(``TooFewOfModel``), and its device gets the newest model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headwater.common.messages import Plan
from headwater.common.secagg.terms import MaskingTerms
from headwater.common.settings.schema import SecureSettings
from headwater.server.rounds.run_state import Training
from headwater.server.secagg.masked_rounds import MaskedRounds, clients_by_model
from headwater.server.secagg.parameters import most_members


def masked_rounds(training: Training) -> MaskedRounds:
    """Return the run's masked rounds, which it has if its updates are masked."""
    found = training.features["secagg"]
    assert isinstance(found, MaskedRounds)
    return found


def in_sessions(ready: Collection[str], plans: Mapping[str, Plan], *, least: int) -> list[str]:
    """Return the ready clients that could be in sessions now: at least ``least`` of their model."""
    groups = clients_by_model(ready, plans).values()
    return [name for names in groups if len(names) >= least for name in names]


def with_graphs(
    names: Collection[str], plans: Mapping[str, Plan], *, secure: SecureSettings
) -> list[str]:
    """Return the clients that sessions take now: the first of each model for whom a graph exists.

    Raises:
        NoSuchGraph: a session would have fewer than ``secure.min_members``.
    """
    assert secure.aggregation != "off"
    found = []
    for group in clients_by_model(names, plans).values():
        number = most_members(
            len(group),
            least=secure.min_members,
            mode=secure.aggregation,
            corrupted=secure.corrupted,
            dropout=secure.dropout,
        )
        found += group[:number]
    return found


def without_company(
    ready: Collection[str], at_work: Collection[str], plans: Mapping[str, Plan], *, least: int
) -> list[str]:
    """Return the clients of both kinds whose model has fewer than ``least`` of both kinds left."""
    groups = clients_by_model([*ready, *at_work], plans).values()
    return [name for names in groups if len(names) < least for name in names]


def joined(
    new: Mapping[str, Plan], earlier: Mapping[str, Plan], *, least: int
) -> Mapping[str, Plan]:
    """Return new plans of one model, which say how many clients have a plan of it; or none.

    There is none if no session could come of them: a device carries out no plan for fewer clients
    than its own minimum. ``earlier`` are the plans that are answered or may still be.
    """
    versions = {plan.model_version for plan in new.values()}
    number = len(new) + sum(plan.model_version in versions for plan in earlier.values())
    if number < least:
        return {}
    return {name: _inviting(plan, number) for name, plan in new.items()}


def _inviting(plan: Plan, number: int) -> Plan:
    terms = plan.of(MaskingTerms) or MaskingTerms()
    return plan.asking(terms.model_copy(update={"num_invited": number}))
