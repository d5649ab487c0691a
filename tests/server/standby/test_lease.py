"""A term: who may take one, and what its holder can still do when another server has the next."""

from __future__ import annotations

import itertools
import queue
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.common.errors import CheckpointCorrupt, TermEnded
from headwater.server.standby.lease import Lease
from headwater.server.standby.shared_folder import SharedFolder
from headwater.server.standby.term_record import NAME, Stands, TermRecord, may_take_over

SECONDS = 0.02


def taken(store: SharedFolder) -> Lease:
    """Return the next term of whatever the store holds."""
    found = store.read(NAME)
    before, version = (TermRecord(), None) if found is None else (TermRecord.of(found[0]), found[1])
    lease = Lease.take(store, before, version, term_seconds=SECONDS)
    assert lease is not None
    return lease


def there(store: SharedFolder) -> TermRecord:
    found = store.read(NAME)
    assert found is not None
    return TermRecord.of(found[0])


def test_the_holder_of_an_older_term_commits_nothing_and_knows_it_from_then_on(
    tmp_path: Path,
) -> None:
    store = SharedFolder(tmp_path)
    old = taken(store)
    old.commit(lambda record: replace(record, round=1))
    new = taken(store)
    assert (old.record.term, new.record.term, new.record.round) == (1, 2, 1)
    old.check()  # it has not looked
    with pytest.raises(TermEnded, match=r"term 1 of this server has ended: .* has term 2"):
        old.commit(lambda record: replace(record, round=2))
    with pytest.raises(TermEnded):
        old.check()
    old.release(lambda record: replace(record, stands="free"))
    assert there(store) == new.record
    new.commit(lambda record: replace(record, round=2))
    assert (there(store).round, there(store).stands) == (2, "serving")


def test_two_servers_that_want_the_same_term_do_not_both_get_it(tmp_path: Path) -> None:
    store = SharedFolder(tmp_path)
    leases = [Lease.take(store, TermRecord(), None, term_seconds=SECONDS) for _ in range(2)]
    assert [lease is not None for lease in leases] == [True, False]


class Faulty(SharedFolder):
    """A store over a network that fails: before it has written, or after."""

    fails_before = fails_after = False

    def write_if_unchanged(self, name: str, content: bytes, version: str | None) -> str | None:
        if self.fails_before:
            raise OSError("no route")
        written = super().write_if_unchanged(name, content, version)
        if self.fails_after:
            raise OSError("no answer")
        return written


def test_a_write_whose_answer_was_lost_does_not_end_the_term(tmp_path: Path) -> None:
    store = Faulty(tmp_path)
    lease = taken(store)
    store.fails_after = True
    with pytest.raises(OSError, match="no answer"):
        lease.commit(lambda record: replace(record, round=1))
    store.fails_after = False
    lease.commit(lambda record: replace(record, round=2))
    assert there(store).round == 2


def test_a_holder_that_cannot_reach_the_store_ends_when_its_term_has_lapsed(tmp_path: Path) -> None:
    store, ticks = Faulty(tmp_path), itertools.count(step=SECONDS / 2)
    taken(store)
    found = store.read(NAME)
    assert found is not None
    lease = Lease(store, TermRecord.of(found[0]), found[1], clock=lambda: next(ticks))
    store.fails_before = True
    lease.start()
    lease._thread.join()
    with pytest.raises(TermEnded, match=r"could not be renewed for .* no route"):
        lease.check()


def test_a_term_is_renewed_until_it_is_released(tmp_path: Path) -> None:
    store = SharedFolder(tmp_path)
    lease = taken(store)
    lease.start()
    while there(store).beat < 4:
        pass
    lease.release(lambda record: replace(record, stands="finished"))
    assert there(store).stands == "finished"
    assert not lease._thread.is_alive()


@pytest.mark.parametrize(
    ("stands", "unchanged_seconds", "may"),
    [
        ("serving", 9.9, False),
        ("serving", 10.0, True),
        ("free", 0.0, True),
        ("drained", 1e9, False),
        ("failed", 1e9, False),
        ("finished", 1e9, False),
    ],
)
def test_a_standby_takes_over_from_a_silent_or_ended_server_alone(
    stands: Stands, unchanged_seconds: float, may: bool
) -> None:
    record = TermRecord(stands=stands, term_seconds=10.0)
    assert may_take_over(record, unchanged_seconds=unchanged_seconds) == may


def test_a_record_comes_back_as_it_was_and_a_damaged_one_is_named() -> None:
    record = TermRecord(term=3, holder="a:1-2", files={"x": "1-1-x"}, log_pieces=("1-2-log",))
    assert TermRecord.of(record.to_bytes()) == record
    for content in (b"", b"[]", b"{}", b'{"log_pieces": [], "other": 1}'):
        with pytest.raises(CheckpointCorrupt):
            TermRecord.of(content)


def test_a_server_whose_store_does_not_answer_ends_so_that_its_devices_find_the_other(
    tmp_path: Path,
) -> None:
    """As on a network's file system whose server is away: the call does not return."""
    is_back, statuses = threading.Event(), queue.Queue[int]()

    class Silent(SharedFolder):
        def write_if_unchanged(self, name: str, content: bytes, version: str | None) -> str | None:
            is_back.wait()
            return super().write_if_unchanged(name, content, version)

    record = TermRecord(term=1, term_seconds=SECONDS)
    lease = Lease(
        Silent(tmp_path), record, "1", end_process=statuses.put, min_silent_seconds=SECONDS
    )
    lease.start()
    assert statuses.get(timeout=60.0) == 1
    is_back.set()
