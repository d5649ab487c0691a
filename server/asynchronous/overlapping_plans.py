"""The second plan of each client, which it carries out while the update of its first is sent.

A client has two plans out at most. The second one is sent with the newest model that there is, and
its examples come after those of the first. The update of a second plan counts only if that of the
first one did: both come over one stream in this order, and where the first is refused, lost or
forgotten with an aborted step, the second is dropped, and the client uses the examples of both
again. So a client's place in its data moves on over whole plans, in their order, and no example is
lost or counted twice.

A plan's round is the step that it is for: if all clients keep pace, an update of round n is in step
n, and its model lacks the step n - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headwater.common.errors import SettingsError
from headwater.common.messages import Plan
from headwater.common.overlap.terms import OverlapTerms
from headwater.server.asynchronous.dispatching_fleet import DispatchingFleet


class OverlappingPlans:
    """The plans that follow on those at which clients work."""

    def __init__(self, fleet: DispatchingFleet) -> None:
        """Take the fleet that the plans are sent to.

        Raises:
            SettingsError: its devices have one plan at a time.
        """
        if not fleet.takes_two_plans:
            raise SettingsError(
                "with --overlap a device trains while its update is sent, over Headwater's own "
                "stream; a simulated device, or a SuperNode of Flower's, has one plan at a time",
                remedy="leave out --overlap, or use headwater-server and headwater-client",
            )
        self._fleet = fleet
        self.plans: dict[str, Plan] = {}

    def begin(self, at_work: dict[str, Plan], counted: Mapping[str, int]) -> None:
        """Make the plans of free clients those that they work on, or drop them.

        ``counted`` is the last round of each client that a committed step has.
        """
        self._fleet.hold_back(())
        free = [name for name in self.plans if name not in at_work]
        for name in free:
            if self.plans[name].after_round == counted.get(name):
                at_work[name] = self.plans.pop(name)
        self._drop([name for name in free if name in self.plans])

    def add(self, planned: Mapping[str, Plan], at_work: Mapping[str, Plan]) -> Mapping[str, Plan]:
        """Let plans follow on those at which their clients work; return them as they are sent."""
        new = {}
        for name in planned.keys() & at_work.keys() - self.plans.keys():
            plan, after = planned[name], at_work[name].round
            number = max(plan.round, after + 1)
            new[name] = plan.model_copy(update={"round": number}).asking(OverlapTerms(after=after))
        self.plans |= new
        return new

    def busy(self, at_work: Mapping[str, Plan], present: Collection[str]) -> Collection[str]:
        """Return the clients that can take no further plan: they have two, or are away."""
        return [name for name in at_work if name in self.plans or name not in present]

    def note_answers(self, accepted: Collection[str], refused: Collection[str]) -> None:
        """Let the next updates of these clients wait for the step that has their first ones.

        The plans that follow on refused ones are dropped.
        """
        self._drop([name for name in self.plans if name in refused])
        self._fleet.hold_back([name for name in self.plans if name in accepted])

    def _drop(self, names: Collection[str]) -> None:
        for name in names:
            del self.plans[name]
        if names:
            self._fleet.drop(names)


def overlapping(plans: Mapping[str, Plan]) -> Mapping[str, Plan]:
    """Return plans after which, as they say, another may follow before their updates are in."""
    return {name: plan.asking(OverlapTerms()) for name, plan in plans.items()}
