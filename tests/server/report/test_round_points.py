"""A round's figures for the page: the same from a live row and from its line in rounds.jsonl."""

from __future__ import annotations

import json
import math

from headwater.server.operations.round_log import row_to_dict
from headwater.server.report.round_points import MAX_NAME_CHARACTERS, point_of
from tests.round_rows import masked, row


def test_a_live_row_and_its_line_give_the_same_figures() -> None:
    live = row(3, "a", "b", virtual_seconds=7.0, masked_clients=[masked("m")])
    line = json.loads(json.dumps(row_to_dict(live)))
    assert point_of(live) == point_of(line)
    assert (point_of(live)["k_min"], point_of(live)["k_max"]) == (2, 5)


def test_a_hidden_loss_and_a_broken_metric_are_unknown() -> None:
    point = point_of(row(1, "a", loss=math.nan, metrics={"test_loss": math.inf}))
    assert point["loss"] is None
    assert point["metrics"] == {"test_loss": None}


def test_a_line_of_an_earlier_version_lacks_fields_and_is_shown() -> None:
    line = row_to_dict(row(1, "a"))
    later = ("epsilon", "left_out", "masked_clients", "virtual_seconds", "client_seconds")
    for name in (*later, "num_epoch_examples"):
        del line[name]
    assert point_of(line)["num_left_out"] == 0
    assert point_of(line)["epsilon"] is None
    assert point_of(line)["num_epoch_examples"] is None
    assert point_of(line)["client_split"] == {}


def test_names_of_metrics_are_cut_and_printable() -> None:
    point = point_of(row(1, "a", metrics={"\x1b[31m" + "x" * 500: 1.0}))
    (name,) = point["metrics"]
    assert "\x1b" not in name
    assert len(name) <= MAX_NAME_CHARACTERS
