"""Orders to a running server: pause, resume, drain; left in the run's folder, found by the server.

An order is one small file, written whole or not at all; the server looks for it four times a
second. No port is opened for it: whoever may write into the run's folder may give orders. A round
in progress always ends first, so that no device's work is lost.

| order | after the round in progress | and then |
| --- | --- | --- |
| pause | no round begins; the devices stay connected and are told | until ``resume`` |
| resume | rounds begin again | |
| drain | the server says goodbye to the devices and ends with status 0 | ``--resume`` goes on |

A pause outlasts a restart of the server, as the reason for it may; a drain is done with its server.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from headwater.common.errors import StateError
from headwater.common.system.atomic_file import write_whole

FILE = "order.json"

Verb = Literal["pause", "resume", "drain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What an operator wants of the server, and since when, in seconds since 1970."""

    verb: Verb
    at: float


def give(folder: Path, verb: Verb, *, now: float | None = None) -> Order:
    """Leave an order for the server.

    Raises:
        StateError: the folder cannot be written.
    """
    order = Order(verb=verb, at=time.time() if now is None else now)
    try:
        write_whole(folder / FILE, json.dumps(asdict(order)).encode())
    except OSError as error:
        raise StateError(
            f"the order cannot be left in {folder}: {error.strerror}",
            remedy="give it as the user that the server runs as",
        ) from error
    return order


def standing(folder: Path) -> Order | None:
    """Return the order that stands; None if there is none.

    Raises:
        StateError: there is something that is no order, or it cannot be read.
    """
    path = folder / FILE
    try:
        told = json.loads(path.read_text())
        verb, at = told["verb"], float(told["at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} is no order: {error}", remedy="remove it") from error
    if verb not in get_args(Verb):
        raise StateError(f"{path} is no order: {verb!r}", remedy="remove it")
    return Order(verb=verb, at=at)


def at_start(order: Order | None) -> Order | None:
    """Return what of an order holds for a server that begins now: a pause does."""
    return order if order is not None and order.verb == "pause" else None
