"""Points of a round at which a process kills itself, each a call of our own code.

A process that is armed counts its calls of one function from the moment on that a file appears, and
sends itself SIGKILL before or behind one of them. Nothing else in it is changed: it is the real
process, and the kernel ends it as it would for anybody's SIGKILL.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.faults import Death, Side


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Before or behind a call; or "in" it: a file is written so far, as its first argument's."""

    side: Side
    target: str
    when: Literal["before", "behind", "in"]


def point_of_server(target: str, when: Literal["before", "behind", "in"] = "before") -> Point:
    return Point(side="server", target=f"headwater.server.{target}", when=when)


def point_of_client(target: str, when: Literal["before", "behind", "in"] = "before") -> Point:
    return Point(side="client", target=f"headwater.client.{target}", when=when)


# In the order of a round.
POINTS = {
    "before the plans": point_of_server("planning.round_plans:RoundPlanner.plan"),
    "plans sent": point_of_server("transport.servicer:Servicer.send_instructions", "behind"),
    "first update announced": point_of_server("transport.uploads:Uploads.announce"),
    "in mid-upload": point_of_server("transport.uploads:Uploads.take_chunk"),
    "uploaded, not verified": point_of_server("transport.staging:StagedUpload.verify"),
    "acknowledged, not folded": point_of_server("rounds.open_round:OpenRound.take"),
    "folded": point_of_server("rounds.open_round:OpenRound.take", "behind"),
    "stepped": point_of_server("rounds.run_state:Training.commit", "behind"),
    "noted": point_of_server("operations.round_log:RoundLog.stepped", "behind"),
    "before the checkpoint": point_of_server("rounds.checkpoint:save"),
    "in the checkpoint": point_of_server("rounds.checkpoint:write_tensors", "in"),
    "behind the checkpoint": point_of_server("rounds.checkpoint:save", "behind"),
    "before the shared commit": point_of_server("standby.lease:Lease.commit"),
    "summed, not sent": point_of_server("tree.aggregator:Aggregator.train", "behind"),
    "before its plan": point_of_client("transport.exchange:Exchange.take_instruction"),
    "plan received": point_of_client("flower.node:Node.answer"),
    "training": point_of_client("training.window_sum:WindowSum.add"),
    "between micro-batches": point_of_client("training.spool:SpooledWindow.save", "behind"),
    "trained, place not kept": point_of_client("flower.state_file:StateFile.write"),
    "trained, place kept": point_of_client("flower.state_file:StateFile.write", "behind"),
    "in its upload": point_of_client("transport.lasting_connection:Connection._write"),
    "uploaded, not acknowledged": point_of_client("transport.exchange:Exchange.take_receipt"),
    "acknowledged": point_of_client("transport.exchange:Exchange.take_receipt", "behind"),
    "handed over": point_of_client("flower.node:Node.delivered", "behind"),
}


def arm(death: Death, trigger: Path) -> None:
    """Let this process die as it is told, once ``trigger`` is there."""
    arm_at(
        POINTS[death.point],
        trigger,
        call=death.call,
        after_bytes=death.after_bytes,
        number=death.number,
    )


def arm_at(
    point: Point,
    trigger: Path,
    *,
    call: int = 1,
    after_bytes: int | None = None,
    number: signal.Signals = signal.SIGKILL,
) -> None:
    """Let this process die at a point, which need not be one of ``POINTS``."""
    module_name, _, path = point.target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    dying = _dying(getattr(owner, name), _Calls(call, trigger), point, after_bytes, number)
    setattr(owner, name, dying)


class _Calls:
    """Counts calls; ``is_last`` says whether this one is it."""

    def __init__(self, number: int, trigger: Path) -> None:
        self._left, self._trigger = number, trigger

    def is_last(self) -> bool:
        if self._trigger.exists():
            self._left -= 1
        return self._left == 0


def _dying(
    whole: Callable[..., Any],
    calls: _Calls,
    point: Point,
    after_bytes: int | None,
    number: signal.Signals,
) -> Callable[..., Any]:
    """Return the function as it is, but for one call."""

    @functools.wraps(whole)
    def dying(*arguments: Any, **named: Any) -> Any:
        is_last = calls.is_last()
        if is_last and point.when == "before":
            die(number)
        done = whole(*arguments, **named)
        if is_last and point.when == "in":
            os.truncate(arguments[0], min(after_bytes or 0, arguments[0].stat().st_size))
        if is_last:
            die(number)
        return done

    @functools.wraps(whole)
    async def dying_later(*arguments: Any, **named: Any) -> Any:
        is_last = calls.is_last()
        if is_last and point.when == "before":
            die(number)
        done = await whole(*arguments, **named)
        if is_last:
            die(number)
        return done

    return dying_later if inspect.iscoroutinefunction(whole) else dying


def die(number: signal.Signals = signal.SIGKILL) -> None:
    """End this process at once, or stop it."""
    os.kill(os.getpid(), number)
