"""The plans that clients may still answer, in memory and in a file of the run's folder.

A client that lost its link goes on under its last plan (--offline-windows) and delivers when it is
back, perhaps to a server that was started again. So the plans are written down before they are
sent; the plan's round, which the update names, says which one it belongs to. Without offline
windows nothing is written: an update that was out when the server stopped is then computed again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from pydantic import ValidationError

from headwater.common.errors import StateError
from headwater.common.messages import Plan
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.server.planning.plan_messages import algorithm_of

log = logging.getLogger(__name__)

FILE = "plans.json"


class PlansOut:
    """Each client's plans by their rounds, the newest last."""

    def __init__(self, settings: Settings) -> None:
        chosen = settings.asynchronous
        self._is_kept = chosen.offline_windows > 1
        self._max_staleness = chosen.max_staleness
        self._path = None if settings.out is None else settings.out / FILE
        self._algorithm = algorithm_of(settings)
        """What the plans of this server say of the algorithm."""
        self._plans: dict[str, dict[int, Plan]] = {}

    def restore(self, *, version: int, counted: Mapping[str, int]) -> None:
        """Read the file of an earlier server; a damaged one counts as empty.

        It may be older or newer than the checkpoint of the model ``version``. Left out are plans
        that were counted (``counted``: the last round of each client), plans of models that this
        server has not made, and plans of another algorithm, whose updates are no like sums.
        """
        if not self._is_kept or self._path is None:
            return

        def is_open(name: str, plan: Plan) -> bool:
            is_new = plan.round > counted.get(name, 0) and plan.model_version <= version
            return is_new and (plan.local, plan.algorithm) == self._algorithm

        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._plans = {
                name: {plan.round: plan for plan in plans if is_open(name, plan)}
                for name, texts in found.items()
                for plans in [map(Plan.model_validate_json, texts)]
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, AttributeError, ValidationError) as error:
            log.warning(
                "%s cannot be read, so that updates of earlier plans are refused: %s",
                self._path,
                error,
            )

    def add(self, plans: Mapping[str, Plan], *, version: int) -> bool:
        """Note plans before they are sent with the model ``version``, and drop those too stale.

        Returns whether the file was written.

        Raises:
            StateError: the file cannot be written.
        """
        if not self._is_kept:
            return False
        for name, plan in plans.items():
            self._plans.setdefault(name, {})[plan.round] = plan
        oldest = version - self._max_staleness
        for name, own in list(self._plans.items()):
            left = {number: one for number, one in own.items() if one.model_version >= oldest}
            self._plans[name] = left
            if not left:
                del self._plans[name]
        if self._path is None or not plans:
            return False
        plain = {
            name: [one.model_dump_json() for one in own.values()]
            for name, own in self._plans.items()
        }
        try:
            write_atomically(self._path, json.dumps(plain).encode())
        except OSError as error:
            raise StateError(f"cannot write {self._path}: {error.strerror}") from error
        return True

    def of(self, name: str, round_number: int) -> Plan | None:
        """Return the plan of a round that a client may answer; None if there is none."""
        return self._plans.get(name, {}).get(round_number)

    def remove(self, name: str, round_number: int) -> None:
        """Forget a client's plans up to a round, because it has answered that one."""
        own = self._plans.get(name, {})
        self._plans[name] = {number: one for number, one in own.items() if number > round_number}
