"""The server's side of a feature of the user's: the moments of a run, and what its plans say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.named_objects import check_arguments
from headwater.common.own_feature.found import own_feature
from headwater.common.terms import Terms
from headwater.common.user_code import running
from headwater.server.planning import features as planning_features
from headwater.server.planning.features import DraftPlan
from headwater.server.rounds import features as rounds_features
from headwater.server.rounds.features import RunFeature, RunState


class ServerFeature(RunFeature):
    """The moments of a run (``RunFeature``), and the terms of its plans."""

    Terms: Any = None
    """The class of the feature's terms."""

    def __init__(self, run: RunState) -> None:
        """Take the run; a subclass may have arguments of its own (``--feature-argument``)."""
        self.run = run

    def terms(self) -> Terms | None:
        """Return what all plans of the next round ask; None: nothing.

        By default terms without fields, which devices answer by what their side does. ``open`` may
        add terms to the plans of some: ``opening.plans[name].asking(self.Terms(...))``.
        """
        found: Terms = self.Terms()
        return found

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        if (terms := self.terms()) is not None:
            for draft in drafts:
                draft.ask(terms)


def own_run_feature(run: RunState) -> tuple[str, RunFeature] | None:
    """Return the name and the server's side of the run's own feature; None if there is none.

    Raises:
        SettingsError: there is no such feature, or its sums do not go with the other settings.
        TaskFailed: it raised.
    """
    chosen = run.settings.feature
    found = own_feature(chosen)
    if found is None:
        return None
    what = f"the feature {found.name}"
    if found.name in {*rounds_features.FEATURES, *planning_features.FEATURES}:
        raise SettingsError(
            f"{what} of your own has the name of one that Headwater has",
            remedy="set another NAME in the class",
        )
    kind = found.server or ServerFeature
    check_arguments(kind, chosen.arguments, what=what, num_own=1)
    with running(what):
        # Known before it begins, also to one that has no side on the server.
        made: ServerFeature = type(kind.__name__, (kind,), {"Terms": found.terms})(
            run, **chosen.arguments
        )
        terms = made.terms()
        asked = {} if terms is None else terms.sums(run.image.layout.num_parameters)
    settings = run.settings
    hidden = {
        "--secure-aggregation": settings.secure.aggregation != "off",
        "--privacy-epsilon": settings.privacy.is_on,
        "--aggregation": settings.aggregation.rule != "sum",
        "--aggregators": settings.simulation.aggregators > 1,
    }
    for flag, is_on in hidden.items():
        if asked and is_on:
            raise SettingsError(
                f"{what} adds up sums beside the model's ({', '.join(asked)}), and {flag} is for "
                "the model's alone",
                remedy=f"leave out {flag} or --feature",
            )
    return found.name, made
