"""A device's share of all weight, as curves.png, the page and the last lines of a run have it."""

from __future__ import annotations

import pytest

from headwater.server.operations.curves import weight_shares
from headwater.server.operations.progress import print_weights
from headwater.server.operations.round_log import row_to_dict
from headwater.server.report.round_points import parts_of
from tests.round_rows import client, masked, row


def test_shares_are_of_all_rounds_the_largest_first() -> None:
    first = row(1, clients=[client("a", weight=1), client("b", weight=5)])
    second = row(2, clients=[client("c", weight=4)])
    rows = [row_to_dict(one) for one in (first, second)]
    assert weight_shares(rows) == [("b", 0.5), ("c", 0.4), ("a", 0.1)]


def test_of_a_masked_round_they_are_the_plans() -> None:
    rows = [row_to_dict(row(1, masked_clients=[masked("m"), masked("n")]))]
    assert weight_shares(rows) == [("m", 0.5), ("n", 0.5)]


def test_without_any_weight_all_are_0() -> None:
    rows = [row_to_dict(row(1, clients=[client("a", weight=0)]))]
    assert weight_shares(rows) == [("a", 0.0)]


@pytest.mark.parametrize("weights", [(1, 3), (0, 0)])
def test_the_page_has_each_device_s_share_of_the_round(weights: tuple[int, int]) -> None:
    clients = [client(name, weight=own) for name, own in zip("ab", weights, strict=True)]
    found = parts_of(row(1, clients=clients))
    total = sum(weights) or 1
    shares = [found.point(at)["weight_share"] for at in range(2)]
    assert shares == [own / total for own in weights]


def test_the_last_lines_name_the_largest_and_the_smallest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clients = [client(f"pi{part}", weight=part) for part in range(1, 11)]
    print_weights([row_to_dict(row(1, clients=clients))])
    out = " ".join(capsys.readouterr().out.split())
    assert out == (
        "shares by weight, of 10 devices: most pi10 18.2 %, pi9 16.4 %, pi8 14.5 %; "
        "least pi3 5.45 %, pi2 3.64 %, pi1 1.82 %"
    )
