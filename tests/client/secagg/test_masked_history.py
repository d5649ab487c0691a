"""The file of what a device has masked in all of its runs."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sized
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.secagg.masked_history import HistoryFile, from_ranges, to_ranges
from headwater.common.errors import StateError, UpdateAlreadyMasked

ONE, OTHER = bytes(32), bytes([1] * 32)


def test_examples_are_kept_by_model_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pi-masked.jsonl"
    first = HistoryFile(path)
    first.add(ONE, (3, 1, 2))
    first.add(OTHER, (7,))
    first.add(ONE, (9,))
    again = HistoryFile(path)
    for history in (first, again):
        assert history.masked_at(ONE) == {1, 2, 3, 9}
        assert history.masked_at(OTHER) == {7}
        assert history.masked_at(bytes([2] * 32)) == frozenset()
    assert again.order_seed(0, 1) == first.order_seed(0, 1)
    assert len({again.order_seed(0, 1), again.order_seed(0, 2), again.order_seed(1, 1)}) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ONE.hex() not in path.read_text()


def test_a_line_that_was_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "pi-masked.jsonl"
    HistoryFile(path).add(ONE, (1, 2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"model":"ab')
    again = HistoryFile(path)
    assert again.masked_at(ONE) == {1, 2}
    again.add(ONE, (5,))
    assert HistoryFile(path).masked_at(ONE) == {1, 2, 5}


def test_an_update_whose_line_the_disk_took_in_part_is_not_masked(tmp_path: Path) -> None:
    """A write may take a part and raise nothing: after a restart, the line would be missing."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "pi-masked.jsonl"
    history = HistoryFile(path)
    history.add(ONE, (1, 2))
    before, whole = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))
        with pytest.raises(StateError, match="cannot write"):
            history.add(ONE, (7,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == whole
    history.add(ONE, (8,))
    assert HistoryFile(path).masked_at(ONE) == history.masked_at(ONE) == {1, 2, 8}


@pytest.mark.parametrize("text", ["", "{}\n", '{"secret":"00"}\n', "[1]\n", '{"secret":7}\n'])
def test_a_broken_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pi-masked.jsonl"
    path.write_text(text)
    with pytest.raises(StateError, match="cannot be read"):
        HistoryFile(path)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_the_same_numbers(numbers: set[int]) -> None:
    assert from_ranges(to_ranges(list(numbers))) == numbers


def test_two_processes_of_a_device_mask_no_example_twice_at_a_model(tmp_path: Path) -> None:
    """Two runs under the default names: each process has read the file before the other masked."""
    path = tmp_path / "pi-masked.jsonl"
    one, other = HistoryFile(path), HistoryFile(path)
    one.add(ONE, [1, 2, 3])
    with pytest.raises(UpdateAlreadyMasked, match="another process of this device has masked 2"):
        other.add(ONE, [2, 3, 4])
    assert other.masked_at(ONE) == {1, 2, 3}  # its next plan leaves them out
    other.add(ONE, [4, 5])
    other.add(OTHER, [2])
    one.add(ONE, [6])
    assert one.masked_at(ONE) == {1, 2, 3, 4, 5, 6}
    assert HistoryFile(path).masked_at(ONE) == {1, 2, 3, 4, 5, 6}


@pytest.mark.slow
def test_processes_that_begin_at_once_have_one_secret(tmp_path: Path) -> None:
    path, begin = tmp_path / "pi-masked.jsonl", tmp_path / "begin"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from headwater.client.secagg.masked_history import HistoryFile\n"
        "path, begin, told = map(Path, sys.argv[1:])\n"
        "while not begin.exists(): time.sleep(0.001)\n"
        "told.write_text(str(HistoryFile(path).order_seed(1, 2)))"
    )
    told = [tmp_path / str(number) for number in range(4)]
    begun = [subprocess.Popen([sys.executable, "-c", script, path, begin, one]) for one in told]
    time.sleep(1.0)  # they have imported what they need
    begin.touch()
    assert [process.wait() for process in begun] == [0] * 4
    assert len({one.read_text() for one in told}) == 1


class Named(Sized):
    """Examples that have names."""

    def __init__(self, *names: str) -> None:
        self.example_names = names

    def __len__(self) -> int:
        return len(self.example_names)

    def __getitem__(self, at: int) -> str:
        return self.example_names[at]


@pytest.mark.parametrize(
    ("after", "is_same"),
    [
        (Named("a", "b", "c"), True),
        (Named("a", "a2", "b", "c"), False),
        (Named("a", "b", "d"), False),
        (Named("b", "a", "c"), False),
    ],
)
def test_at_a_model_no_example_is_masked_of_data_that_have_changed(
    tmp_path: Path, after: Named, is_same: bool
) -> None:
    """The history has numbers: a file that sorts first makes another example of each."""
    path = tmp_path / "pi-masked.jsonl"
    first = HistoryFile(path)
    first.check_data(Named("a", "b", "c"), ONE)
    first.add(ONE, (0, 1), num_planned=2)
    again = HistoryFile(path)
    again.check_data(after, OTHER)
    if is_same:
        again.check_data(after, ONE)
    else:
        for history in (again, HistoryFile(path)):
            with pytest.raises(UpdateAlreadyMasked):
                history.check_data(after, ONE)
            with pytest.raises(UpdateAlreadyMasked):
                history.check_data(Named("a", "b", "c"), ONE)
    again.add(OTHER, (0, 1), num_planned=2)
    assert HistoryFile(path).masked_at(OTHER) == {0, 1}


def test_a_file_of_an_earlier_version_goes_on_with_the_data_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "pi-masked.jsonl"
    HistoryFile(path).add(ONE, (0, 1), num_planned=2)
    HistoryFile(path).check_data(Named("a", "b"), ONE)


def test_an_update_was_masked_only_if_it_was_in_a_session_itself(tmp_path: Path) -> None:
    """Not because another one at its model was: what it would have sent is in no sum."""
    path = tmp_path / "pi-masked.jsonl"
    HistoryFile(path).add(ONE, (0, 1), num_planned=2, update_id="of round 1")
    HistoryFile(path).add(ONE, (2, 3), num_planned=2, update_id="a test of this model")
    for history in (HistoryFile(path), HistoryFile(path)):
        assert history.was_masked("of round 1", ONE, num_planned_before=0)
        assert not history.was_masked("of round 2", ONE, num_planned_before=0)
        assert history.num_planned_at(ONE) == 4
    assert "of round 1" not in path.read_text()  # names are keyed, as models are
    # A line of an earlier version may be the update's own.
    HistoryFile(path).add(ONE, (4, 5), num_planned=2)
    history = HistoryFile(path)
    assert history.was_masked("of round 2", ONE, num_planned_before=0)
    assert not history.was_masked("of round 2", ONE, num_planned_before=2)
    assert not history.was_masked("of round 2", OTHER, num_planned_before=0)
