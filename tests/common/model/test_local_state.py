"""A device's own parameters: a counted step is kept once, every other step is dropped."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.client.flower.state_file import local_file
from headwater.common.errors import StateError
from headwater.common.model.local_state import LocalState, LocalStore
from headwater.common.model.parameters import build_model
from tests.tasks import TwoLayers

LAYOUT = build_model(TwoLayers(), seed=0, local_parameters="1.*").layout
OTHER = build_model(TwoLayers(), seed=0, local_parameters="0.*").layout
VALUES = torch.tensor([1.0, 2.0, 3.0])


@given(
    attempts=st.lists(
        st.lists(st.sampled_from(["lost", "restart", "counted"]), min_size=1, max_size=4),
        max_size=6,
    )
)
def test_each_counted_round_is_one_step_however_often_it_was_tried(
    attempts: list[list[str]],
) -> None:
    """A round is tried until an attempt counts; after a loss the server may also go on without."""
    kept: list[bytes] = []
    store = LocalStore("a test", lambda: kept[-1] if kept else None, kept.append)
    counted, num_counted = None, 0
    for number, tries in enumerate(attempts, start=1):
        for attempt in tries:
            state = store.read(LAYOUT) or LocalState(values_L=torch.zeros(3))
            state = state.settle(counted)
            assert state.values_L.tolist() == [num_counted] * 3
            assert state.round == counted
            if attempt == "restart":  # before anything was stored
                continue
            store.write(state.pend(number, state.values_L + 1), LAYOUT)
            if attempt == "counted":
                counted, num_counted = number, num_counted + 1
                break


def test_a_file_holds_both_values_to_the_bit_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "pi-7.local.safetensors"
    store = local_file(path)
    assert store.read(LAYOUT) is None
    state = LocalState(values_L=VALUES / 3, round=4).pend(5, VALUES / 7)
    store.write(state, LAYOUT)
    found = store.read(LAYOUT)
    assert found is not None
    assert found.pending_L is not None
    assert (found.round, found.pending_round) == (4, 5)
    assert torch.equal(found.values_L, VALUES / 3)
    assert torch.equal(found.pending_L, VALUES / 7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_of_other_parameters_or_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pi.safetensors"
    local_file(path).write(LocalState(values_L=VALUES), LAYOUT)
    with pytest.raises(StateError, match="belongs to another model, or to other --local-param"):
        local_file(path).read(OTHER)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateError, match="is damaged"):
        local_file(path).read(LAYOUT)
    path.write_bytes(b"")
    with pytest.raises(StateError, match="is damaged"):
        local_file(path).read(LAYOUT)


def test_a_folder_that_cannot_be_written_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = local_file(tmp_path / "file" / "pi.safetensors")
    with pytest.raises(StateError, match="cannot be written"):
        store.write(LocalState(values_L=VALUES), LAYOUT)
