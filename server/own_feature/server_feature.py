"""The server's side of a feature of the user's: the moments of a run, and what its plans say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.own_feature.found import own_feature
from headwater.common.terms import Terms
from headwater.common.user_code import running
from headwater.server.planning.features import DraftPlan
from headwater.server.rounds.features import RunFeature, RunState


class ServerFeature(RunFeature):
    """The moments of a run (``RunFeature``), and the terms of its plans."""

    Terms: Any = None
    """The class of the feature's terms."""

    def __init__(self, run: RunState) -> None:
        """Take the run; a subclass may have arguments of its own (``--feature-argument``)."""
        self.run = run

    def terms(self) -> Terms:
        """Return what the plans of the next round ask; by default terms without fields."""
        found: Terms = self.Terms()
        return found

    def write(self, drafts: Sequence[DraftPlan], *, num_invited: int) -> None:
        terms = self.terms()
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
    kind = found.server or ServerFeature
    with running(what):
        made: ServerFeature = kind(run, **chosen.arguments)
    made.Terms = found.terms
    with running(what):
        asked = made.terms().sums(run.image.layout.num_parameters)
    settings = run.settings
    hidden = {
        "--secure-aggregation": settings.secure.aggregation != "off",
        "--privacy-epsilon": settings.privacy.is_on,
    }
    for flag, is_on in hidden.items():
        if asked and is_on:
            raise SettingsError(
                f"{what} adds up sums beside the model's ({', '.join(asked)}), and {flag} hides "
                "the model's alone",
                remedy=f"leave out {flag} or --feature",
            )
    return found.name, made
