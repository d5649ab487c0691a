"""``headwater.take_part``: requests to stop at any moment."""

from __future__ import annotations

from pathlib import Path

from headwater.client.api import Participation
from headwater.client.commands import connection_of
from headwater.common.settings.sources import load
from tests.python_tasks import SIGNS


def test_a_request_to_stop_after_the_loop_was_closed_changes_nothing(tmp_path: Path) -> None:
    chosen = {"task": SIGNS, "client.state": tmp_path, "check_task": False, "threads": 1}
    with connection_of(load(None, chosen)) as connection:
        participation = Participation(connection, stay=False)
        connection.stop()
        participation.run()  # ends at once, without a connection
        participation.stop()
        participation.stop_at_once()
