"""The server's side of a feature of the user's: the moments of a run, and what its plans say."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headwater.common.errors import SettingsError
from headwater.common.own_feature.found import OwnFeature, keeps_state, own_features
from headwater.common.terms import SumOf, Terms
from headwater.common.user_code.failures import running
from headwater.common.user_code.named_objects import check_arguments
from headwater.server.planning import features as planning_features
from headwater.server.planning.features import DraftPlans
from headwater.server.rounds import features as rounds_features
from headwater.server.rounds.features import RunFeature, RunState

REMEDY = "correct the lines that are shown, or the feature; then go on with --resume"


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

    def write(self, drafts: DraftPlans) -> None:
        if (terms := self.terms()) is not None:
            drafts.ask(terms)


def own_run_features(run: RunState) -> dict[str, RunFeature]:
    """Return the server's sides of the run's own features, by name, in their order.

    Raises:
        SettingsError: there is no such feature, or its sums do not go with the other settings; or
            two have a sum of one name, or an encoding.
        TaskFailed: one raised.
    """
    chosen = run.settings.feature
    features = own_features(chosen)
    arguments = _arguments_of([one.name for one in features], chosen.arguments)
    made = {one.name: _made(one, arguments[one.name], run) for one in features}
    named: set[str] = set()
    for name, feature in made.items():
        asked = _sums_of(feature, run)
        if both := named & asked.keys():
            raise SettingsError(
                f"the feature {name} has a sum {min(both)}, as one before it",
                remedy="give the sums of your features names of their own",
            )
        named |= asked.keys()
    coded = [one.name for one in features if one.terms.CODING is not None]
    if len(coded) > 1:
        raise SettingsError(
            f"the features {' and '.join(coded)} each encode the update",
            remedy="leave out one of the two",
        )
    return {**made}


def _arguments_of(
    names: Sequence[str], given: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """Return each feature's arguments: those of a single one may be without its name.

    Raises:
        SettingsError: an argument says of none of several features that it is for it.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in given.items():
        name, dot, argument = key.partition(".")
        if not dot and len(names) == 1:
            name, argument = names[0], key
        if name not in found or not argument:
            raise SettingsError(
                f"the argument {key} is for none of the features {', '.join(names)}",
                remedy=f"say for which one: {names[0]}.{argument or key}=...",
            )
        found[name][argument] = value
    return found


def _made(found: OwnFeature, arguments: Mapping[str, Any], run: RunState) -> ServerFeature:
    """Make the server's side of one feature, after its settings were checked."""
    what = f"the feature {found.name}"
    if found.name in {*rounds_features.FEATURES, *planning_features.FEATURES}:
        raise SettingsError(
            f"{what} of your own has the name of one that Headwater has",
            remedy="set another NAME in the class",
        )
    settings = run.settings
    kind = found.server or ServerFeature
    _check_moments(kind, found.device, what=what)
    check_arguments(kind, arguments, what=what, num_own=1)
    with running(what, remedy=REMEDY):
        made: ServerFeature = _guarded(kind, what, Terms=found.terms)(run, **arguments)
        terms = made.terms()
    asked = _sums_of(made, run)
    has_direction = _overrides(found.device, "direction")
    alone = "is for the model's sum alone"
    refused = {
        f"sums beside the model's, and --privacy-epsilon {alone}": (
            bool(asked) and settings.privacy.is_on
        ),
        f"sums beside the model's, and --aggregation {alone}": (
            bool(asked) and settings.aggregation.rule != "sum"
        ),
        "an encoding of its own, beside --compress, or where masks or noise come first": (
            found.terms.CODING is not None
            and (
                settings.compression.up != "off"
                or settings.secure.aggregation != "off"
                or settings.privacy.is_on
            )
        ),
        "rounds without the model's sum, which go with plain sums alone": (
            terms is not None
            and not terms.asks_model
            and bool(
                settings.compression.up != "off"
                or settings.secure.aggregation != "off"
                or settings.privacy.is_on
                or settings.aggregation.rule != "sum"
                or settings.asynchronous.is_on
                or settings.local.is_on
                or settings.algorithm.name is not None
            )
        ),
        "its own code on each device, and --privacy-unit example bounds each example's gradient": (
            found.device is not None
            and settings.privacy.is_on
            and settings.privacy.unit == "example"
        ),
        "a state on each device, and devices refuse that under active masks: a server that lies "
        "could have one outweigh the rest": (
            settings.secure.aggregation == "active" and keeps_state(found.device)
        ),
        "terms or code on each device, and --overlap has two of its rounds pending": (
            settings.asynchronous.overlap and (found.device is not None or terms is not None)
        ),
        "a direction of local steps, and there is none without --local-steps": (
            has_direction and not settings.local.is_on and settings.algorithm.name is None
        ),
    }
    for why, is_refused in refused.items():
        if is_refused:
            raise SettingsError(f"{what} has {why}", remedy="change one of the two")
    return made


def _sums_of(made: ServerFeature, run: RunState) -> Mapping[str, SumOf]:
    """Return the sums that a feature asks for beside the model's."""
    terms = made.terms()
    return {} if terms is None else terms.sums(run.image.layout.num_parameters)


def _guarded(kind: type[ServerFeature], what: str, **own: Any) -> Any:
    """Return a subclass whose moments say, where they raise, which feature it was."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def moment(*args: Any, **kwargs: Any) -> Any:
            with running(what, remedy=REMEDY):
                return function(*args, **kwargs)

        return moment

    moments = {
        name: within(function)
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }
    return type(kind.__name__, (kind,), {**moments, **own})


def _overrides(kind: type | None, name: str) -> bool:
    function = getattr(kind, name, None)
    return function is not None and not function.__module__.startswith("headwater.client.")


def _check_moments(server: type, device: type | None, *, what: str) -> None:
    """Check that no method is a misspelled moment.

    Raises:
        SettingsError: one is named almost as a moment.
    """
    for kind in filter(None, (server, device)):
        moments = {name for one in kind.__mro__[1:] for name in vars(one) if name[0] != "_"}
        for name in vars(kind):
            near = difflib.get_close_matches(name, moments, n=1, cutoff=0.85)
            if name not in moments and near:
                raise SettingsError(
                    f"{what} has a {name}, which nothing calls", remedy=f"name it {near[0]}"
                )
