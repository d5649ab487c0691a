"""Numbers of secure sessions: strictly increasing for each round, also after a restart."""

from __future__ import annotations

from pathlib import Path

from headwater.common.secagg.protocol import SessionNumber
from headwater.server.secagg.session_counter import SessionNumbers

RUN = 7


def test_sessions_of_an_earlier_round_s_plans_have_numbers_of_their_own(tmp_path: Path) -> None:
    """As in asynchronous rounds, where the updates of an earlier model are late."""
    numbers = SessionNumbers(tmp_path, run_id=RUN)
    found = [numbers.next(round_number) for round_number in (1, 5, 3, 5, 3, 6, 5)]
    expected = [(1, 1), (5, 1), (3, 1), (5, 2), (3, 2), (6, 1), (5, 3)]
    assert found == [SessionNumber(*pair) for pair in expected]


def test_a_server_that_starts_again_goes_on_after_the_highest_number(tmp_path: Path) -> None:
    before = SessionNumbers(tmp_path, run_id=RUN)
    for round_number in (5, 6, 6, 3, 5):
        before.next(round_number)
    again = SessionNumbers(tmp_path, run_id=RUN)
    assert [again.next(6), again.next(7)] == [SessionNumber(6, 3), SessionNumber(7, 1)]
    assert SessionNumbers(tmp_path, run_id=RUN + 1).next(6) == SessionNumber(6, 1)


def test_rounds_that_come_again_after_an_older_checkpoint_repeat_no_number(tmp_path: Path) -> None:
    SessionNumbers(tmp_path, run_id=RUN).next(7)
    again = SessionNumbers(tmp_path, run_id=RUN)
    found = [again.next(round_number) for round_number in (5, 6, 5, 7, 8, 6, 8)]
    assert len(set(found)) == len(found)
    first = [found[at] for at in (0, 1, 3, 4)]
    assert sorted(first) == first  # each device meets increasing numbers
