"""Orders to a running server, and the run's state after each."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.common.errors import StateError
from headwater.server.operations import orders
from headwater.server.operations.orders import Order, RunState, Verb, run_state


def order(verb: Verb) -> Order:
    return Order(verb=verb, at=1.0)


@pytest.mark.parametrize("verb", ["pause", "resume", "drain"])
def test_an_order_is_read_back(verb: Verb, tmp_path: Path) -> None:
    assert orders.read_order(tmp_path) is None
    given = orders.write_order(tmp_path, verb)
    assert orders.read_order(tmp_path) == given == Order(verb=verb, at=given.at)


def test_a_later_order_replaces_an_earlier_one(tmp_path: Path) -> None:
    orders.write_order(tmp_path, "drain", now=1.0)
    assert orders.write_order(tmp_path, "pause", now=2.0) == orders.read_order(tmp_path)


@pytest.mark.parametrize("text", ["", "pause", "[]", '{"verb": "stop", "at": 1}', '{"at": 1}'])
def test_a_malformed_order_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / orders.FILE).write_text(text)
    with pytest.raises(StateError, match=r"order\.json is not an order"):
        orders.read_order(tmp_path)


def test_an_order_to_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write the order"):
        orders.write_order(tmp_path / "nowhere", "pause")


def test_a_pause_outlasts_a_restart_and_a_drain_does_not() -> None:
    assert orders.order_at_start(order("pause")) == order("pause")
    assert orders.order_at_start(order("drain")) is None
    assert orders.order_at_start(order("resume")) is None
    assert orders.order_at_start(None) is None


@pytest.mark.parametrize(
    ("verb", "in_a_round", "between"),
    [
        (None, "in a round", "waiting"),
        ("resume", "in a round", "waiting"),
        ("pause", "pausing", "paused"),
        ("drain", "draining", "draining"),
    ],
)
def test_a_round_in_progress_ends_before_an_order_takes_effect(
    verb: Verb | None, in_a_round: RunState, between: RunState
) -> None:
    given = None if verb is None else order(verb)
    assert run_state(given, is_in_round=True) == in_a_round
    assert run_state(given, is_in_round=False) == between
